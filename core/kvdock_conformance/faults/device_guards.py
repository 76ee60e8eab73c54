"""Faults in guards of devices, in counts of skipped writes, and in memory that is locked."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import torch

from kvdock_conformance.faults.fault import Faults

__all__ = ["FAULTS"]

FAULTS = Faults()
_AREA = "devices"


@FAULTS.backend(_AREA, "device_guard", "device-guard-swallows-errors", "The guard of a device swallows errors.", "KVD-DEVICE-009")
def _swallows(inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda device: contextlib.suppress(RuntimeError)


class _OneAtATime(contextlib.AbstractContextManager[None]):
    """A guard that is one object, and can be entered once at a time."""

    is_entered = False

    def __enter__(self) -> None:
        if self.is_entered:
            raise RuntimeError("the guard is taken")
        self.is_entered = True

    def __exit__(self, *about: object) -> None:
        self.is_entered = False


@FAULTS.backend(_AREA, "device_guard", "device-guard-once-at-a-time", "The guard of a device cannot be entered twice.", "KVD-DEVICE-011")
def _once_at_a_time(inner: Callable[..., Any]) -> Callable[..., Any]:
    guard = _OneAtATime()
    return lambda device: guard


@FAULTS.backend(_AREA, "skipped_writes", "device-count-grows-by-asking", "Asking for skipped writes counts as one.", "KVD-DEVICE-010")
def _grows_by_asking(inner: Callable[..., int]) -> Callable[..., int]:
    asked = itertools.count()
    return lambda device: inner(device) + next(asked)


@FAULTS.backend(_AREA, "skipped_writes", "device-count-is-no-int", "The count of skipped writes is a number of torch's.", "KVD-DEVICE-010")
def _no_int(inner: Callable[..., int]) -> Callable[..., Any]:
    return lambda device: torch.tensor(inner(device))


@FAULTS.backend(_AREA, "pin", "device-pin-gives-all-back", "Who gives one locked room back unlocks all others.", "KVD-DEVICE-013")
def _gives_all_back(inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda memory, device: _system("mlock", memory) and (lambda: _system("munlockall"))


@FAULTS.backend(_AREA, "pin", "device-pin-for-good", "Locked memory stays locked when it was given back.", "KVD-DEVICE-013")
def _for_good(inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda memory, device: _system("mlock", memory) and (lambda: None)


@FAULTS.backend(_AREA, "pin", "device-pin-wipes", "Memory that is given back is zero.", "KVD-DEVICE-013")
def _wipes(inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda memory, device: memory.zero_


def _system(call: str, *memory: torch.Tensor) -> bool:
    """Have the system lock memory of the host, or unlock it."""
    places = [(ctypes.c_void_p(each.data_ptr()), ctypes.c_size_t(each.nbytes)) for each in memory]
    if getattr(ctypes.CDLL(None, use_errno=True), call)(*itertools.chain(*places)):
        raise OSError(ctypes.get_errno(), f"{call} failed")
    return True
