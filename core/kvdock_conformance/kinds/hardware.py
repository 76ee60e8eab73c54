"""The name of the hardware that a run was made on, as the machine itself tells it."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

import torch

from kvdock_conformance.checking.target import HOST

__all__ = ["of_device", "processor"]

_CPUINFO = Path("/proc/cpuinfo")


def of_device(device: torch.device) -> str:
    """Return the name that torch's module for the device's type has for it; for host memory the processor's; empty if nobody knows."""
    if device == HOST:
        return processor()
    with contextlib.suppress(Exception):  # not every type of device has a module, and not every module has names
        return str(torch.get_device_module(device).get_device_name(device))
    return ""


def processor() -> str:
    """Return the name of the host's processor, or its architecture where there is no name."""
    with contextlib.suppress(OSError):
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()
