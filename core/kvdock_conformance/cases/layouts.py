"""Pools and sources in the memory orders that engines use."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import attrs

from kvdock_conformance.cases.drawing import ITEMSIZE, Drawing, View

__all__ = ["ANY_STEP", "PACKED", "PARTS", "POOLS", "READ_POOLS", "SINGLE_SIZES", "SOURCES", "Geometry", "Pair"]

ANY_STEP = "any step of a size of 1"
"""The pool, and the source, whose sizes of 1 have steps that mean nothing."""

Pair = tuple[View, View]
"""Keys and values."""


@attrs.frozen
class Geometry:
    """Sizes of a paged cache: ``[num_blocks, block, hk, dk]`` and ``[num_blocks, block, hv, dv]``.

    Args:
        num_blocks: blocks of the pool.
        block: tokens of a block.
        hk: heads of keys.
        dk: elements of a key.
        hv: heads of values.
        dv: elements of a value.
        dtype: torch's name of the dtype.
    """

    num_blocks: int = 6
    block: int = 4
    hk: int = 2
    dk: int = 8
    hv: int = 2
    dv: int = 8
    dtype: str = "bfloat16"

    @classmethod
    def even(cls, heads: int = 2, dim: int = 8, **sizes: Any) -> Geometry:
        """Return one whose keys and values have the same heads and dim."""
        return cls(hk=heads, dk=dim, hv=heads, dv=dim, **sizes)

    @property
    def capacity(self) -> int:
        """How many slots it has."""
        return self.num_blocks * self.block

    @property
    def k_shape(self) -> tuple[int, ...]:
        """Shape of the key cache."""
        return (self.num_blocks, self.block, self.hk, self.dk)

    @property
    def v_shape(self) -> tuple[int, ...]:
        """Shape of the value cache."""
        return (self.num_blocks, self.block, self.hv, self.dv)


SINGLE_SIZES: Mapping[str, Geometry] = MappingProxyType(
    {
        "one block": Geometry(num_blocks=1, block=16),
        "blocks of one slot": Geometry(num_blocks=16, block=1),
        "one head": Geometry.even(1),
        "one element": Geometry.even(dim=1),
        "one head of one element": Geometry.even(1, 1),
    }
)
"""Pools with sizes of 1."""

PACKED = ("halves [2, NB, ...]", "halves [NB, 2, ...]", "values before keys", "k and v side by side")
"""Keys and values in one tensor without gaps."""

PARTS = (
    *PACKED,
    "values inside keys",
    "layer-first",
    "page-first",
    "page-first, both together",
    "padded blocks",
)
"""Pools that are part of a larger tensor."""

PoolBuilder = Callable[[Drawing, Geometry], Pair]
SourceBuilder = Callable[[Drawing, Geometry, tuple[int, ...]], Pair]


Builder = TypeVar("Builder", bound=Callable[..., Any])


class _Builders(dict[str, Builder]):
    """Builders by name; ``"nhd / hnd"`` makes keys as the first does, and values as the second."""

    def __missing__(self, name: str) -> Callable[..., Pair]:
        keys, _, values = name.partition(" / ")
        if not values:
            raise KeyError(name)
        return functools.partial(_of_two, (self[keys], self[values]))


def _of_two(builders: Sequence[Callable[..., Pair]], drawing: Drawing, *sizes: Any) -> Pair:
    made = [(build(aside, *sizes)[number], aside) for number, build in enumerate(builders) for aside in [Drawing()]]
    k, v = (drawing.take(view, aside) for view, aside in made)
    return k, v


def _each(order: Sequence[int] = (0, 1, 2, 3), gaps: Sequence[int] = (0, 0, 0, 0), offset: int = 0, fill: str = "random") -> PoolBuilder:
    """Return a builder of two separate tensors; ``offset`` in elements."""

    def build(drawing: Drawing, g: Geometry) -> Pair:
        size = ITEMSIZE[g.dtype]
        k, v = (drawing.tensor(g.dtype, shape, order=order, gaps=gaps, offset=offset * size, fill=fill) for shape in (g.k_shape, g.v_shape))
        return k, v

    return build


def _halves_outer(drawing: Drawing, g: Geometry) -> Pair:
    return _one_behind_the_other(drawing, g, ())


def _halves_inner(drawing: Drawing, g: Geometry) -> Pair:
    return _one_behind_the_other(drawing, g, g.k_shape[:1])


def _values_first(drawing: Drawing, g: Geometry) -> Pair:
    return _halves_outer(drawing, _swapped(g))[::-1]


def _swapped(g: Geometry) -> Geometry:
    """Return sizes whose keys are like the values, and the other way round."""
    return attrs.evolve(g, hk=g.hv, dk=g.dv, hv=g.hk, dv=g.dk)


def _side_by_side(drawing: Drawing, g: Geometry) -> Pair:
    return _one_behind_the_other(drawing, g, g.k_shape[: 3 if g.hk == g.hv else 2])


def _one_behind_the_other(drawing: Drawing, g: Geometry, lead: tuple[int, ...]) -> Pair:
    """Return what there is of values behind what there is of keys: in each block, slot or head."""
    at, sizes = len(lead), (g.k_shape[len(lead) :], g.v_shape[len(lead) :])
    end, whole = math.prod(sizes[0]), sum(map(math.prod, sizes))
    both = drawing.tensor(g.dtype, (*lead, whole))
    return both.slice(at, 0, end).split(at, sizes[0]), both.slice(at, end, whole).split(at, sizes[1])


def _values_inside(drawing: Drawing, g: Geometry) -> Pair:
    """Values between the first head of keys and the second: no byte of them lies in front of the keys or behind them."""
    step = g.hv + 1
    heads = drawing.tensor(g.dtype, (*g.k_shape[:2], max(step * (g.hk - 1), g.hv) + 1, g.dk))
    return heads.slice(2, 0, heads.shape[2], step), heads.slice(2, 1, step)


def _layer_of(dim: int) -> PoolBuilder:
    """Return a builder of the second of three layers in one tensor whose dim ``dim`` is the layer."""

    def build(drawing: Drawing, g: Geometry) -> Pair:
        k, v = (drawing.tensor(g.dtype, (*shape[:dim], 3, *shape[dim:])).select(dim, 1) for shape in (g.k_shape, g.v_shape))
        return k, v

    return build


def _page_of_both(drawing: Drawing, g: Geometry) -> Pair:
    """The second of three layers in blocks of all layers, keys and values of each together: other layers lie on either side of both."""
    sizes = (g.k_shape[1:], g.v_shape[1:])
    end, whole = math.prod(sizes[0]), sum(map(math.prod, sizes))
    both = drawing.tensor(g.dtype, (g.num_blocks, 3, whole)).select(1, 1)
    return both.slice(1, 0, end).split(1, sizes[0]), both.slice(1, end, whole).split(1, sizes[1])


def _different_orders(gap: int, offset: int) -> PoolBuilder:
    """Return a builder of keys and values in unlike orders; free elements behind a block of values, and where values begin."""

    def build(drawing: Drawing, g: Geometry) -> Pair:
        k = drawing.tensor(g.dtype, g.k_shape, order=(0, 2, 1, 3), gaps=(8, 0, 0, 0))
        return k, drawing.tensor(g.dtype, g.v_shape, gaps=(0, gap, 0, 0), offset=offset * ITEMSIZE[g.dtype])

    return build


def _any_step_of_one(view: View) -> View:
    """Return a view with a step that means nothing, an odd one, wherever a size is 1."""
    return attrs.evolve(view, strides=tuple(977 if size == 1 else step for size, step in zip(view.shape, view.strides, strict=True)))


def _pools_of_any_step(drawing: Drawing, g: Geometry) -> Pair:
    return _any_step_of_one(drawing.tensor(g.dtype, g.k_shape)), _any_step_of_one(drawing.tensor(g.dtype, g.v_shape))


POOLS: Mapping[str, PoolBuilder] = _Builders(
    {
        "nhd": _each(),
        "hnd": _each((0, 2, 1, 3)),
        "heads outermost": _each((2, 0, 1, 3)),
        "slots outermost": _each((1, 0, 2, 3)),
        "halves [2, NB, ...]": _halves_outer,
        "halves [NB, 2, ...]": _halves_inner,
        "values before keys": _values_first,
        "k and v side by side": _side_by_side,
        "values inside keys": _values_inside,
        "layer-first": _layer_of(0),
        "page-first": _layer_of(1),
        "page-first, both together": _page_of_both,
        "padded blocks": _each(gaps=(0, 24, 0, 0)),
        "padded slots": _each(gaps=(0, 0, 8, 0)),
        "padded heads": _each(gaps=(0, 0, 0, 8)),
        "k and v unlike, in whole vectors": _different_orders(gap=8, offset=8),
        "odd steps": _each(gaps=(0, 1, 3, 5)),
        "odd address": _each(offset=1),
        "k and v unlike": _different_orders(gap=3, offset=2),
        ANY_STEP: _pools_of_any_step,
        "untouched memory": _each(fill="zeros"),
    }
)
"""Builders of the two caches, by name. Where values lie inside keys, their elements must be alike."""


def _expanded(*dims: int, room: int = 0) -> PoolBuilder:
    """Return a builder of pools that are one in memory along some dims, with ``room`` more blocks' memory behind them."""

    def pool(drawing: Drawing, shape: tuple[int, ...], dtype: str) -> View:
        own = [1 if dim in dims else size for dim, size in enumerate(shape)]
        more = drawing.tensor(dtype, (own[0] + room, *own[1:]))
        return more.slice(0, 0, own[0]).expand(shape)

    def build(drawing: Drawing, g: Geometry) -> Pair:
        return pool(drawing, g.k_shape, g.dtype), pool(drawing, g.v_shape, g.dtype)

    return build


def _keys_expanded(drawing: Drawing, g: Geometry) -> Pair:
    return _expanded(1)(drawing, g)[0], POOLS["nhd"](drawing, g)[1]


def _values_of_one_block(drawing: Drawing, g: Geometry) -> Pair:
    """Values that are the keys of the first block, for all: at one address, of one shape, and not the same."""
    k = drawing.tensor(g.dtype, g.k_shape)
    return k, k.slice(0, 0, 1).expand(g.k_shape)


def _part_of_keys(drawing: Drawing, g: Geometry, *, is_last: bool) -> Pair:
    """Values that are the first elements of each row of keys, or the last ones."""
    k = drawing.tensor(g.dtype, g.k_shape)
    return k, k.slice(3, (g.dk - g.dv) * is_last, g.dk if is_last else g.dv)


READ_POOLS: Mapping[str, PoolBuilder] = _Builders(
    {
        **POOLS,
        "one block for all": _expanded(0),
        "one slot for all": _expanded(1),
        "one head for all": _expanded(2),
        "one block of one slot": _expanded(0, 1),
        "one row": _expanded(0, 1, 2),
        "one slot for all, memory behind": _expanded(1, room=3),
        "one block for all, memory behind": _expanded(0, room=3),
        "keys expanded": _keys_expanded,
        "values expanded from keys": _values_of_one_block,
        "values begin keys": functools.partial(_part_of_keys, is_last=False),
        "values end keys": functools.partial(_part_of_keys, is_last=True),
    }
)
"""Builders of pools that are only read: those that are written, and those in which places share memory. Where values are a part of keys,
they have as many heads, and no more elements; of "values expanded from keys" the same sizes."""


def _contiguous(drawing: Drawing, g: Geometry, lead: tuple[int, ...]) -> Pair:
    return drawing.tensor(g.dtype, (*lead, g.hk, g.dk)), drawing.tensor(g.dtype, (*lead, g.hv, g.dv))


def _strided(gaps: Sequence[int] = (0, 0, 0), offset: int = 0) -> SourceBuilder:
    """Return a builder with free elements behind tokens, heads and rows; ``offset`` in elements."""

    def build(drawing: Drawing, g: Geometry, lead: tuple[int, ...]) -> Pair:
        every, size = (*[0] * (len(lead) - 1), *gaps), ITEMSIZE[g.dtype]
        k, v = (drawing.tensor(g.dtype, (*lead, *row), gaps=every, offset=offset * size) for row in ((g.hk, g.dk), (g.hv, g.dv)))
        return k, v

    return build


def _unlike_rows(drawing: Drawing, g: Geometry, lead: tuple[int, ...]) -> Pair:
    """Keys at a multiple of 64 bytes, values with other steps and at an address that is none of 16."""
    return _contiguous(drawing, g, lead)[0], _strided((0, 3, 0), offset=1)(drawing, g, lead)[1]


def _fused(drawing: Drawing, g: Geometry, lead: tuple[int, ...], q_width: int = 32) -> Pair:
    """Cut out of a fused projection, as 2-D rows ``[T, width]`` that are viewed as heads."""
    k_width, v_width = g.hk * g.dk, g.hv * g.dv
    projection = drawing.tensor(g.dtype, (math.prod(lead), q_width + k_width + v_width))
    k_rows = projection.slice(1, q_width, q_width + k_width)
    v_rows = projection.slice(1, q_width + k_width, q_width + k_width + v_width)
    return k_rows.split(1, (g.hk, g.dk)).split(0, lead), v_rows.split(1, (g.hv, g.dv)).split(0, lead)


def _two_projections(drawing: Drawing, g: Geometry, lead: tuple[int, ...]) -> Pair:
    """Keys of one fused projection, and values of another: in the steps of one, and not beside each other."""
    return _fused(drawing, g, lead, 0)[0], _fused(drawing, g, lead, 0)[1]


def _fused_values_first(drawing: Drawing, g: Geometry, lead: tuple[int, ...]) -> Pair:
    return _fused(drawing, _swapped(g), lead)[::-1]


def _cut_short(drawing: Drawing, g: Geometry, lead: tuple[int, ...]) -> Pair:
    """The first tokens of longer rows: whole in each row, and not one behind the other from row to row."""
    k, v = (drawing.tensor(g.dtype, (*lead[:-1], lead[-1] + 2, heads, dim)) for heads, dim in ((g.hk, g.dk), (g.hv, g.dv)))
    return k.slice(len(lead) - 1, 0, lead[-1]), v.slice(len(lead) - 1, 0, lead[-1])


def _heads_before_tokens(drawing: Drawing, g: Geometry, lead: tuple[int, ...]) -> Pair:
    """``[B, H, q, D]`` as attention layers have them, with heads and tokens swapped back."""
    at = len(lead) - 1
    k, v = (
        drawing.tensor(g.dtype, (*lead[:-1], heads, lead[-1], dim)).transpose(at, at + 1) for heads, dim in ((g.hk, g.dk), (g.hv, g.dv))
    )
    return k, v


def _every_other(drawing: Drawing, g: Geometry, lead: tuple[int, ...]) -> Pair:
    k, v = _contiguous(drawing, g, (*lead[:-1], 2 * lead[-1]))
    at, count = len(lead) - 1, 2 * lead[-1]
    return k.slice(at, 0, count, 2), v.slice(at, 1, count, 2)


def _one_head_for_all(drawing: Drawing, g: Geometry, lead: tuple[int, ...]) -> Pair:
    k, v = _contiguous(drawing, attrs.evolve(g, hk=1, hv=1), lead)
    return k.expand((*lead, g.hk, g.dk)), v.expand((*lead, g.hv, g.dv))


def _one_token_for_all(drawing: Drawing, g: Geometry, lead: tuple[int, ...]) -> Pair:
    k, v = _contiguous(drawing, g, (1,) * len(lead))
    return k.expand((*lead, g.hk, g.dk)), v.expand((*lead, g.hv, g.dv))


def _of_the_first_token(drawing: Drawing, g: Geometry, lead: tuple[int, ...]) -> Pair:
    """Values that are a part of the first token's keys, for all tokens: at one address, and, if sizes are alike, of one shape."""
    last = len(lead)
    both = v = drawing.tensor(g.dtype, (*lead, max(g.hk, g.hv), max(g.dk, g.dv)))
    for dim in range(last):
        v = v.slice(dim, 0, 1)
    k = both.slice(last, 0, g.hk).slice(last + 1, 0, g.dk)
    return k, v.slice(last, 0, g.hv).slice(last + 1, 0, g.dv).expand((*lead, g.hv, g.dv))


def _tokens_before_rows(drawing: Drawing, g: Geometry, lead: tuple[int, ...]) -> Pair:
    """``[S, B, H, D]`` as some models compute, with tokens and rows swapped back."""
    if len(lead) == 1:
        return _contiguous(drawing, g, lead)
    k, v = _contiguous(drawing, g, (lead[1], lead[0]))
    return k.transpose(0, 1), v.transpose(0, 1)


def _behind_one_token(drawing: Drawing, g: Geometry, lead: tuple[int, ...]) -> Pair:
    """Keys of one token for all, and right behind that the values of each: side by side like parts of a row, and in other steps."""
    width, count = g.hk * g.dk, math.prod(lead)
    both = drawing.tensor(g.dtype, (width + count * g.hv * g.dv,))
    k = both.slice(0, 0, width).split(0, (*[1] * len(lead), g.hk, g.dk))
    return k.expand((*lead, g.hk, g.dk)), both.slice(0, width, both.shape[0]).split(0, (*lead, g.hv, g.dv))


def _rows_of_any_step(drawing: Drawing, g: Geometry, lead: tuple[int, ...]) -> Pair:
    k, v = _contiguous(drawing, g, lead)
    return _any_step_of_one(k), _any_step_of_one(v)


SOURCES: Mapping[str, SourceBuilder] = _Builders(
    {
        "contiguous": _contiguous,
        "fused qkv": _fused,
        "fused kv": functools.partial(_fused, q_width=0),
        "fused qvk": _fused_values_first,
        "two projections": _two_projections,
        "[B, H, q, D]": _heads_before_tokens,
        "every other token": _every_other,
        "cut short": _cut_short,
        "padded tokens": _strided((0, 8, 0)),
        "padded heads": _strided((0, 0, 8)),
        "odd steps": _strided((0, 1, 3)),
        "odd address": _strided(offset=1),
        "k and v unlike": _unlike_rows,
        "one head for all": _one_head_for_all,
        "one token for all": _one_token_for_all,
        "values behind one token": _behind_one_token,
        "values of the first token": _of_the_first_token,
        "[S, B, H, D]": _tokens_before_rows,
        ANY_STEP: _rows_of_any_step,
    }
)
"""Builders of ``k`` and ``v`` with given leading sizes, by name."""
