"""The backend object: which devices, and their tiles. Kernels and all else are `kvdock_triton`'s."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from kvdock_cuda.driver import Version, driver_version
from kvdock_cuda.tuning import TABLE
from kvdock_triton import TritonBackend, Tuning

__all__ = ["CudaBackend"]

_RELOAD = "see what nvidia-smi says; a driver that was updated needs a reboot, or its modules loaded anew"


class CudaBackend(TritonBackend):
    """Serves NVIDIA GPUs. PyTorch calls ROCm devices "cuda" too; those are `kvdock_rocm`'s.

    Args:
        driver: asked for the newest CUDA version that the driver supports; see `driver_version`.
        toolkit: the CUDA version that torch was built with; None if without.
    """

    name = "cuda"
    device_type = "cuda"
    torch_type = "cuda"

    def __init__(self, driver: Callable[[], Version | None] = driver_version, toolkit: str | None = torch.version.cuda) -> None:
        super().__init__()
        self._driver, self._toolkit = driver, toolkit

    def missing(self) -> str:
        """Return why there is no such hardware here."""
        return "" if self._toolkit is not None else f"torch {torch.__version__} is built without CUDA"

    def broken(self) -> str:
        """Compare the driver with the toolkit that torch was built with: a driver runs no newer major version."""
        if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            return ""  # every GPU was hidden on purpose: no device, and no fault
        built = str(self._toolkit)
        try:
            driver = self._driver()
        except RuntimeError as error:
            return "" if self.module.device_count() else f"the NVIDIA driver does not answer: {error}. Fix: {_RELOAD}"
        if driver is None or driver[0] >= int(built.split(".")[0]):
            return ""
        return (
            f"the driver supports CUDA {driver[0]}.{driver[1]}, and torch {torch.__version__} is built for CUDA {built}. "
            f"Fix: update the driver, or install a torch built for CUDA {driver[0]}"
        )

    def tuning(self, device: torch.device) -> Tuning:
        """Return the tiles for a device, by compute capability."""
        major, _ = torch.cuda.get_device_capability(device)
        return TABLE.get(major, Tuning())
