"""The backend object: which devices, and their tiles. Kernels and all else are `kvdock_triton`'s."""

from __future__ import annotations

import torch

from kvdock_cuda.driver import driver_version
from kvdock_cuda.tuning import TABLE
from kvdock_triton import TritonBackend, Tuning

__all__ = ["CudaBackend"]


class CudaBackend(TritonBackend):
    """Serves NVIDIA GPUs. PyTorch calls ROCm devices "cuda" too; those are `kvdock_rocm`'s."""

    name = "cuda"
    device_type = "cuda"
    torch_type = "cuda"

    def missing(self) -> str:
        """Return why there is no such hardware here."""
        return "" if torch.version.cuda is not None else f"torch {torch.__version__} is built without CUDA"

    def broken(self) -> str:
        """Compare the driver with the toolkit that torch was built with: a driver runs no newer major version."""
        driver, built = driver_version(), str(torch.version.cuda)
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
