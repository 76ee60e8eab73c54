"""Calls of a prefix cache with arguments that it must refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError, OutOfBlocksError
from kvdock.prefix import PrefixCache
from kvdock_conformance.checking.prefix_model import SlowPrefixCache

__all__ = ["BAD_PRIORITIES", "BAD_SHAPES", "BAD_SIZES", "BAD_SPACES", "BAD_VALUES", "ON_A_DEVICE", "TYPE", "VALUE", "Refusal", "bad_call"]

Refusal = tuple[tuple[type[Exception], ...], Callable[[], object]]
"""The errors that a call may raise, and the call."""

BAD_VALUES: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "floats": lambda: [1.0],
        "float array": lambda: np.ones(3),
        "float tensor": lambda: torch.ones(3),
        "bools": lambda: [True],
        "strings": lambda: np.array(["a"]),
        "too big": lambda: [2**64],
        "none": lambda: [None],
        "text": lambda: "text",
    }
)
"""What are no integers."""

BAD_SHAPES: Mapping[str, tuple[int, ...]] = MappingProxyType({"of a table": (1, 1), "of a number": (), "of no rows": (0, 4)})
BAD_SPACES: Mapping[str, Any] = MappingProxyType({"list": [1], "text": "tenant", "none": None, "float": (1.0,), "nested list": ([],)})
ON_A_DEVICE = torch.zeros(6, dtype=torch.int64, device="meta")
BAD_SIZES: Mapping[str, Any] = MappingProxyType({"negative": -1, "float": 1.5, "text": "3", "none": None, "bool": True})
BAD_PRIORITIES: Mapping[str, Any] = MappingProxyType({"float": 1.0, "text": "high", "none": None})
TYPE, VALUE = (ArgumentTypeError,), (ArgumentValueError,)


def bad_call(
    cache: PrefixCache, model: SlowPrefixCache, step: Mapping[str, Any], tokens: Sequence[int], free: Sequence[int]
) -> Refusal | None:
    """Return a call that must be refused; None where there is no such call as things are.

    Args:
        cache: the cache under test.
        model: the slow one.
        step: ``call``, one of `kvdock_conformance.cases.prefix.BAD_CALLS`, and ``at``, where the bad block is.
        tokens: tokens that would be good.
        free: blocks that would be good.
    """
    subject, _, kind = step["call"].partition(" ")
    handle, size = cache.match_prefix(tokens, record=False).handle, cache.block_size
    if kind == "on a device":
        passed = (ON_A_DEVICE, range(6 // size)) if subject == "tokens" else ([7] * 6 * size, ON_A_DEVICE)
        return VALUE, lambda: cache.insert_prefix(*passed)
    if subject == "blocks" and kind not in BAD_VALUES:
        blocks = _bad_blocks(model, kind, step["at"], tokens, free)
        return None if blocks is None else (VALUE, lambda: cache.insert_prefix(tokens, blocks))
    if subject == "behind":
        own = [block.number for block in model.find(tokens, ())][: step["at"] + 1]
        good, space = (own, ()) if kind == "owned" else (free[-1:], ("elsewhere",))
        is_bad = own if kind == "owned" else True
        tokens = tokens[: size * len(good)]
        return (VALUE, lambda: cache.insert_prefix(tokens, good, space, behind=handle)) if is_bad else None
    calls: dict[str, Callable[[], Refusal]] = {
        "blocks": lambda: (TYPE, lambda: cache.insert_prefix([0] * size, BAD_VALUES[kind]())),
        "tokens": lambda: (TYPE, lambda: cache.match_prefix(BAD_VALUES[kind]())),
        "shape": lambda: (VALUE, lambda: cache.match_prefix(np.zeros(BAD_SHAPES[kind], dtype=np.int64))),
        "namespace": lambda: (TYPE, lambda: cache.insert_prefix([1] * size, [0], BAD_SPACES[kind])),
        "priority": lambda: (TYPE, lambda: cache.insert_prefix([1] * size, [0], priority=BAD_PRIORITIES[kind])),
        "evict": lambda: (TYPE + VALUE, lambda: cache.evict(BAD_SIZES[kind])),
        "keep": lambda: (TYPE + VALUE, lambda: cache.discard_prefix(handle, BAD_SIZES[kind])),
        "record": lambda: (TYPE + VALUE, lambda: cache.record_match(handle, BAD_SIZES[kind])),
    }
    if step["call"] == "evict too much":
        return (OutOfBlocksError,), lambda: cache.evict(model.size_info().evictable_size // size + 1)
    return calls[subject]()


def _bad_blocks(model: SlowPrefixCache, kind: str, at: int, tokens: Sequence[int], free: Sequence[int]) -> list[int] | None:
    """Return blocks for tokens that are wrong in one, or in number."""
    blocks = [block.number for block in model.find(tokens, ())]
    count = len(tokens) // model.block_size
    blocks += free[-1 : -count - 1 + len(blocks) : -1]
    at %= count
    taken = sorted({block.number for _, block in model.blocks()} - set(blocks))
    if (kind == "owned" and not taken) or (kind == "twice" and count == 1):
        return None
    if kind in ("short", "long"):
        return blocks[:-1] if kind == "short" else [*blocks, free[0]]
    high = 2**31 // model.block_size
    blocks[at] = {"owned": taken[at % len(taken)] if taken else 0, "twice": blocks[at - 1], "negative": -1, "high": high}[kind]
    return blocks
