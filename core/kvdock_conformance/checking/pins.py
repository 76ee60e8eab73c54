"""Memory of the host that is locked for a device."""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvdock_conformance.checking.claims import expect
from kvdock_conformance.checking.target import Target

__all__ = ["check_pins"]

_POOL, _STATUS = (2, 4, 2, 8), Path("/proc/self/status")


def check_pins(target: Target, data: Mapping[str, Any]) -> None:
    """Lock two rooms, give one back while the other is in use, lock it again, and give back both."""
    rooms, before = [torch.frombuffer(mmap.mmap(-1, 2 * mmap.PAGESIZE), dtype=torch.uint8).fill_(number) for number in (1, 2)], _locked()
    undo = [_pin(target, room) for room in rooms]
    expect("pin() of two rooms", undo[0] is undo[1] is None or all(map(callable, undo)), "a function for each, or None for each", undo)
    if undo[0] is None or undo[1] is None:
        return
    both, other = _locked(), rooms[1].is_pinned()
    undo[0]()
    size = rooms[0].numel()
    expect("bytes locked, with one of two rooms given back", _locked() >= both - size, f"{both - size} at least", _locked())
    expect("is_pinned() of the other room", rooms[1].is_pinned() == other, other, not other)
    _use(target, rooms[1])
    again = _pin(target, rooms[0])
    expect("pin() of what was given back", callable(again), "a function", again)
    for number, each in enumerate((undo[1], again)):
        if each is not None:
            each()
        held, was = sorted({*rooms[1 - number].tolist()}), [2 - number]
        expect(f"what room {1 - number} holds", held == was, was, held)
    expect("bytes locked, with all given back", _locked() <= before, f"{before} at most", _locked())


def _pin(target: Target, room: torch.Tensor) -> Any:
    with target.backend.device_guard(target.device):
        return target.backend.pin(room, target.device)


def _use(target: Target, room: torch.Tensor) -> None:
    """Swap a block of a locked room in, and out again to another place of it: the room holds one number throughout."""
    host = room.view(torch.float32)[: math.prod(_POOL)].view(_POOL)
    there, pairs = torch.zeros(_POOL, device=target.device), torch.tensor([[0, 1]])
    if "swap_blocks_" in target.kernels:
        target.call("swap_blocks_", {"src_cache": host, "dst_cache": there, "block_pairs": pairs})
        target.call("swap_blocks_", {"src_cache": there, "dst_cache": host, "block_pairs": pairs.flip(1)})
        expect(
            "a block that was swapped in", bool((there[1].cpu() == host[1]).all()), "what the room holds", there[1].cpu().flatten().tolist()
        )


def _locked() -> int:
    """Return how many bytes the process has locked by the system; 0 where that cannot be known."""
    found = re.search(r"VmLck:\s+(\d+) kB", _STATUS.read_text()) if _STATUS.exists() else None
    return int(found[1]) * 1024 if found else 0
