"""The scratch memory of a call: how much it is, and where it comes from."""

from __future__ import annotations

import contextlib
import mmap
import resource
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.memory import Arenas
from kvdock_conformance.checking.resources import made_calls
from kvdock_conformance.checking.target import HOST, Target

__all__ = ["check_scratch", "check_scratch_within"]


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

    Raises:
        NonconformanceError: another call takes more, by ``data["spare"]`` bytes.
    """
    op, taken = data["calls"][0]["op"], []
    for args in made_calls(Arenas(data["arenas"], target.device), data):
        target.call(op, args)
        taken.append(_peak(target.device, lambda: target.call(op, args)))  # noqa: B023 - called at once
        if taken[-1] > taken[0] + data["spare"]:
            raise NonconformanceError(
                f"{op}: scratch memory of a call on memory that is not dense",
                expected=f"about what it takes on dense memory, {taken[0]} bytes",
                got=f"{taken[-1]} bytes",
            )


def _error_within(count: int, call: Callable[[], object]) -> BaseException | None:
    """Make a call while this process may get so many bytes more, from whomever; return the error where that is not enough."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (taken + count, before[1]))
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever the backend makes of it
        return error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return None


def check_scratch_within(target: Target, data: Mapping[str, Any]) -> None:
    """Make the last call of a case, behind others like it, with little memory left: ``data["limits"]`` in turn, in bytes.

    The next limit is tried where torch's own allocator asked for more than one. Of a device that allocator alone can be asked.

    Raises:
        NonconformanceError: it needs more, or gets it elsewhere.
    """
    op, (few, many), limits = data["calls"][0]["op"], made_calls(Arenas(data["arenas"], target.device), data), data["limits"]
    for _ in range(3):
        target.call(op, few)
    what, expected = f"{op}: scratch memory of a call", f"at most {limits[-1]} bytes, all of torch's allocator"
    if target.device != HOST:
        peak = _peak(target.device, lambda: target.call(op, many))
        if peak > limits[-1]:
            raise NonconformanceError(what, expected=expected, got=f"{peak} bytes")
        return
    for limit in limits:
        error = _error_within(limit, lambda: target.call(op, many))
        if error is None:
            return
        told = "".join(traceback.format_exception(error))
        if "DefaultCPUAllocator" not in told or limit == limits[-1]:
            raise NonconformanceError(what, expected=expected, got=f"with {limit} bytes: {type(error).__name__}: {error}") from error
