"""What a call reads: nothing beside its tensors, and nothing of them once it has returned."""

from __future__ import annotations

import ctypes
import functools
import mmap
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvdock_conformance.checking.any_op import BY_ANYBODY
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.meaning import forgive, refer_to, schema_of
from kvdock_conformance.checking.memory import Arenas, compare, filled
from kvdock_conformance.checking.plans import check_calls_of_others
from kvdock_conformance.checking.rooms import MARGIN
from kvdock_conformance.checking.served import reasons_against
from kvdock_conformance.checking.target import HOST, Target
from kvdock_conformance.requirement import Capability

__all__ = ["FENCED", "FENCED_FOR_ANYBODY", "FencedArenas", "check_fenced", "check_inputs_released", "fenced", "protect", "why_no_fence"]

_NOTHING = 0  # may be done with memory, not even reading
_TURNS = 5  # the plan is prepared, found, repeated, and found again
_LATER_S = 0.02


def why_no_fence(target: Target, data: Mapping[str, Any]) -> Sequence[str]:
    """Return the reasons against fences: the memory is a device's, or the backend does not serve the call."""
    if target.device != HOST:
        return [f"the memory of {target.device} cannot be fenced from the host"]
    return reasons_against(target, data)


FENCED = Capability("works on host memory", why_no_fence, check_calls_of_others)


def _why_no_fence_for_anybody(target: Target, data: Mapping[str, Any]) -> Sequence[str]:
    return BY_ANYBODY.reasons(target, data) if target.device == HOST else why_no_fence(target, data)


FENCED_FOR_ANYBODY = Capability("works on host memory, or a portable kernel does", _why_no_fence_for_anybody, check_calls_of_others)


def fenced(content: torch.Tensor, *, at_end: bool) -> torch.Tensor:
    """Return a copy of bytes whose last one, or first one, borders a page that may not be read.

    The process ends with SIGSEGV where it is read all the same.
    """
    room = -(-len(content) // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, room + 2 * mmap.PAGESIZE)
    memory = np.frombuffer(pages, dtype=np.uint8)
    for start in (0, room + mmap.PAGESIZE):
        protect(memory.ctypes.data + start, mmap.PAGESIZE, _NOTHING)
    start = mmap.PAGESIZE + (room - len(content) if at_end else 0)
    place = torch.from_numpy(memory[start : start + len(content)])
    place.copy_(content)
    return place


@functools.cache
def _libc() -> ctypes.CDLL:
    """Return the C library: opening it makes a class, which takes longer than a call."""
    return ctypes.CDLL(None, use_errno=True)


def protect(memory: int, count: int, how: int) -> None:
    """Say what may be done with whole pages of memory: ``PROT_`` of `mmap`."""
    if _libc().mprotect(ctypes.c_void_p(memory), ctypes.c_size_t(count), how):
        raise OSError(ctypes.get_errno(), "mprotect")


class FencedArenas(Arenas):
    """The arenas of a case without margins, each between pages that may not be read.

    Args:
        plain: the arenas, with what they hold.
        at_end: whether the last byte of each borders such a page; else the first.
    """

    def __init__(self, plain: Arenas, *, at_end: bool) -> None:
        self.arenas = plain.arenas
        # What lies in front of the first tensor, such as an offset off an alignment, is in front of the fence too.
        self.bytes = [fenced(content[MARGIN:-MARGIN], at_end=at_end) for content in plain.bytes]

    def only_read(self, numbers: Collection[int]) -> None:
        """Let nobody write to some arenas from now on."""
        for content in (self.bytes[number] for number in numbers):
            first = content.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            protect(first, -(-(content.data_ptr() + len(content) - first) // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.PROT_READ)

    def tensor(self, spec: Any) -> Any:
        """Return the tensor that a spec describes."""
        if not isinstance(spec, Mapping):
            return spec
        dtype = getattr(torch, spec["dtype"])
        memory = self.bytes[spec["arena"]][spec["offset"] :]
        return memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype).as_strided(spec["shape"], spec["strides"])


def check_fenced(target: Target, data: Mapping[str, Any]) -> None:
    """Make the calls of a case on memory that ends at a page that may not be read, and on such that begins there; inputs may only be read.

    Raises:
        NonconformanceError: an argument is not what it must be; the process ends where it reads beside them.
    """
    plain = Arenas(data["arenas"], HOST)
    calls = [call for call in data["calls"] if not call.get("again")]  # what is only read cannot change
    for call in calls:
        for spec in call["args"].values():
            plain.tensor(spec)  # writes its values
    told = plain.copy()
    for call in calls:
        refer_to(call["op"], {name: told.tensor(spec) for name, spec in call["args"].items()})
    for at_end in (True, False):
        memory, right = FencedArenas(plain, at_end=at_end), told.copy()
        memory.only_read(set(range(len(memory.bytes))) - _written(calls))
        for call in calls:
            target.call(call["op"], {name: memory.tensor(spec) for name, spec in call["args"].items()})
        for call in calls:
            forgive(memory, right, call)
        for number, (own, wanted) in enumerate(zip(memory.bytes, right.bytes, strict=True)):
            if not torch.equal(own, wanted[MARGIN:-MARGIN]):
                names = [name for name, spec in data["calls"][0]["args"].items() if isinstance(spec, Mapping) and spec["arena"] == number]
                where = "behind" if at_end else "in front of"
                raise NonconformanceError(
                    f"{', '.join(names)} with a fence {where} it", expected="what the reference says", got="other bytes"
                )


def _written(calls: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the arenas that calls write to."""
    return {call["args"][arg.name]["arena"] for call in calls for arg in schema_of(call["op"]).mutated if arg.name in call["args"]}


def check_inputs_released(target: Target, data: Mapping[str, Any]) -> None:
    """Make calls on the same memory in turn, change all that they read as soon as each returns, and compare what it wrote.

    Raises:
        NonconformanceError: a byte of what was written is not that of the call's own inputs.
    """
    memory, calls = Arenas(data["arenas"], target.device), data["calls"]
    written = _written(calls)
    inputs = set(range(len(memory.bytes))) - written
    indices = {spec["arena"] for spec in calls[0]["args"].values() if isinstance(spec, Mapping) and spec["dtype"].startswith("int")}
    for turn in range(_TURNS):
        op, specs = calls[turn % len(calls)]["op"], calls[turn % len(calls)]["args"]
        for number in written:  # else what an earlier call has written is right without this one
            memory.bytes[number].copy_(filled({**memory.arenas[number], "seed": turn}, target.device))
        args = {name: memory.tensor(spec) for name, spec in specs.items()}
        expected = memory.copy()
        refer_to(op, {name: expected.tensor(spec) for name, spec in specs.items()})
        target.call(op, args)
        # Whoever looks at indices later finds padding, or what is out of range; every other time, good ones with other contents.
        for number in inputs if turn % 2 else inputs - indices or inputs:
            memory.turn(number)
        forgive(memory, expected, calls[turn % len(calls)])
        compare(memory, expected, specs, f"{op}, call {turn}, whose inputs changed when it had returned", written)
    time.sleep(_LATER_S)
    compare(memory, expected, specs, f"{op}, {_LATER_S:g} s after its inputs changed", written)
