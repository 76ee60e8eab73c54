"""The backend object: devices. Its kernels come with the next release; until then portable kernels serve its devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

import kvdock

__all__ = ["RocmBackend"]


class RocmBackend(kvdock.Backend):
    """Serves AMD GPUs, which PyTorch calls "cuda". Nothing of it has run on one yet."""

    name = "rocm"
    device_type = "rocm"

    def probe(self) -> kvdock.Probe:
        """Count devices without opening a context."""
        if torch.version.hip is None:
            return kvdock.Probe.absent(f"torch {torch.__version__} is built without ROCm")
        count = torch.cuda.device_count()
        if count == 0:
            return kvdock.Probe.absent("no ROCm device is visible (torch.cuda.device_count() is 0)")
        return kvdock.Probe.ready(f"{count} device(s), HIP {torch.version.hip}")

    def claims(self, device: torch.device) -> bool:
        """Claim what torch calls cuda, in a ROCm build."""
        return device.type == "cuda" and torch.version.hip is not None

    def devices(self) -> Sequence[torch.device]:
        """List the visible devices."""
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]

    def kernels(self) -> Mapping[str, kvdock.Kernel]:
        """Hand over none yet."""
        return {}

    def device_guard(self, device: torch.device) -> AbstractContextManager[Any]:
        """Make ``device`` current."""
        return torch.cuda.device(device)

    def capabilities(self) -> kvdock.Capabilities:
        """Say that launches may be captured."""
        return kvdock.Capabilities(graph_capture=True)

    def is_capturing(self, device: torch.device) -> bool:
        """Whether the current stream of ``device`` is being captured."""
        with torch.cuda.device(device):
            return bool(torch.cuda.is_current_stream_capturing())
