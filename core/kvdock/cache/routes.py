"""How blocks get from one cache to another of the same layers: in as few calls of `swap_blocks_` as their memory allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch

from kvdock.cache.grouped import GroupedCache
from kvdock.cache.interface import OpSource
from kvdock.errors import ArgumentTypeError, ArgumentValueError, IndexRangeError
from kvdock.interface import HOST
from kvdock.ops.api import BlockPairs, pairs_tensor
from kvdock.ops.catalog import INDEX_DTYPES
from kvdock.ops.index_values import pairs_on_device
from kvdock.spec import check_int

__all__ = ["Routes"]

_OP = "swap_blocks_"
_Swap = Callable[..., Any]


class Routes:
    """The ways from one cache to others, each bound once. A copy of the cache finds its own.

    Args:
        ops: where ops come from.
    """

    def __init__(self, ops: OpSource) -> None:
        self._ops = ops
        self._known: WeakKeyDictionary[GroupedCache, dict[int, list[_Swap]]] = WeakKeyDictionary()

    def __copy__(self) -> Self:
        return type(self)(self._ops)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(self._ops)  # what is bound is bound to the memory of the original

    def swap(self, src: GroupedCache, dst: GroupedCache, block_pairs: BlockPairs, group: int) -> None:
        """Copy blocks of a group. See `kvdock.PagedKVCache.swap_blocks`."""
        check_int(f"{type(src).__name__}.swap_blocks: group", group, 0)  # before it is looked up: 0.0 and False are found as 0
        found = self._known.get(dst, {}).get(group) if isinstance(dst, GroupedCache) else None
        if found is None:
            found = self._bound(src, dst, group)
            self._known.setdefault(dst, {})[group] = found
        pairs = _once(pairs_tensor(block_pairs, _OP), src, dst)
        for swap in found:
            swap(pairs)

    def _bound(self, src: GroupedCache, dst: GroupedCache, group: int) -> list[_Swap]:
        _check(src, dst, group)
        op, named = self._ops.op(_OP), (dst if src.device == HOST else src)._named
        return [op.bind(*each, named=named) for each in _parts(src, dst, group)]


def _once(pairs: torch.Tensor, src: GroupedCache, dst: GroupedCache) -> torch.Tensor:
    """Check pairs for all calls, and bring them to the device that runs them. What is no list of pairs is for the op to explain."""
    device = dst.device if src.device == HOST else src.device
    if pairs.device != HOST or device == HOST or pairs.dtype not in INDEX_DTYPES or pairs.shape[1:] != (2,) or pairs.stride(1) != 1:
        return pairs
    return pairs_on_device(_OP, pairs, dst.num_blocks, device, num_sources=src.num_blocks)


def _check(src: GroupedCache, dst: GroupedCache, group: int) -> None:
    """Refuse a cache that blocks of this one do not fit into.

    Raises:
        ArgumentTypeError, ArgumentValueError, IndexRangeError: they do not, are one, or have no such group; says what.
    """
    subject = f"{type(src).__name__}.swap_blocks"
    if not isinstance(dst, GroupedCache):
        fix = "make one of the same KVSpec, with a PagedKVCacheConfig"
        raise ArgumentTypeError(f"{subject}: dst", expected="another cache in blocks", got=repr(dst)[:80], fix=fix)
    if dst is src:
        fix = "copy blocks inside one cache with copy_blocks(block_pairs)"
        raise ArgumentValueError(f"{subject}: dst", expected="another cache", got="the cache itself", fix=fix)
    if group >= len(src.groups):
        expected, fix = f"0 to {len(src.groups) - 1}", "ask group_of(layer)"
        raise IndexRangeError(f"{subject}: group", expected=expected, got=group, fix=fix)
    ours, theirs = _kept(src), _kept(dst)
    for key in [*ours, *theirs]:
        if ours.get(key) != theirs.get(key):
            (layer, name), fix = key, "make both of one KVSpec, with the same block_size, keep_all, and share of the heads"
            expected = f"what this one keeps: {_described(ours.get(key))} as {name!r} of layer {layer}"
            raise ArgumentValueError(f"{subject}: dst", expected=expected, got=_described(theirs.get(key)), fix=fix)


_Kept = tuple[int, list[int], torch.dtype]


def _kept(end: GroupedCache) -> dict[tuple[int, str], _Kept]:
    """Return of each buffer its group, the shape of a block of it, and its dtype."""
    return {
        (layer, name): (end._numbers[layer][name], [*view.shape[1:]], view.dtype)
        for layer, found in end._store.named.items()
        for name, view in found.items()
    }


def _described(kept: _Kept | None) -> str:
    return "nothing" if kept is None else f"blocks of {kept[1]} {str(kept[2]).removeprefix('torch.')} in group {kept[0]}"


def _parts(src: GroupedCache, dst: GroupedCache, group: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what each call takes: whole blocks of all layers where both caches have the same order in them, else each buffer."""
    ours, theirs = ([part for pair in end._store.copied for part in pair] for end in (src, dst))
    kinds = [[(part.shape[1:], part.dtype) for part in parts] for parts in (ours, theirs)]
    if kinds[0] == kinds[1] and src.config.head_layout is dst.config.head_layout:
        return [(a, b) for a, b in zip(ours, theirs, strict=True) if a[:1].numel()]
    return [
        (_as_blocks(view), _as_blocks(dst._store.named[layer][name]))
        for layer, found in src._store.named.items()
        for name, view in found.items()
        if src._numbers[layer][name] == group
    ]


def _as_blocks(view: torch.Tensor) -> torch.Tensor:
    """View a buffer as the op has pools, ``[num_blocks, block_size, heads, dim]``. What is neither has no heads, and is dense."""
    return view if view.dim() == 4 else view.view(len(view), -1)[:, None, None]
