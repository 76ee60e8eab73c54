"""What the NVIDIA driver says about itself, asked without opening a context on any device."""

from __future__ import annotations

import ctypes

__all__ = ["Version", "driver_version"]

Version = tuple[int, int]
"""Major and minor."""


def driver_version() -> Version | None:
    """Return the newest CUDA version that the driver supports, or None where it does not say."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    nvml.nvmlInit_v2()
    try:
        if nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number)) != 0:
            return None
    finally:
        nvml.nvmlShutdown()
    return number.value // 1000, number.value % 1000 // 10
