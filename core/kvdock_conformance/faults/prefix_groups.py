"""Faults of prefix caches that a manager of several layer groups shows: it has more units than blocks, and matches what it found again."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from kvdock_conformance.faults.prefix import By
from kvdock_conformance.faults.prefix_seed import answered, faults_of

__all__ = ["FAULTS"]

_TABLE = """
ids-of-one-byte        | 032     | Block ids are kept in a byte each, as if no pool had more.
longer-match-again     | 001 032 | A match of less than was matched last, in the same namespace, returns that once more.
evicts-by-instance     | 032     | What is evicted first depends on how many caches were made before in the process.
"""

_SERIALS = itertools.count()


def _in_bytes(found: Any) -> Any:
    return found._replace(blocks=found.blocks.astype(np.int8).astype(np.int32))


def _again(cache: Any, match: Any, tokens: Any, space: Any = (), **how: Any) -> Any:
    ids, (last, where, found) = np.asarray(tokens).tolist(), vars(cache).get("last", ([], None, None))
    if found is not None and where == space and last != ids == last[: len(ids)] and ids:
        return found
    found = match(tokens, space, **how)
    cache.last = ids, space, found
    return found


def _by_instance(cache: Any, init: Any, block_size: int = 16, policy: Any = None) -> None:
    sign = 1 - 2 * (next(_SERIALS) % 2)
    init(block_size, By("of one's own", lambda usage: sign * usage.created))


FAULTS = faults_of(
    _TABLE,
    {
        "ids-of-one-byte": {"match_prefix": answered(_in_bytes)},
        "longer-match-again": {"match_prefix": _again},
        "evicts-by-instance": {"__init__": _by_instance},
    },
)
