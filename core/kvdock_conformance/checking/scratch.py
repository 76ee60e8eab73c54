"""The scratch memory of a call: how much it is, and where it comes from."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import resource
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvdock.ops.validate import validate
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.growth import held, malloc_info
from kvdock_conformance.checking.meaning import in_order, kernel_of, schema_of
from kvdock_conformance.checking.memory import Arenas
from kvdock_conformance.checking.resources import made_calls
from kvdock_conformance.checking.target import HOST, Target

__all__ = ["check_scratch", "check_scratch_within"]

_MMAP_THRESHOLD = -3
"""``M_MMAP_THRESHOLD`` of glibc's ``mallopt``."""


def _peak(device: torch.device, call: Callable[[], object]) -> int:
    """Return by how many bytes the memory in use grows in a call; 0 where that cannot be told. Large ones alone tell on a host."""
    own = getattr(torch, device.type)
    if hasattr(own, "reset_peak_memory_stats"):
        own.reset_peak_memory_stats(device)
        before = own.memory_allocated(device)
        call()
        return int(own.max_memory_allocated(device) - before)
    if device != HOST:  # what the host takes says nothing: torch does there what such a device has no code for
        return 0
    with contextlib.suppress(OSError):  # another system, or not allowed
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
        before = _resident("VmRSS")
        call()
        return _resident("VmHWM") - before
    return 0


def _resident(name: str) -> int:
    """Return a line of the process's status in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return int(lines[name].split()[0]) * 1024


def check_scratch(target: Target, data: Mapping[str, Any]) -> None:
    """Compare the scratch memory of the calls of a case with that of the first, whose memory is dense.

    What a portable kernel takes, where it stands in for the backend's, is not the backend's.

    Raises:
        NonconformanceError: another call takes more, by ``data["spare"]`` bytes.
    """
    op, taken = data["calls"][0]["op"], []
    every = made_calls(Arenas(data["arenas"], target.device), data)
    for args in [args for args in every if not target.reasons_against(op, in_order(op, args))]:
        target.call(op, args)
        taken.append(_peak(target.device, lambda: target.call(op, args)))  # noqa: B023 - called at once
        if taken[-1] > taken[0] + data["spare"]:
            raise NonconformanceError(
                f"{op}: scratch memory of a call on memory that is not dense",
                expected=f"about what it takes on dense memory, {taken[0]} bytes",
                got=f"{taken[-1]} bytes",
            )


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * mmap.PAGESIZE


@contextlib.contextmanager
def _no_more_than(count: int) -> Iterator[None]:
    """Let this process get so many bytes more of the system."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _at_hand() -> list[object]:
    """Take what glibc's malloc keeps of what was freed, hundreds of MiB in a process that has done much: that is got whatever the limit.

    Where a thread's own arena has nothing, malloc looks into one other, and may stay with that: so until it says no twice in a row.
    """
    taken: list[object] = []
    if malloc_info() is None:
        return taken
    refused = 0
    with _no_more_than(0):
        while refused < 2:
            try:
                taken.append(np.empty(1 << 20, np.uint8))
                refused = 0
            except MemoryError:
                refused += 1
    ctypes.CDLL(None).malloc_trim(0)
    return taken


@contextlib.contextmanager
def _large_ones_alone() -> Iterator[None]:
    """Let glibc's malloc give each large array pages of its own, and give them back when it is freed.

    Otherwise arrays as large as one that was freed before come from a heap, which falls to pieces: of the same call then now 100 MiB
    and now 220 MiB are enough.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # where malloc arrives by itself when arrays come and go


def _error_within(count: int, call: Callable[[], object]) -> BaseException | None:
    """Make a call while this process may get so many bytes more, from whomever; return the error where that is not enough."""
    at_hand = _at_hand()
    try:
        with _large_ones_alone(), _no_more_than(count):
            call()
    except Exception as error:  # noqa: BLE001 - whatever the backend makes of it
        return error
    finally:
        at_hand.clear()
    return None


def _workspace(target: Target, op: str, *calls: Mapping[str, Any]) -> int:
    """Return what a plan says of its scratch memory behind calls."""
    every = [in_order(op, args) for args in calls]
    with target.backend.device_guard(target.device):
        plan = kernel_of(target, op).prepare(validate(schema_of(op), every[0]))
        for values in every:
            plan(*values)
        said = plan.workspace_bytes
        plan.destroy()
    return said


def _beyond(device: torch.device, limit: int, call: Callable[[], object]) -> tuple[str, bool]:
    """Return what a call got with so many bytes left, empty where they are enough, and whether torch's own allocator asked for more."""
    if device != HOST:
        peak = _peak(device, call)
        return f"{peak} bytes" if peak > limit else "", True
    error = _error_within(limit, call)
    if error is None:
        return "", True
    return f"with {limit} bytes: {type(error).__name__}: {error}", "DefaultCPUAllocator" in "".join(traceback.format_exception(error))


def check_scratch_within(target: Target, data: Mapping[str, Any]) -> None:
    """Make the last call of a case, behind others like it, with little memory left: ``data["spare"]`` bytes.

    Where torch's own allocator asked for more, it may have what the plan says, up to ``data["most"]``, beside that. Of a device that
    allocator alone can be asked.

    Raises:
        NonconformanceError: it needs more, gets it elsewhere, or keeps it.
    """
    op, (few, many) = data["calls"][0]["op"], made_calls(Arenas(data["arenas"], target.device), data)
    for _ in range(3):
        target.call(op, few)
    before = _in_use(target.device)
    got, is_torchs = _beyond(target.device, data["spare"], lambda: target.call(op, many))
    said = _workspace(target, op, few, many) if got else 0
    limit = data["spare"] + min(said, data["most"])
    if got and is_torchs and limit > data["spare"]:
        got, _ = _beyond(target.device, limit, lambda: target.call(op, many))
    if got:
        expected = f"at most {limit} bytes, all of torch's allocator; workspace_bytes is {said}"
        raise NonconformanceError(f"{op}: scratch memory of a call", expected=expected, got=got)
    gc.collect()  # the error of a first try may hold the frames that it came through, and what they had
    kept = _in_use(target.device) - before
    if kept > data["spare"]:
        expected = f"at most {data['spare']} bytes"
        raise NonconformanceError(f"{op}: memory that is kept behind a call", expected=expected, got=f"{kept} bytes")


def _in_use(device: torch.device) -> int:
    """Return how many bytes of a device are in use, or of the host those that malloc has given; 0 where nobody tells."""
    found = held(device)
    on_host = 16 * found.get("units of 16 bytes of malloc", 0)
    return on_host if device == HOST else found.get("bytes that torch holds of the device", 0)
