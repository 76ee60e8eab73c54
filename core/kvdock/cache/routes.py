"""How blocks get from one cache to another of the same layers: in as few calls of `swap_blocks_` as their memory allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self
from weakref import WeakKeyDictionary

import attrs
import torch

from kvdock.cache.grouped import GroupedCache
from kvdock.cache.interface import OpSource
from kvdock.errors import ArgumentTypeError, ArgumentValueError, IndexRangeError
from kvdock.interface import HOST
from kvdock.ops.api import BlockPairs, pairs_tensor
from kvdock.ops.catalog import INDEX_DTYPES
from kvdock.ops.index_values import check_pairs, pairs_on_device
from kvdock.ops.modes import MODE
from kvdock.ops.tracing import is_intercepted
from kvdock.spec import check_int

__all__ = ["Routes"]

_OP = "swap_blocks_"
_Swap = Callable[..., Any]
_Pools = tuple[torch.Tensor, torch.Tensor]


class Routes:
    """The ways from one cache to others, each bound once. A copy of the cache finds its own.

    Args:
        ops: where ops come from.
    """

    def __init__(self, ops: OpSource) -> None:
        self._ops = ops
        self._known: WeakKeyDictionary[GroupedCache, dict[int, list[_Way]]] = WeakKeyDictionary()

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
        pairs, device = pairs_tensor(block_pairs, _OP), _device(src, dst)
        is_numbered, is_clean = found[-1].numbers is not None, False
        if is_numbered or (pairs.device == HOST and device != HOST):
            is_list = pairs.dtype in INDEX_DTYPES and pairs.shape[1:] == (2,) and pairs.stride(1) == 1 and pairs.device in (HOST, device)
            if not is_list or (is_numbered and (torch.compiler.is_compiling() or is_intercepted((pairs,)))):
                for swap in self._op(src, dst, _parts(src, dst, group)):  # which explains what is wrong, or is recorded
                    swap(pairs)
                return
            if pairs.device == HOST:  # they are checked and brought to the device once for all calls
                is_clean = is_numbered and bool(pairs.numpy().min(initial=0) >= 0)
                pairs = pairs_on_device(_OP, pairs, dst.num_blocks, device, num_sources=src.num_blocks)
            elif (mode := MODE.get()) is not None and mode.debug:  # the op would name numbers that nobody passed
                check_pairs(_OP, pairs.cpu(), dst.num_blocks, num_sources=src.num_blocks)
        for way in found:
            rows = pairs if way.numbers is None else way.numbers.of(pairs, is_clean=is_clean)
            for swap in way.swaps:
                swap(rows)

    def _bound(self, src: GroupedCache, dst: GroupedCache, group: int) -> list[_Way]:
        _check(src, dst, group)
        found: dict[_Key | None, list[_Pools]] = {}
        for key, pools in _joined(_parts(src, dst, group)):
            found.setdefault(key, []).append(pools)
        sizes, device = (src.num_blocks, dst.num_blocks), _device(src, dst)
        ways = [_Way(key and _Numbers.made(*key, sizes, device), self._op(src, dst, pools)) for key, pools in found.items()]
        return sorted(ways, key=lambda way: way.numbers is not None)

    def _op(self, src: GroupedCache, dst: GroupedCache, parts: Sequence[_Pools]) -> list[_Swap]:
        op, named = self._ops.op(_OP), (dst if src.device == HOST else src)._named
        return [op.bind(*each, named=named) for each in parts]


def _device(src: GroupedCache, dst: GroupedCache) -> torch.device:
    """Return where a swap runs: on the host only between two pools there."""
    return dst.device if src.device == HOST else src.device


_Two = tuple[int, int]
_Key = tuple[_Two, tuple[_Two, ...]]
"""Of source and target what block ids are multiplied with, and what is added for each buffer."""


@attrs.frozen(eq=False)
class _Numbers:
    """Numbers of the blocks of many buffers in one pool: block ``b`` of buffer ``l`` is ``b * scale + offsets[l]`` there.

    Args:
        scale: of source and target, int64 ``[2]`` on the device.
        offsets: int64 ``[buffers, 2]``.
        sizes: blocks of both, ``[2]``.
    """

    scale: torch.Tensor
    offsets: torch.Tensor
    sizes: torch.Tensor

    @classmethod
    def made(cls, scale: _Two, offsets: tuple[_Two, ...], sizes: _Two, device: torch.device) -> _Numbers:
        return cls(*(torch.tensor(part, dtype=torch.int64, device=device) for part in (scale, offsets, sizes)))

    def of(self, pairs: torch.Tensor, *, is_clean: bool) -> torch.Tensor:
        """Return pairs of blocks as pairs of numbers, ``[N * buffers, 2]``: by one launch, or by a few unless all are ``clean`` ids."""
        ids = pairs[:, None]
        rows = torch.addcmul(self.offsets, ids, self.scale)
        if not is_clean:  # padding stays padding, and an id that is too large is no block of another buffer
            rows = torch.where(ids < 0, ids, torch.where(ids < self.sizes, rows, torch.iinfo(torch.int64).max))
        return rows.view(-1, 2)


@attrs.frozen(eq=False)
class _Way:
    """Calls that take the same pairs: of blocks, or of numbers."""

    numbers: _Numbers | None
    swaps: Sequence[_Swap]


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


def _parts(src: GroupedCache, dst: GroupedCache, group: int) -> list[_Pools]:
    """Return what can be swapped: whole blocks of all layers where both caches have the same order in them, else each buffer."""
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


def _joined(parts: Sequence[_Pools]) -> list[tuple[_Key | None, _Pools]]:
    """Join what lies at whole steps from one another in one memory on each side, so that one call swaps it: with numbers for ids."""
    alike: dict[Any, list[_Pools]] = {}
    for a, b in parts:
        memories = tuple(pool.untyped_storage().data_ptr() for pool in (a, b))
        kind = memories, a.dtype, a.shape, a.stride(), b.shape, b.stride()
        alike.setdefault(kind if all(memories) else len(alike), []).append((a, b))
    found: list[tuple[_Key | None, _Pools]] = []
    for pools in alike.values():
        ours, theirs = (_as_one([each[side] for each in pools]) for side in (0, 1))
        if len(pools) == 1 or ours is None or theirs is None:
            found += [(None, each) for each in pools]
        else:
            key = (ours[1], theirs[1]), tuple(zip(ours[2], theirs[2], strict=True))
            found.append((key, (ours[0], theirs[0])))
    return found


def _as_one(views: Sequence[torch.Tensor]) -> tuple[torch.Tensor, int, list[int]] | None:
    """Return equal views of one memory as one pool, with the steps to the next block and to each view; None where steps cut blocks."""
    first = min(views, key=torch.Tensor.storage_offset)
    distances = [view.storage_offset() - first.storage_offset() for view in views]
    step = math.gcd(first.stride(0), *distances)
    if not len(first) or step <= sum((size - 1) * stride for size, stride in zip(first.shape[1:], first.stride()[1:], strict=True)):
        return None
    scale, offsets = first.stride(0) // step, [distance // step for distance in distances]
    count = (len(first) - 1) * scale + max(offsets) + 1
    return first.as_strided((count, *first.shape[1:]), (step, *first.stride()[1:])), scale, offsets
