"""Triton's kernels under its interpreter: a backend as a third party writes one, for a kind of device that is not there.

The interpreter must be chosen before Triton is imported. `WHY_NOT` says why this process cannot have it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Mapping

import attrs

import kvdock
from opskit.kernels import runtime_of
from opskit.targets import Target
from support_acme import AcmeBackend

__all__ = ["HOST_PAIRS", "INTERPRETED", "WHY_NOT", "AcmeBackend", "InterpretedTarget"]

WHY_NOT = "needs TRITON_INTERPRET=1; test_triton_interpreted.py runs this folder so" if os.environ.get("TRITON_INTERPRET") != "1" else ""
if importlib.util.find_spec("triton") is None:
    WHY_NOT = "needs Triton: pip install 'kvdock[triton]'"


class DevicePairsBackend(AcmeBackend):
    """One that takes block pairs in host memory for pairs on its device, which only the kernel can check."""

    def kernels(self) -> Mapping[str, kvdock.plugin.Kernel]:
        from kvdock_triton.copy_blocks import CopyBlocks, CopyBlocksDescriptor

        class OnDevice(CopyBlocksDescriptor):
            __call__ = CopyBlocksDescriptor.run

        class DevicePairs(CopyBlocks):
            def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
                made = super().prepare(request)
                made.__class__ = OnDevice
                return made

        return {**super().kernels(), "copy_blocks_": DevicePairs(self)}


@attrs.frozen
class InterpretedTarget(Target):
    """Kernels on host memory that treat it as a device's."""

    @property
    def runtime(self) -> kvdock.Runtime:
        return _runtime(self.as_device)


@functools.cache
def _runtime(device_pairs: bool) -> kvdock.Runtime:
    """Return a runtime with one such backend, registered in this process."""
    return runtime_of(DevicePairsBackend() if device_pairs else AcmeBackend())


INTERPRETED = InterpretedTarget("interpreted", "cpu", True)
"""Index tensors are never read by the host."""

HOST_PAIRS = InterpretedTarget("interpreted, host pairs", "cpu", False)
"""For `copy_blocks_` alone: pairs lie in host memory, and are checked there before a launch."""
