"""The conformance kit's pools and sources, as tensors in a test's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch

from kvdock_conformance.cases import layouts
from kvdock_conformance.cases.drawing import Drawing
from opskit.memory import Memory

__all__ = ["POOLS", "SOURCES", "Geometry"]

Pair = tuple[torch.Tensor, torch.Tensor]


@attrs.frozen
class Geometry:
    """Sizes of a paged cache, as the kit's, with torch's own dtype. K and V are alike unless a test says otherwise."""

    num_blocks: int = 6
    block: int = 4
    hk: int = 2
    dk: int = 8
    hv: int = 2
    dv: int = 8
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def even(cls, heads: int = 2, dim: int = 8, **sizes: int) -> Geometry:
        """Return one whose K and V have the same heads and dim."""
        return cls(hk=heads, dk=dim, hv=heads, dv=dim, **sizes)

    @property
    def drawn(self) -> layouts.Geometry:
        """The same for the kit."""
        return layouts.Geometry(**{**attrs.asdict(self), "dtype": str(self.dtype).removeprefix("torch.")})

    @property
    def capacity(self) -> int:
        return self.drawn.capacity

    @property
    def k_shape(self) -> tuple[int, ...]:
        return self.drawn.k_shape

    @property
    def v_shape(self) -> tuple[int, ...]:
        return self.drawn.v_shape

    def pools(self, memory: Memory, name: str = "nhd") -> Pair:
        """Return the two caches in one of `POOLS`."""
        return POOLS[name](memory, self)

    def tokens(self, memory: Memory, lead: Sequence[int], name: str = "contiguous") -> Pair:
        """Return ``k`` and ``v`` with these leading sizes in one of `SOURCES`."""
        return SOURCES[name](memory, self, tuple(lead))


def _real(build: Callable[..., layouts.Pair]) -> Callable[..., Pair]:
    """Return a builder of tensors from a builder of views."""

    def real(memory: Memory, g: Geometry, *more: Any) -> Pair:
        drawing = Drawing()
        k, v = memory.real(drawing, *build(drawing, g.drawn, *more))
        return k, v

    return real


POOLS: Mapping[str, Callable[[Memory, Geometry], Pair]] = MappingProxyType({name: _real(build) for name, build in layouts.POOLS.items()})
"""Builders of the two caches, by name. Where K and V share one tensor, their sizes must be alike."""

SOURCES: Mapping[str, Callable[..., Pair]] = MappingProxyType({name: _real(build) for name, build in layouts.SOURCES.items()})
"""Builders of ``k`` and ``v`` with given leading sizes, by name."""
