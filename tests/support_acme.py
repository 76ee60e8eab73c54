"""Triton's kernels under its interpreter, as a backend that a child of the kit registers: it imports no more than a vendor's does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kvdock.interface import HOST
from kvdock_conformance.stand_ins import register_backend
from kvdock_triton import TritonBackend

__all__ = ["AcmeBackend", "register"]


class AcmeBackend(TritonBackend):
    """A third party's backend, whole. Its devices are called "acme", and torch calls their memory "cpu"."""

    name = "acme"
    device_type = "acme"
    torch_type = "cpu"

    def devices(self) -> Sequence[torch.device]:
        return [HOST]

    def device_guard(self, device: torch.device) -> AbstractContextManager[Any]:
        return nullcontext()


def register() -> None:
    """Put the backend into the process's registry: what a child of the conformance kit is told to call."""
    register_backend(AcmeBackend())
