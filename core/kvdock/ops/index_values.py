"""Checks on the values in index tensors, which must lie in host memory.

Kernels on the host call them before they write; debug mode calls them on copies of what lies elsewhere. Each raises before
anything is written and names the op and the first bad position; those named ``check`` return doubtful findings as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvdock.errors import ArgumentValueError, IndexRangeError
from kvdock.interface import HOST

__all__ = ["check_lengths", "check_pairs", "check_slots", "equal_slots", "live_pairs", "pairs_on_device", "slots_in_range"]

_FEW = 8
"""Up to so many values a Python loop is quicker than two reductions."""


def slots_in_range(op: str, slots: torch.Tensor, capacity: int) -> bool:
    """Return whether no slot is padding. Slots are int32 or int64 of any shape, at least one.

    Raises:
        IndexRangeError: a slot is not below ``capacity``, which is ``num_blocks * block_size``.
    """
    if slots.numel() <= _FEW:
        values = slots.flatten().tolist()
        low, high = min(values), max(values)
    else:
        pair = torch.aminmax(slots)
        low, high = int(pair.min), int(pair.max)
    if high >= capacity:
        place = (slots >= capacity).nonzero()[0].tolist()
        raise IndexRangeError(
            f"{op}: slot_mapping{place}",
            expected=f"a slot below {capacity} (num_blocks * block_size), or a negative one for padding",
            got=int(slots[tuple(place)]),
            fix="build slots as block_id * block_size + offset with block ids of this pool and its own block_size",
        )
    return bool(low >= 0)


def equal_slots(slots: torch.Tensor) -> list[str]:
    """Return a line about slots that occur twice in one call, if any: which of them wins is unspecified."""
    values, counts = torch.unique(slots[slots >= 0], return_counts=True)
    twice = values[counts > 1].tolist()
    return [f"{len(twice)} slots occur more than once, first {twice[0]}: which token wins is unspecified"] if twice else []


def check_slots(op: str, slots: torch.Tensor, capacity: int) -> list[str]:
    """Raise on a slot outside the pool; return a line about equal ones. See `slots_in_range`."""
    if slots.numel() == 0:
        return []
    slots_in_range(op, slots, capacity)
    return equal_slots(slots)


def check_lengths(op: str, lengths: Sequence[int], new: int, capacity: int) -> list[str]:
    """Raise unless ``new`` more positions fit behind each length: those taken in each row, or in all.

    Raises:
        IndexRangeError: a length is negative, or ``length + new > capacity``, the positions that a row has.
    """
    room = f"between 0 and {capacity - new}" if new <= capacity else "none"
    for row, length in enumerate(lengths):
        if length < 0 or length + new > capacity:
            raise IndexRangeError(
                f"{op}: cache_lengths[{row}]" if len(lengths) > 1 else f"{op}: cache_lengths",
                expected=f"{room}: {new} new positions must fit into {capacity}",
                got=length,
                fix="count positions from 0" if length < 0 else "make the cache longer (max_cache_len), or pass fewer new positions",
            )
    return []


def check_pairs(op: str, pairs: torch.Tensor, num_blocks: int, *, num_sources: int | None = None) -> list[str]:
    """Raise as `live_pairs` does; nothing about pairs is doubtful."""
    live_pairs(op, pairs, num_blocks, num_sources=num_sources)
    return []


def live_pairs(op: str, pairs: torch.Tensor, num_blocks: int, *, num_sources: int | None = None) -> Sequence[Sequence[int]]:
    """Return the pairs ``[N, 2]`` (src, dst) that are no padding, which has a negative id, once their order does not matter.

    Args:
        op: name of the op, for errors.
        pairs: int32 or int64, in host memory.
        num_blocks: blocks of the pool.
        num_sources: blocks of the pool that sources are in, where that is another: then a source may have a destination's number.

    Raises:
        IndexRangeError: a block id is not below the number of blocks.
        ArgumentValueError: two pairs have one destination, or a destination is also a source.
    """
    if num_sources is not None:
        return list(_pairs_between(op, pairs, num_sources, num_blocks).tolist())
    ids = set(chain.from_iterable(rows := pairs.tolist()))
    # Almost every call: no id occurs twice, so no order matters. Half as long as the rest, which can name what is wrong.
    if len(ids) == 2 * len(rows) and (not ids or (min(ids) >= 0 and max(ids) < num_blocks)):
        return rows
    live = [(src, dst) for src, dst in rows if src >= 0 and dst >= 0]
    sources, destinations = {src for src, _ in live}, {dst for _, dst in live}
    if live and (max(sources) >= num_blocks or max(destinations) >= num_blocks):
        raise _range_error(op, pairs, (num_blocks, num_blocks), ("this pool", "this pool"))
    if len(destinations) < len(live) or not sources.isdisjoint(destinations):
        raise _pair_error(op, pairs, sources)
    return live


def _pairs_between(op: str, pairs: torch.Tensor, num_sources: int, num_blocks: int) -> npt.NDArray[np.integer[Any]]:
    """Return the pairs between two pools that are no padding: those of a long prompt are many, and looked at as one array."""
    ids: npt.NDArray[np.integer[Any]] = pairs.numpy()
    if ids.size and ids.min() < 0:
        ids = ids[(ids >= 0).all(1)]
    if ids.size:
        (sources, to), seen = ids.T, np.zeros(num_blocks, dtype=np.bool_)
        if sources.max() >= num_sources or to.max() >= num_blocks:
            raise _range_error(op, pairs, (num_sources, num_blocks), ("src_cache", "dst_cache"))
        seen[to] = True  # of a thousand ids a set takes twenty times as long, and the largest of each column in one call ten times
        if np.count_nonzero(seen) < len(ids):
            raise _pair_error(op, pairs, set())
    return ids


def _range_error(op: str, pairs: torch.Tensor, limits: tuple[int, int], pools: tuple[str, str]) -> IndexRangeError:
    """Name the first id that is not in its pool, of so many blocks."""
    place = ((pairs >= torch.tensor(limits, device=HOST)) & (pairs >= 0).all(1, keepdim=True)).nonzero()[0].tolist()
    return IndexRangeError(
        f"{op}: block_pairs{place}",
        expected=f"a block id below {limits[place[1]]}, or a negative one for padding",
        got=int(pairs[tuple(place)]),
        fix=f"pass (src, dst) block ids of {pools[place[1]]}, not slots",
    )


def pairs_on_device(op: str, pairs: torch.Tensor, num_blocks: int, device: torch.device, *, num_sources: int | None = None) -> torch.Tensor:
    """Check pairs as `live_pairs` does, and return on a device, without waiting for it, what was checked.

    The caller's may change as soon as this returns. For host memory they are returned themselves: kernels there are done
    when they return.
    """
    if device != pairs.device and pairs.is_pinned():
        # A copy from pinned memory reads it when the stream gets there, by when the caller may have filled it anew. One from
        # pageable memory has read it when it returns: it is staged.
        pairs = pairs.clone()
    live_pairs(op, pairs, num_blocks) if num_sources is None else _pairs_between(op, pairs, num_sources, num_blocks)
    if device == pairs.device:
        return pairs
    try:
        return pairs.to(device, non_blocking=True)
    except RuntimeError as error:  # above all while a graph is captured, where torch would ask for pinned memory
        error.add_note(f"{op}: block_pairs lie in host memory. Fix: to capture this call into a graph, pass them on {device}")
        raise


def _pair_error(op: str, pairs: torch.Tensor, sources: set[int]) -> ArgumentValueError:
    """Say which pair is the first to depend on the order of copies."""
    live = [(row, dst) for row, (src, dst) in enumerate(pairs.tolist()) if src >= 0 and dst >= 0]
    first: dict[int, int] = {}  # by destination, the first row that has it
    row, dst, twice = next((row, dst, first[dst] < row) for row, dst in live if first.setdefault(dst, row) < row or dst in sources)
    return ArgumentValueError(
        f"{op}: block_pairs[{row}]",
        expected=f"destinations that occur once{' and are no source' * bool(sources)}, so that the order of copies does not matter",
        got=f"destination {dst} {'twice' if twice else 'also as a source'}",
        fix="drop the doubled pair" if twice else "drop the pair" if pairs[row, 0] == dst else "split chained copies into two calls",
    )
