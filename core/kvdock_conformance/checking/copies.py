"""Copies of blocks within a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import kvdock
from kvdock_conformance.checking.calls import expect_refusal
from kvdock_conformance.checking.memory import Arenas, compare
from kvdock_conformance.checking.target import Target
from kvdock_conformance.reference import copy_blocks_

__all__ = ["check_copy_forms", "check_pairs_refused", "pair_name"]


def pair_name(place: Sequence[int]) -> str:
    """Return how an error about the id of a pair begins: ``block_pairs[3, `` and then 0 for the source or 1 for the destination."""
    return f"block_pairs[{place[0]}, "


def check_copy_forms(target: Target, data: Mapping[str, Any]) -> None:
    """Check copies whose pairs come as a list of pairs, and as a numpy array.

    Raises:
        NonconformanceError: a byte differs.
    """
    memory, call = Arenas(data["arenas"], target.device), data["calls"][0]
    args = {name: memory.tensor(spec) for name, spec in call["args"].items()}
    before, pairs = memory.copy(), args["block_pairs"].cpu()
    expected = memory.copy()
    copy_blocks_(*(expected.tensor(spec) for spec in call["args"].values()))
    for name, form in (("a list", pairs.tolist()), ("an array", pairs.numpy())):
        target.call(call["op"], {**args, "block_pairs": form})
        compare(memory, expected, call["args"], f"{call['op']} with {name} of pairs")
        for own, kept in zip(memory.bytes, before.bytes, strict=True):
            own.copy_(kept)


def check_pairs_refused(target: Target, data: Mapping[str, Any]) -> None:
    """Make a call whose pairs lie in host memory, where they can be read: what is wrong with them must raise, whatever the device.

    Args:
        target: the backend.
        data: the case, with ``error``, the name of the error's class in `kvdock`, and ``texts``, what its text must contain.

    Raises:
        NonconformanceError: it does not raise, says something else, or a byte has changed.
    """
    memory, call = Arenas(data["arenas"], target.device), data["calls"][0]
    args = {name: memory.tensor(spec) for name, spec in call["args"].items()}
    pairs = args["block_pairs"]
    strided = pairs.new_zeros(len(pairs), 3)[:, 1:].copy_(pairs)
    short = [pairs.int()] if bool((pairs.int() == pairs).all()) else []
    for form in (pairs, strided, *short, pairs.tolist()):
        expect_refusal(target, memory, call, {**args, "block_pairs": form}, getattr(kvdock, data["error"]), data["texts"])
