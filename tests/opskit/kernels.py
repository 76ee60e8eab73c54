"""Kernels and runtimes that tests make."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

import kvdock
from kvdock.ops.catalog import CATALOG
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock.plugins.registry import Registry
from support_plugins import QUIET, InProcessBackend, plugin

__all__ = ["CountingKernel", "counting_runtime", "runtime_of"]


class _CountedDescriptor(kvdock.plugin.Descriptor):
    """A descriptor that reports when it is destroyed."""

    def __init__(self, inner: kvdock.plugin.Descriptor, destroyed: list[kvdock.plugin.Request], request: kvdock.plugin.Request) -> None:
        self._inner = inner
        self._destroyed = destroyed
        self._request = request

    def __call__(self, *args: Any) -> None:
        for (name, meta), value in zip(self._request.args.items(), args, strict=True):
            if isinstance(meta, kvdock.plugin.TensorMeta):
                assert_as_promised(f"{self._request.op}: {name}", meta, value)
        self._inner(*args)

    def destroy(self) -> None:
        self._destroyed.append(self._request)
        self._inner.destroy()


class CountingKernel(kvdock.plugin.Kernel):
    """Another kernel that keeps a list of what it was asked to prepare, and of what was destroyed."""

    def __init__(self, inner: kvdock.plugin.Kernel) -> None:
        self.inner = inner
        self.prepared: list[kvdock.plugin.Request] = []
        self.destroyed: list[kvdock.plugin.Request] = []

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        return self.inner.supports(request)

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        self.prepared.append(request)
        return _CountedDescriptor(self.inner.prepare(request), self.destroyed, request)


def assert_as_promised(subject: str, meta: kvdock.plugin.TensorMeta, tensor: torch.Tensor) -> None:
    """Compare a tensor with what a kernel was told that it may rely on."""
    size, steps = tensor.element_size(), zip(tensor.shape, tensor.stride(), strict=True)
    assert tensor.dtype == meta.dtype, subject
    assert all(told in (None, is_) for told, is_ in zip(meta.shape, tensor.shape, strict=True)), f"{subject}: {meta.shape}, {tensor.shape}"
    assert tensor.data_ptr() % meta.alignment == 0, f"{subject}: alignment {meta.alignment}, address {tensor.data_ptr():#x}"
    if meta.strides is not None:
        assert tuple(0 if n == 1 else step for n, step in steps) == meta.strides, f"{subject}: {meta.strides}, {tensor.stride()}"
    elif meta.shape and meta.shape[-1] is not None:  # rows
        assert tensor.shape[-1] == 1 or tensor.stride(-1) == 1, subject
        runtime = [step * size for n, step in list(steps)[:-1] if n > 1]
        assert not any(step % meta.alignment for step in runtime), f"{subject}: alignment {meta.alignment}, steps {runtime}"


def runtime_of(*backends: kvdock.plugin.Backend, ops: Collection[str] = CATALOG) -> kvdock.Runtime:
    """Return a runtime with these backends of one plugin, and nothing else. Their kernels are for these ops."""
    registry = Registry(QUIET, ops=ops)
    registry.register(plugin(*backends), "made by a test")
    return kvdock.Runtime(registry)


def counting_runtime(
    device: str = "cpu", kernels: Mapping[str, kvdock.plugin.Kernel] = PORTABLE_KERNELS
) -> tuple[kvdock.Runtime, dict[str, CountingKernel]]:
    """Return a runtime whose one backend counts what it prepares, and its kernels."""
    counting = {op: CountingKernel(kernel) for op, kernel in kernels.items()}
    type_ = torch.device(device).type
    return runtime_of(InProcessBackend("counting", claims=(type_,), devices=(type_,), kernels=counting)), counting
