"""What an op may run on: the CPU backend, the portable kernels, and the portable kernels as they are on a device."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import attrs
import pytest
import torch

import kvdock
from kvdock.ops.portable import PORTABLE_KERNELS, copy_blocks, swap_blocks
from kvdock.ops.portable.rows import PortableDescriptor
from kvdock.plugins.registry import Registry
from kvdock.runtime import made, set_default
from opskit.kernels import runtime_of
from support_plugins import QUIET, InProcessBackend

__all__ = ["DEVICE_KERNELS", "SINGLE", "TARGETS", "Target", "active", "forget_runtimes", "torch_threads"]

HAS_CPU_BACKEND = importlib.util.find_spec("kvdock_cpu") is not None


@attrs.frozen
class Target:
    """One way to run an op.

    Args:
        name: for the test's name.
        device: torch's name of the device that tensors lie on.
        as_device: whether index tensors on it are never read by the host: out of range is skipped and counted.
        threads: how many threads torch may use.
    """

    name: str
    device: str
    as_device: bool
    threads: int = 1

    @property
    def runtime(self) -> kvdock.Runtime:
        return _runtime(self.name)

    @property
    def kernels(self) -> Mapping[str, kvdock.plugin.Kernel]:
        """The kernels that serve its ops."""
        device = torch.device(self.device_name)
        return self.runtime.dispatcher.choose("paged_caching_", device, None).kernels or PORTABLE_KERNELS

    @property
    def device_name(self) -> str:
        """The device as torch prints it, with its index."""
        return str(torch.empty(0, device=self.device).device)

    def host_reads(self, index: Any) -> bool:
        """Whether the host checks an index argument, and raises before anything is written."""
        if not isinstance(index, torch.Tensor):
            return True
        return index.device.type == "cpu" and not (self.device == "cpu" and self.as_device)

    def skipped(self) -> int:
        """Return how many writes were skipped so far."""
        return self.runtime.skipped_writes(self.device)

    def __str__(self) -> str:
        return f"{self.name}-{self.threads}"


@contextlib.contextmanager
def active(runtime: kvdock.Runtime, named: str | None = None) -> Iterator[kvdock.Runtime]:
    """Let the functions in `kvdock.ops` run on a runtime, and on a backend of it, for a block."""
    before = made()
    set_default(runtime)
    try:
        with kvdock.use_backend(named) if named else contextlib.nullcontext():
            yield runtime
    finally:
        set_default(before)


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use this many threads in a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _DevicePairs(kvdock.plugin.Descriptor):
    """Portable `copy_blocks_` or `swap_blocks_` that takes pairs in host memory for pairs on a device."""

    def __init__(self, inner: PortableDescriptor) -> None:
        self._inner = inner

    def __call__(self, *args: Any) -> None:
        module = copy_blocks if self._inner.op == "copy_blocks_" else swap_blocks
        with mock.patch.object(module, "HOST", torch.device("meta")):
            self._inner(*args)


class _DeviceKernel(kvdock.plugin.Kernel):
    """A portable kernel whose plans never read an index tensor, as on a device.

    Args:
        op: whose kernel.
    """

    def __init__(self, op: str) -> None:
        self._kernel = PORTABLE_KERNELS[op]

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        return self._kernel.supports(request)

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        prepared = self._kernel.prepare(request)
        assert isinstance(prepared, PortableDescriptor)
        if request.op in ("copy_blocks_", "swap_blocks_"):
            return _DevicePairs(prepared)
        prepared.on_host = False
        return prepared


DEVICE_KERNELS: Mapping[str, kvdock.plugin.Kernel] = {
    **{op: _DeviceKernel(op) for op in PORTABLE_KERNELS},
    "mla_caching_": kvdock.plugin.LatentKernel(_DeviceKernel("paged_caching_")),
    "mla_gather": kvdock.plugin.LatentKernel(_DeviceKernel("gather_paged")),
}
"""Portable kernels on host memory that skip and count what is out of range, as on a device."""


@functools.cache
def _runtime(name: str) -> kvdock.Runtime:
    """Return the runtime of a target, made once per process: plans of one test are there in the next."""
    if name == "cpu":
        registry = Registry(QUIET)
        registry.register(importlib.import_module("kvdock_cpu"), "kvdock_cpu, under test")
        return kvdock.Runtime(registry)
    if name == "cuda":
        registry = Registry(QUIET)
        registry.register(importlib.import_module("kvdock_cuda"), "kvdock_cuda, under test")
        return kvdock.Runtime(registry)
    kernels = DEVICE_KERNELS if name == "portable as on a device" else {}
    device = "cuda" if name == "portable on cuda" else "cpu"
    return runtime_of(InProcessBackend("plain", claims=(device,), devices=(device,), kernels=kernels))


def forget_runtimes() -> None:
    """Let each target have a new runtime, in which nothing was called yet."""
    _runtime.cache_clear()


def _targets(*thread_counts: int) -> Iterator[Any]:
    """Yield each target as a parameter."""
    no_cpu = pytest.mark.skipif(not HAS_CPU_BACKEND, reason="kvdock_cpu is not installed")
    for threads in thread_counts:
        yield pytest.param(Target("cpu", "cpu", False, threads), marks=no_cpu, id=f"cpu-{threads}")
        yield pytest.param(Target("portable", "cpu", False, threads), id=f"portable-{threads}")
        yield pytest.param(Target("portable as on a device", "cpu", True, threads), id=f"device-{threads}")
    if torch.cuda.is_available():
        yield pytest.param(Target("cuda", "cuda", True), marks=pytest.mark.gpu, id="cuda")
        yield pytest.param(Target("portable on cuda", "cuda", True), marks=pytest.mark.gpu, id="portable-cuda")


TARGETS = tuple(_targets(1, 2))
"""Every target, with one and with two torch threads, as parameters for a fixture; a GPU's only where there is one."""

SINGLE = tuple(_targets(1))
"""Every target with one thread: for what is too small to be shared among threads."""
