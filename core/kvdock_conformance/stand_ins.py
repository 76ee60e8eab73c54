"""Backends that the kit brings itself, to be asked for by name like any other: the reference, and the portable kernels.

They claim no device. `register` puts them into the process's registry, through the door that every plugin uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

import torch

import kvdock
from kvdock import runtime
from kvdock.ops.catalog import CATALOG
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock_conformance import reference
from kvdock_conformance.checking.target import HOST

__all__ = ["STAND_INS", "ReferenceKernel", "StandIn", "register", "register_backend"]


class StandIn(kvdock.plugin.Backend):
    """A backend on host memory that is only used when it is asked for by name.

    Args:
        name: its name.
        kernels: its kernels by op.
    """

    device_type = "stand_in"

    def __init__(self, name: str, kernels: Mapping[str, kvdock.plugin.Kernel]) -> None:
        self.name = name
        self._kernels = kernels

    def probe(self) -> kvdock.plugin.Probe:
        """Report ready."""
        return kvdock.plugin.Probe.ready("brought by kvdock_conformance")

    def claims(self, device: torch.device) -> bool:
        """Claim nothing: it is in nobody's way."""
        return False

    def devices(self) -> Sequence[torch.device]:
        """List the host."""
        return [HOST]

    def kernels(self) -> Mapping[str, kvdock.plugin.Kernel]:
        """Return the kernels."""
        return self._kernels


class _ReferenceDescriptor(kvdock.plugin.Descriptor):
    """Checks index values as any kernel on host memory does, and runs the reference."""

    workspace_bytes = 1 << 30
    """Keys and values of a whole sequence in float64, for each query head: how long it is no plan knows, so this is more than that."""

    def __init__(self, op: str) -> None:
        self._schema = CATALOG[op]
        self._reference = getattr(reference, op)

    def __call__(self, *args: Any) -> None:
        bound = self._schema.bind(args)
        if self._schema.check_values is not None:
            self._schema.check_values(bound)
        self._reference(*(value for arg, value in zip(self._schema.args, args, strict=True) if arg.scale_of is None))


class ReferenceKernel(kvdock.plugin.Kernel):
    """The slow reference of an op as a kernel."""

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        """Serve what stores bits as they come."""
        dtypes = dict.fromkeys(meta.dtype for meta in request.args.values() if isinstance(meta, kvdock.plugin.TensorMeta))
        quantised = [dtype for dtype in dtypes if dtype in kvdock.plugin.QUANTISED_DTYPES]
        return [f"the reference does not say what a quantised cache ({dtype}) holds" for dtype in quantised]

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        """Return a plan, which holds nothing."""
        return _ReferenceDescriptor(request.op)


STAND_INS: Mapping[str, Callable[[], kvdock.plugin.Backend]] = MappingProxyType(
    {
        "reference": lambda: StandIn("reference", {op: ReferenceKernel() for op in CATALOG if hasattr(reference, op)}),
        "portable-kernels": lambda: StandIn("portable-kernels", PORTABLE_KERNELS),
    }
)
"""Makers of the kit's own backends by name."""


def register_backend(backend: kvdock.plugin.Backend) -> None:
    """Put a backend into the process's registry, as a plugin of its own.

    Raises:
        ArgumentValueError: its name is taken.
        PluginError: it does not keep to the contract.
    """
    plugin = ModuleType("kvdock_conformance.stand_in")
    vars(plugin).update(KVDOCK_API=kvdock.plugin.KVDOCK_API, kvdock_backends=kvdock.plugin.hookimpl(_hook(backend)))
    runtime.default().registry.register(plugin, f"kvdock_conformance:{backend.name}")


def _hook(backend: kvdock.plugin.Backend) -> Callable[[], list[kvdock.plugin.Backend]]:
    def kvdock_backends() -> list[kvdock.plugin.Backend]:
        return [backend]

    return kvdock_backends


def register(name: str) -> None:
    """Put one of the kit's own backends into the process's registry; nothing if there is no such, or it is there."""
    if name in STAND_INS and name not in runtime.default().registry.loaded():
        register_backend(STAND_INS[name]())
