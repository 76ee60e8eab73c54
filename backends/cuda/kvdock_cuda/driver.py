"""What the NVIDIA driver says about itself, asked without opening a context on any device."""

from __future__ import annotations

import ctypes

__all__ = ["Version", "driver_version"]

Version = tuple[int, int]
"""Major and minor."""

_NOT_LOADED = 9
"""NVML's code where there is no driver for it to talk to, as on a machine that has the library without a GPU."""


def driver_version() -> Version | None:
    """Return the newest CUDA version that the driver supports, or None where there is no driver or no GPU, or it does not say.

    Raises:
        RuntimeError: there is a driver, and it does not answer; the text is NVML's, such as "Driver/library version mismatch".
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    code = nvml.nvmlInit_v2()
    if code == _NOT_LOADED:
        return None
    if code != 0:
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        raise RuntimeError(nvml.nvmlErrorString(code).decode(errors="replace"))
    count, number = ctypes.c_uint(), ctypes.c_int()
    try:
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 and count.value == 0:
            return None
        if nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number)) != 0:
            return None
    finally:
        nvml.nvmlShutdown()
    return number.value // 1000, number.value % 1000 // 10
