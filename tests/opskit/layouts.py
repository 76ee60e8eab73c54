"""Pools and sources in the memory orders that engines use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import attrs
import torch

from opskit.memory import Memory

__all__ = ["POOLS", "SOURCES", "Geometry"]

Pair = tuple[torch.Tensor, torch.Tensor]


@attrs.frozen
class Geometry:
    """Sizes of a paged cache. K and V are alike unless a test says otherwise."""

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
    def capacity(self) -> int:
        return self.num_blocks * self.block

    @property
    def k_shape(self) -> tuple[int, ...]:
        return (self.num_blocks, self.block, self.hk, self.dk)

    @property
    def v_shape(self) -> tuple[int, ...]:
        return (self.num_blocks, self.block, self.hv, self.dv)

    def pools(self, memory: Memory, name: str = "nhd") -> Pair:
        """Return the two caches in one of `POOLS`."""
        return POOLS[name](memory, self)

    def tokens(self, memory: Memory, lead: Sequence[int], name: str = "contiguous") -> Pair:
        """Return ``k`` and ``v`` with these leading sizes in one of `SOURCES`."""
        return SOURCES[name](memory, self, tuple(lead))


def _each(
    order: Sequence[int] = (0, 1, 2, 3), gaps: Sequence[int] = (0, 0, 0, 0), offset: int = 0, shift: int = 0
) -> Callable[[Memory, Geometry], Pair]:
    """Return a builder of two separate tensors; ``offset`` and ``shift`` in elements."""

    def build(memory: Memory, g: Geometry) -> Pair:
        size = g.dtype.itemsize
        k, v = (
            memory.tensor(g.dtype, shape, order=order, gaps=gaps, offset=offset * size, shift=shift * size)
            for shape in (g.k_shape, g.v_shape)
        )
        return k, v

    return build


def _halves_outer(memory: Memory, g: Geometry) -> Pair:
    both = memory.tensor(g.dtype, (2, *g.k_shape))
    return both[0], both[1]


def _halves_inner(memory: Memory, g: Geometry) -> Pair:
    both = memory.tensor(g.dtype, (g.num_blocks, 2, *g.k_shape[1:]))
    return both[:, 0], both[:, 1]


def _side_by_side(memory: Memory, g: Geometry) -> Pair:
    rows = memory.tensor(g.dtype, (*g.k_shape[:3], g.dk + g.dv))
    return rows[..., : g.dk], rows[..., g.dk :]


def _layer_of(dim: int) -> Callable[[Memory, Geometry], Pair]:
    """Return a builder of the second of three layers in one tensor whose dim ``dim`` is the layer."""

    def build(memory: Memory, g: Geometry) -> Pair:
        k, v = (memory.tensor(g.dtype, (*shape[:dim], 3, *shape[dim:])).select(dim, 1) for shape in (g.k_shape, g.v_shape))
        return k, v

    return build


def _different_orders(memory: Memory, g: Geometry) -> Pair:
    k = memory.tensor(g.dtype, g.k_shape, order=(0, 2, 1, 3), gaps=(8, 0, 0, 0))
    return k, memory.tensor(g.dtype, g.v_shape, gaps=(0, 3, 0, 0), offset=2 * g.dtype.itemsize)


POOLS: Mapping[str, Callable[[Memory, Geometry], Pair]] = MappingProxyType(
    {
        "nhd": _each(),
        "hnd": _each((0, 2, 1, 3)),
        "heads outermost": _each((2, 0, 1, 3)),
        "slots outermost": _each((1, 0, 2, 3)),
        "halves [2, NB, ...]": _halves_outer,
        "halves [NB, 2, ...]": _halves_inner,
        "k and v side by side": _side_by_side,
        "layer-first": _layer_of(0),
        "page-first": _layer_of(1),
        "padded blocks": _each(gaps=(0, 24, 0, 0)),
        "padded slots": _each(gaps=(0, 0, 8, 0)),
        "padded heads": _each(gaps=(0, 0, 0, 8)),
        "odd steps": _each(gaps=(0, 1, 3, 5)),
        "odd address": _each(offset=1),
        "even address in an odd storage": _each(offset=1, shift=31),
        "k and v unlike": _different_orders,
    }
)
"""Builders of the two caches, by name. Where K and V share one tensor, their sizes must be alike."""


def _contiguous(memory: Memory, g: Geometry, lead: tuple[int, ...]) -> Pair:
    return memory.tensor(g.dtype, (*lead, g.hk, g.dk)), memory.tensor(g.dtype, (*lead, g.hv, g.dv))


def _strided(gaps: Sequence[int] = (0, 0, 0), offset: int = 0, shift: int = 0) -> Callable[[Memory, Geometry, tuple[int, ...]], Pair]:
    """Return a builder with free elements behind tokens, heads and rows; ``offset`` and ``shift`` in elements."""

    def build(memory: Memory, g: Geometry, lead: tuple[int, ...]) -> Pair:
        every = (*[0] * (len(lead) - 1), *gaps)
        k, v = (
            memory.tensor(g.dtype, (*lead, *row), gaps=every, offset=offset * g.dtype.itemsize, shift=shift * g.dtype.itemsize)
            for row in ((g.hk, g.dk), (g.hv, g.dv))
        )
        return k, v

    return build


def _fused(memory: Memory, g: Geometry, lead: tuple[int, ...], q_width: int = 32) -> Pair:
    """Cut out of a fused projection, as 2-D rows ``[T, width]`` that are viewed as heads."""
    k_width, v_width = g.hk * g.dk, g.hv * g.dv
    projection = memory.tensor(g.dtype, (math.prod(lead), q_width + k_width + v_width))
    _, k_rows, v_rows = projection.split([q_width, k_width, v_width], dim=1)
    return k_rows.view(*lead, g.hk, g.dk), v_rows.view(*lead, g.hv, g.dv)


def _heads_before_tokens(memory: Memory, g: Geometry, lead: tuple[int, ...]) -> Pair:
    """``[B, H, q, D]`` as attention layers have them, with heads and tokens swapped back."""
    k, v = (memory.tensor(g.dtype, (*lead[:-1], heads, lead[-1], dim)).transpose(-3, -2) for heads, dim in ((g.hk, g.dk), (g.hv, g.dv)))
    return k, v


def _every_other(memory: Memory, g: Geometry, lead: tuple[int, ...]) -> Pair:
    k, v = _contiguous(memory, g, (*lead[:-1], 2 * lead[-1]))
    return k[..., ::2, :, :], v[..., 1::2, :, :]


def _one_head_for_all(memory: Memory, g: Geometry, lead: tuple[int, ...]) -> Pair:
    k, v = _contiguous(memory, attrs.evolve(g, hk=1, hv=1), lead)
    return k.expand(*lead, g.hk, g.dk), v.expand(*lead, g.hv, g.dv)


def _one_token_for_all(memory: Memory, g: Geometry, lead: tuple[int, ...]) -> Pair:
    k, v = _contiguous(memory, g, (1,) * len(lead))
    return k.expand(*lead, g.hk, g.dk), v.expand(*lead, g.hv, g.dv)


SOURCES: Mapping[str, Callable[..., Pair]] = MappingProxyType(
    {
        "contiguous": _contiguous,
        "fused qkv": _fused,
        "[B, H, q, D]": _heads_before_tokens,
        "every other token": _every_other,
        "padded tokens": _strided((0, 8, 0)),
        "padded heads": _strided((0, 0, 8)),
        "odd steps": _strided((0, 1, 3)),
        "odd address": _strided(offset=1),
        "even address in an odd storage": _strided(offset=1, shift=31),
        "one head for all": _one_head_for_all,
        "one token for all": _one_token_for_all,
    }
)
"""Builders of ``k`` and ``v``, by name."""
