"""The memory of a case: arenas of known bytes, tensors cut out of them, and the comparison of all bytes afterwards.

An op runs on it, the reference on a copy, and then every byte is compared: what was addressed, all other places, gaps
between rows, the margins around each tensor, and the inputs.
"""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvdock import runtime
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.rooms import MARGIN, Bytes, filled_room, free_room, places_of

__all__ = ["BITS", "Arenas", "arenas_of", "changed_by", "compare", "element_at", "expanded", "filled", "text_of"]

CHUNK = 1 << 26
"""So many bytes are compared at a time."""

_HOST = torch.device("cpu")

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of an element's size."""


class Arenas:
    """The arenas of one case.

    Args:
        arenas: each arena's ``bytes``, ``seed`` of its random bytes, and where given ``fill`` ("zeros", or "numbers" of its
            ``dtype``), ``shift`` (bytes between a 64-byte boundary and its start) and ``host`` (lies in host memory).
        device: where the others lie.
    """

    _room: Bytes | None = None

    def __init__(self, arenas: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        self.arenas = arenas
        if device != _HOST or any(arena.get("fill") == "zeros" for arena in arenas):
            self.bytes = [filled(arena, device) for arena in arenas]
        else:
            self._lie_in(filled_room(arenas))

    def _lie_in(self, room: Bytes) -> None:
        """Let all arenas lie in one piece of host memory: it is copied, and compared, at once."""
        self._room = room
        # Each is a tensor of its own, whose versions count what is written to it alone.
        self.bytes = [torch.from_numpy(room[place]) for place in places_of(self.arenas)]

    def tensor(self, spec: Any) -> Any:
        """Return the tensor that a spec describes, with its values written; what is no spec as it is."""
        if not isinstance(spec, Mapping):
            return spec
        dtype = getattr(torch, spec["dtype"])
        start, memory = MARGIN + spec["offset"], self.bytes[spec["arena"]]
        typed = memory[start : start + (memory.numel() - start) // dtype.itemsize * dtype.itemsize].view(dtype)
        tensor = typed.as_strided(spec["shape"], spec["strides"])
        if spec.get("values") is not None and tensor.numel():
            places = tensor.view(BITS[dtype.itemsize])
            if not all(spec["strides"]):  # those that are one in memory get one value
                places = places[tuple(slice(0, None if step else 1) for step in spec["strides"])]
            places.copy_(torch.from_numpy(expanded(spec["values"], places.numel())).view(places.shape))
        return tensor

    def change(self, specs: Mapping[str, Any]) -> None:
        """Turn all bytes of some specs' arenas over, and write their values, so that no version of a tensor counts it."""
        given = [spec for spec in specs.values() if isinstance(spec, Mapping)]
        unseen = Arenas.__new__(Arenas)
        unseen.arenas, unseen.bytes = self.arenas, [content.data for content in self.bytes]
        for number in {spec["arena"] for spec in given}:
            unseen.turn(number)
        for spec in given:
            unseen.tensor(spec)

    def turn(self, number: int) -> None:
        """Turn all bytes of an arena over; of one of numbers, their signs."""
        dtype = self.arenas[number].get("dtype")
        if dtype is None:
            self.bytes[number].bitwise_not_()
        else:
            size = getattr(torch, dtype).itemsize
            self.bytes[number][size - 1 :: size].bitwise_xor_(128)

    def copy(self, arenas: Collection[int] | None = None) -> Arenas:
        """Return a copy in host memory: of some arenas, by number, if they are given, where the others are one with these."""
        twin = Arenas.__new__(Arenas)
        twin.arenas, twin.bytes = self.arenas, [*self.bytes]
        if self._room is not None and arenas is None:
            room = free_room(len(self._room))
            room[:] = self._room
            twin._lie_in(room)
            return twin
        numbers = [*range(len(self.arenas))] if arenas is None else arenas
        plain = [number for number in numbers if self.arenas[number].get("fill") != "zeros"]
        places = places_of([self.arenas[number] for number in plain])
        room = free_room(places[-1].stop if places else 0)
        for number, place in zip(plain, places, strict=True):
            twin.bytes[number] = torch.from_numpy(room[place]).copy_(self.bytes[number])
        for number in {*numbers}.difference(plain):
            twin.bytes[number] = _copied_zeros(self.bytes[number])
        return twin


def expanded(values: Sequence[int] | Mapping[str, int], count: int) -> np.ndarray[Any, np.dtype[Any]]:
    """Return ``count`` integers: those of a list, repeated; ``first`` and so on by ``step``; or the first of ``shuffled`` numbers."""
    if not isinstance(values, Mapping):
        given = np.array(values, np.int64)
        return given if len(given) == count else np.tile(given, -(-count // len(given)))[:count]
    if "first" in values:  # of millions, new pages take longer to get than to fill: small ones, and no more than once
        first, step = values["first"], values["step"]
        is_small = max(abs(first), count, abs(first + step * count)) < 2**31
        found: np.ndarray[Any, np.dtype[Any]] = np.arange(count, dtype="int32" if is_small else "int64")
        found *= step
        found += first
        return found
    return _shuffled(values["shuffled"], values["seed"], count)


@functools.lru_cache(64)  # each way to the backend, and the reference, is given the same
def _shuffled(among: int, seed: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(random.Random(seed).sample(range(among), count), np.int64)  # noqa: S311 - the same in every run


def filled(arena: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    """Return the bytes of an arena with its margins."""
    on_host = arena.get("host", False) or device == _HOST
    if arena.get("fill") == "zeros":  # numpy's zeros take up no memory until they are written
        count = arena["bytes"] + 2 * MARGIN
        return torch.from_numpy(np.zeros(count, np.uint8)) if on_host else torch.zeros(count, dtype=torch.uint8, device=device)
    return torch.from_numpy(filled_room([arena])[places_of([arena])[0]]).to("cpu" if on_host else device)


def _copied_zeros(content: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory of what was zeros: of what is not zero, so that it takes up no more than that."""
    twin = torch.from_numpy(np.zeros(len(content), np.uint8))
    for start in range(0, len(content), CHUNK):
        part = content[start : start + CHUNK]
        if part.any():
            twin[start : start + CHUNK] = part.cpu()
    return twin


def compare(memory: Arenas, expected: Arenas, args: Mapping[str, Any], what: str, arenas: Collection[int] | None = None) -> None:
    """Compare every byte with what it should be.

    Args:
        memory: what was written to.
        expected: what it should hold, in host memory.
        args: specs of the call's arguments, to say where a byte is.
        what: what was done, for the error.
        arenas: numbers of the arenas to compare; None compares all.

    Raises:
        NonconformanceError: names the first place that differs.
    """
    rooms = [torch.from_numpy(side._room) for side in (memory, expected) if side._room is not None and arenas is None]
    if len(rooms) == 2 and _equal(*rooms):
        return
    for arena in range(len(memory.bytes)) if arenas is None else sorted(arenas):
        content, wanted = memory.bytes[arena], expected.bytes[arena]
        for start in range(0, len(content), CHUNK):
            part, right = content[start : start + CHUNK], wanted[start : start + CHUNK]
            if part.device != _HOST and memory.arenas[arena].get("fill") == "zeros" and not part.any() and not right.any():
                continue  # gigabytes of zeros are looked at where they lie
            got = part.cpu()
            if not _equal(got, right):
                wrong = (got != right).nonzero().flatten()
                raise _difference(memory, expected, args, what, (arena, start + int(wrong[0]), len(wrong)))


def _equal(got: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare bytes in host memory by C's own function: torch takes four times as long for eight at a time."""
    return bool(_memcmp()(got.data_ptr(), right.data_ptr(), got.numel()) == 0)


@functools.cache
def _memcmp() -> Any:
    """Return C's own function, with what it takes."""
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(("memcmp", ctypes.pythonapi))


def _difference(memory: Arenas, expected: Arenas, args: Mapping[str, Any], what: str, place: tuple[int, int, int]) -> NonconformanceError:
    """Describe the first byte that differs: the element of an argument, or where between and around them it is."""
    arena, byte, count = place
    for name, spec in args.items():
        found = element_at(spec, arena, byte - MARGIN)
        if found is not None:
            where = f"{name}[{', '.join(map(str, found))}]"
            got, right = (text_of(side.tensor({**spec, "values": None})[tuple(found)]) for side in (memory, expected))
            return NonconformanceError(f"{what}: {where}, the first of {count} bytes that differ", expected=right, got=got)
    near = ", ".join(name for name, spec in args.items() if isinstance(spec, Mapping) and spec["arena"] == arena)
    where = f"byte {byte - MARGIN} of {memory.arenas[arena]['bytes']} in the memory of {near}, which belongs to no argument"
    got, right = (hex(int(side.bytes[arena][byte])) for side in (memory, expected))
    return NonconformanceError(f"{what}: {where}, the first of {count} bytes that differ", expected=right, got=got)


def element_at(spec: Any, arena: int, byte: int) -> list[int] | None:
    """Return the index of the element that holds a byte of an arena; None when it is none of this tensor's."""
    if not isinstance(spec, Mapping) or spec["arena"] != arena or 0 in spec["shape"]:
        return None
    left = (byte - spec["offset"]) // getattr(torch, spec["dtype"]).itemsize
    index = [0] * len(spec["shape"])
    for dim in sorted(range(len(index)), key=lambda dim: -spec["strides"][dim]):
        if spec["strides"][dim] and spec["shape"][dim] > 1:
            index[dim] = min(max(left // spec["strides"][dim], 0), spec["shape"][dim] - 1)
            left -= index[dim] * spec["strides"][dim]
    return index if left == 0 else None


def text_of(element: torch.Tensor) -> str:
    """Write one element as its value and its bits: ``1.5 (0x3fc0)``."""
    size = element.element_size()
    bits = int(element.detach().reshape(1).view(BITS[size]).cpu()) % (1 << 8 * size)
    return f"{element.item()} ({bits:#0{2 * size + 2}x})"


def arenas_of(call: Mapping[str, Any]) -> set[int]:
    """Return the arenas of a call."""
    return {spec["arena"] for spec in call["args"].values() if isinstance(spec, Mapping)}


def changed_by(call: Mapping[str, Any]) -> set[int]:
    """Return the arenas that are not the same behind a call and what prepares it: those of its outputs, and of values that are set."""
    written = {arg.name for arg in runtime.default().dispatcher.op(call["op"]).schema.mutated}
    own = {name: spec for name, spec in call["args"].items() if isinstance(spec, Mapping)}
    return {spec["arena"] for name, spec in own.items() if call.get("again") or name in written or spec.get("values") is not None}
