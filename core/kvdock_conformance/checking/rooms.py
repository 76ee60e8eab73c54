"""Pieces of host memory that the arenas of a case lie in, filled with bytes that are the same in every run, and used again."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["MARGIN", "Bytes", "filled_room", "free_room", "places_of"]

MARGIN = 256
"""Bytes on either side of an arena's tensors: more than a vector store could write too far."""

_PERIOD = 1000003
"""Random elements come again after so many: a prime, so that no two rows of a tensor lie so far apart."""

_STEP = 381966
"""Elements between where the memory of one seed begins in them and that of the next: far, and like no stride (the golden section)."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def places_of(arenas: Sequence[Mapping[str, Any]]) -> list[slice]:
    """Return where arenas lie in one piece of memory that begins at a 64-byte boundary: one behind the other."""
    places, end = [], 0
    for arena in arenas:
        start = end + -end % 64 + arena.get("shift", 0)
        end = start + arena["bytes"] + 2 * MARGIN
        places.append(slice(start, end))
    return places


def filled_room(arenas: Sequence[Mapping[str, Any]]) -> Bytes:
    """Return memory that holds arenas, random and not zero, so that a byte that was written by mistake differs from what was there."""
    places, end = places_of(arenas), 0
    room = free_room(places[-1].stop if places else 0)
    for arena, place in zip(arenas, places, strict=True):
        room[end : place.start] = 0
        at, end = place.start, place.stop
        content = _content(arena.get("dtype"))
        begin = arena["seed"] * _STEP % _PERIOD * (len(content) // _PERIOD)
        while at < end:
            part = content[begin : begin + end - at]
            room[at : at + len(part)] = part
            at, begin = at + len(part), 0
    return room


def free_room(count: int) -> Bytes:
    """Return host memory that begins at a 64-byte boundary: some that no tensor lies in any more, or new.

    A page that is new to a process takes longer to get than to fill.
    """
    for kept in _KEPT:
        if sys.getrefcount(kept) == _UNUSED and count <= _KEPT_BYTES:
            break
    else:
        kept = np.empty(64 + max(count, _KEPT_BYTES), np.uint8)
        if count <= _KEPT_BYTES:
            _KEPT.append(kept)
    start = -kept.ctypes.data % 64  # numpy promises 16 bytes only, and a case says how its tensors are aligned
    return kept[start : start + count]


_KEPT: list[Bytes] = []
_KEPT_BYTES = 1 << 27  # of each; what no case has used yet takes up none
_UNUSED = next(sys.getrefcount(kept) for kept in [np.empty(0)])  # of a list, a variable and the question: as many as this Python counts


@functools.cache
def _content(dtype: str | None) -> Bytes:
    """Return the bytes of finite random numbers of a dtype; without one any bytes."""
    draw = np.random.default_rng(0)
    if dtype is None:
        return draw.integers(0, 256, _PERIOD, np.uint8)
    return torch.from_numpy(draw.standard_normal(_PERIOD)).to(getattr(torch, dtype)).view(torch.uint8).numpy()
