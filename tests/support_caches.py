"""Specs, numbers and runtimes for the tests of caches."""

from __future__ import annotations

import importlib.util
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch

import kvdock
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock.plugins.registry import Registry
from support_plugins import QUIET, CallDescriptor, InProcessBackend, plugin

CPU = kvdock.RankInfo("cpu")

SPECS: Mapping[str, kvdock.KVSpec] = {
    "uniform": kvdock.KVSpec.uniform(num_layers=3, num_kv_heads=2, head_dim=8, max_positions=64, dtype=torch.float32),
    "values differ from keys": kvdock.KVSpec((kvdock.LayerSpec(4, 2, 8, 5),) * 2, 64, torch.bfloat16),
    "layers differ": kvdock.KVSpec(
        (
            kvdock.LayerSpec(2, 2, 8, 8),
            kvdock.LayerSpec(1, 3, 16, 4),
            kvdock.LayerSpec(2, 2, 8, 8),
            kvdock.LayerSpec(1, 3, 16, 4),
            kvdock.LayerSpec(5, 1, 3, 1),
        ),
        64,
        torch.float16,
    ),
}
"""Equal layers; keys and values of other heads and dims; groups of layers that alternate, beside one of its own."""

WITH_BACKENDS = importlib.util.find_spec("kvdock_cpu") is not None
needs_backends = pytest.mark.skipif(not WITH_BACKENDS, reason="backends/ is not part of this tree")
RUNTIMES = ("cpu", "portable") if WITH_BACKENDS else ("portable",)
"""Where ops may come from: kvdock's backend for the CPU, if it is there, and the portable kernels."""

LAYOUTS = tuple(itertools.product(kvdock.KVCacheLayout, kvdock.HeadLayout))
LAYOUT_NAMES = tuple(f"{layout.value}-{heads.value}" for layout, heads in LAYOUTS)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a floating-point tensor as integers of the same shape and strides."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def random_bits(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a tensor of any bits: NaN payloads, infinities, -0 and subnormals are among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype).squeeze(-1)


def tokens(spec: kvdock.KVSpec, layer: int, lead: Sequence[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of new tokens for one layer on one rank of one."""
    of = spec.layers[layer]
    assert isinstance(of, kvdock.LayerSpec)
    k = random_bits((*lead, of.num_k_heads, of.k_dim), spec.dtype, seed)
    return k, random_bits((*lead, of.num_v_heads, of.v_dim), spec.dtype, seed + 1)


def write_slots(pool: torch.Tensor, new: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return what ``[NB, block, H, D]`` bits become when tokens are written, one place after another."""
    after = pool.clone()
    for place in itertools.product(*map(range, slots.shape)):
        slot = int(slots[place])
        if slot >= 0:
            after[slot // pool.shape[1], slot % pool.shape[1]] = new[place]
    return after


def read_slots(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return what ``[NB, block, H, D]`` bits hold at some slots, zeros at negative ones."""
    found = torch.zeros((*slots.shape, *pool.shape[2:]), dtype=pool.dtype)
    for place in itertools.product(*map(range, slots.shape)):
        slot = int(slots[place])
        if slot >= 0:
            found[place] = pool[slot // pool.shape[1], slot % pool.shape[1]]
    return found


def contents(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a copy of the bits of every layer."""
    return [(bits(cache.k_cache(i)).clone(), bits(cache.v_cache(i)).clone()) for i in range(cache.num_layers)]


def same(left: Iterable[Iterable[torch.Tensor]], right: Iterable[Iterable[torch.Tensor]]) -> bool:
    """Whether two lists of pairs of tensors hold the same."""
    return all(torch.equal(a, b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True))


def addresses(view: torch.Tensor) -> torch.Tensor:
    """Return the address of every place of a view."""
    found = torch.full(view.shape, view.data_ptr(), dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        steps = torch.arange(size, dtype=torch.int64) * stride * view.element_size()
        found += steps.view([-1 if i == dim else 1 for i in range(view.ndim)])
    return found


class CountingKernel(kvdock.plugin.Kernel):
    """kvdock's portable kernel for an op, which counts its calls under ``(backend, op)``."""

    def __init__(self, backend: str, op: str, calls: Counter[tuple[str, str]]) -> None:
        self._key = (backend, op)
        self._inner = PORTABLE_KERNELS[op]
        self._calls = calls

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        return self._inner.supports(request)

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        inner = self._inner.prepare(request)

        def call(*args: Any) -> None:
            self._calls[self._key] += 1
            inner(*args)

        return CallDescriptor(call)


def runtime_of(*backends: kvdock.plugin.Backend) -> kvdock.Runtime:
    """Return a runtime with these backends and no others."""
    registry = Registry(QUIET)
    registry.register(plugin(*backends), "in-process")
    return kvdock.Runtime(registry)


def counting_runtime(*names: str) -> tuple[kvdock.Runtime, Counter[tuple[str, str]]]:
    """Return a runtime whose backends all serve the CPU, the first by preference, and the count of their calls."""
    calls: Counter[tuple[str, str]] = Counter()
    backends = [
        InProcessBackend(
            name,
            claims=["cpu"],
            devices=["cpu"],
            kernels={op: CountingKernel(name, op, calls) for op in PORTABLE_KERNELS},
            priority=kvdock.plugin.Priority.SPECIALISED if name == names[0] else kvdock.plugin.Priority.NORMAL,
        )
        for name in names
    ]
    return runtime_of(*backends), calls


def runtime_for(kind: str) -> kvdock.Runtime:
    """Return a runtime that serves the CPU: with kvdock's own backend for it, or with portable kernels only."""
    if kind == "cpu":
        return kvdock.Runtime(environ={"KVDOCK_BACKENDS": "cpu"})
    assert kind == "portable", kind
    return runtime_of(InProcessBackend("bare", claims=["cpu"], devices=["cpu"]))
