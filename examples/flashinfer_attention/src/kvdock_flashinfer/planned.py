"""FlashInfer's wrappers, and the memory that they work in. Importing this imports no FlashInfer."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import attrs
import torch

__all__ = ["MOST_ROWS", "MOST_TOKENS", "WORKSPACE_BYTES", "Planned", "take"]

MOST_TOKENS, MOST_ROWS = 16 << 20, (32 << 10) - 1
"""What a wrapper for more than one query per sequence has room for, of all sequences together."""

_ROOM = 128 << 20
"""Bytes for what splits find, as FlashInfer recommends."""

WORKSPACE_BYTES = _ROOM + (8 << 20) + 4 * (MOST_TOKENS + 2 * (MOST_ROWS + 1))
"""Bytes on the device that a wrapper and the room it works in take, of the larger kind of wrapper."""


@attrs.frozen(eq=False)
class Planned:
    """A wrapper that was planned, and what its kernels leave out.

    Args:
        wrapper: FlashInfer's.
        queries: how many the sequences have; there may be more behind them.
        unseeing: those that see no key, int64 on the device; None without any.
        back: where the wrapper waits for its next use.
    """

    wrapper: Any
    queries: int
    unseeing: torch.Tensor | None
    back: list[Any]

    def give_back(self) -> None:
        """Let the wrapper be planned anew: what was planned is not used any more."""
        self.back.append(self.wrapper)


class _Spare(threading.local):
    """Wrappers and memory of one thread. Never freed but with the thread.

    A wrapper copies its plan to the device from pinned memory, and does not say when: only a later plan on the same stream, which waits
    for the stream first, may write there. So wrappers are kept by stream. Of one thread's calls on a stream, one runs after the other,
    so these may share the room.
    """

    def __init__(self) -> None:
        self.wrappers: defaultdict[Hashable, list[Any]] = defaultdict(list)
        self.rooms: dict[Hashable, torch.Tensor] = {}


_SPARE = _Spare()


def take(device: torch.device, make: Callable[[torch.Tensor], Any], kind: str) -> tuple[Any, list[Any]]:
    """Return a wrapper for the current stream of a device, and the list to put it back into.

    Args:
        device: the device.
        make: makes a wrapper that works in some memory, if there is none to spare.
        kind: tells wrappers that ``make`` makes from others.
    """
    stream = torch.cuda.current_stream(device).cuda_stream
    back = _SPARE.wrappers[device, stream, kind]
    if back:
        return back.pop(), back
    with torch.inference_mode(False):  # what is made within, torch does not let be written outside
        room = _SPARE.rooms.get((device, stream))
        if room is None:
            room = _SPARE.rooms[device, stream] = torch.zeros(_ROOM, dtype=torch.uint8, device=device)
        return make(room), back
