"""The backend object: which devices, and their tiles. Kernels and all else are `kvdock_triton`'s."""

from __future__ import annotations

import torch

from kvdock_rocm.tuning import TABLE
from kvdock_triton import TritonBackend, Tuning
from kvdock_triton.tuning import tuning_for

__all__ = ["RocmBackend"]


class RocmBackend(TritonBackend):
    """Serves AMD GPUs, which PyTorch calls "cuda". Its kernels compile for them; none has run on one yet."""

    name = "rocm"
    device_type = "rocm"
    torch_type = "cuda"

    def missing(self) -> str:
        """Return why there is no such hardware here."""
        return "" if torch.version.hip is not None else f"torch {torch.__version__} is built without ROCm"

    def tuning(self, device: torch.device) -> Tuning:
        """Return the tiles for a device, by architecture."""
        properties = torch.cuda.get_device_properties(device)
        return TABLE.get(properties.gcnArchName.split(":")[0], tuning_for(properties.warp_size))
