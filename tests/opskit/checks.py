"""An op against the reference, every byte compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis
import pytest
import torch

import kvdock
from kvdock_conformance import reference
from kvdock_conformance.reference import Place
from opskit.memory import Memory, bits_of
from opskit.targets import Target
from support_slow import examples

__all__ = ["PROPERTY", "check", "check_gather", "noting", "outcome_of"]

PROPERTY = hypothesis.settings(
    max_examples=examples(60),
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
"""Settings of the property tests: examples are the same in every run, and each starts with memory of its own."""

_INDEX = {
    "paged_caching_": 4,
    "static_update_": 4,
    "copy_blocks_": 2,
    "swap_blocks_": 2,
    "gather_paged": 2,
    "mla_caching_": 3,
    "mla_gather": 1,
}


def check(target: Target, memory: Memory, op: str, *args: Any) -> list[Place]:
    """Run an op and compare every byte of ``memory`` with what the reference makes of it.

    Where an index is out of range it must raise and change nothing if the host reads it, else be skipped and counted.

    Args:
        target: what to run on.
        memory: holds every tensor in ``args``.
        op: name of the op.
        args: its arguments as the public function takes them; for those that read with both outputs at the end.

    Returns:
        What the reference skipped.
    """
    expected = memory.copy()
    skipped = getattr(reference, op)(*map(expected.twin, args))
    call = _public(op, args)
    counted = target.skipped()
    if skipped and target.host_reads(args[_INDEX[op]]):
        before = memory.copy()
        with pytest.raises(kvdock.IndexRangeError, match=_named(op, skipped[0])):
            call()
        before.assert_same(f"{op} raised")
        assert target.skipped() == counted
        return skipped
    call()
    expected.assert_same(op)
    assert target.skipped() - counted == (0 if "gather" in op else len(skipped)), f"{op}: count of skipped writes"
    return skipped


def _public(op: str, args: Sequence[Any]) -> Callable[[], Any]:
    """Return the public function with its arguments."""
    function = getattr(kvdock.ops, op)
    if op == "mla_gather":
        return lambda: function(*args[:2], args[2].shape[-1], out=args[2:])
    return (lambda: function(*args[:3], out=args[3:])) if op == "gather_paged" else (lambda: function(*args))


def _named(op: str, place: Place) -> str:
    """Return what an error about an index must name: the first bad position."""
    if op == "static_update_":
        return rf"static_update_: cache_lengths(\[{place[0]}\])?: "
    if op in ("copy_blocks_", "swap_blocks_"):
        return rf"{op}: block_pairs\[{place[0]}, [01]\]: "
    return rf"{op}: slot_mapping\[{', '.join(map(str, place))}\]: "


def check_gather(target: Target, memory: Memory, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Read with outputs made by the op, and compare them, and that nothing else changed."""
    before = memory.copy()
    expected = [torch.zeros((*slots.shape, *cache.shape[2:]), dtype=cache.dtype) for cache in (k_cache, v_cache)]
    beyond = reference.gather_paged(*map(before.twin, (k_cache, v_cache, slots)), *expected)
    if beyond and target.host_reads(slots):
        with pytest.raises(kvdock.IndexRangeError, match=_named("gather_paged", beyond[0])):
            kvdock.ops.gather_paged(k_cache, v_cache, slots)
    else:
        for got, wanted in zip(kvdock.ops.gather_paged(k_cache, v_cache, slots), expected, strict=True):
            assert got.device == k_cache.device
            assert got.dtype == wanted.dtype
            assert torch.equal(bits_of(got), bits_of(wanted)), "gather_paged: bits differ"
    before.assert_same("gather_paged")


@contextlib.contextmanager
def noting(**words: Any) -> Iterator[Memory]:
    """Give one round of a loop memory of its own, and say which round failed. ``device`` is where the memory lies."""
    try:
        yield Memory(words.pop("device", "cpu"))
    except BaseException as error:
        error.add_note(", ".join(f"{name}={value!r}" for name, value in words.items()))
        raise


def outcome_of(call: Callable[[], Any]) -> tuple[type[BaseException] | None, str]:
    """Run a call, and return what it raised, with the text."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        return type(error), str(error)
    return None, ""
