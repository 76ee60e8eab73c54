"""Memory that an engine owns: what it may be, and the cache's views of it. kvdock neither zeroes nor frees it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import attrs
import torch

from kvdock.cache.blocks import block_store
from kvdock.cache.grouping import PLACE, Grouping
from kvdock.cache.memory import aligned, allocated, fresh
from kvdock.cache.paged_options import PagedConfig
from kvdock.cache.pool import Pool, Store
from kvdock.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from kvdock.layers.interface import Buffer, Part
from kvdock.layout import HeadLayout
from kvdock.ops.geometry import has_internal_overlap, share_memory

__all__ = ["GivenPool", "given_blocks", "given_layers"]

_SUBJECT = "PagedKVCache.from_tensors: tensors"


@attrs.frozen(eq=False)
class GivenPool(Pool):
    """A tensor of one layer that an engine owns, ``[num_blocks, block_size, ...]``. In a copy of it blocks lie close together.

    Args:
        views: the same as a buffer, then with a dim for its one head where it has none, and of latents the elements that are values too.
    """

    views: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, memory: torch.Tensor, buffer: Buffer, alignment: int) -> Self:
        """View a tensor as a buffer."""
        rows = memory if memory.dim() == 4 else memory.unsqueeze(2)
        named = rows.squeeze(2) if len(buffer.shape) == 1 else rows
        return cls(memory, (named, rows, rows[..., : buffer.values or None]), alignment=alignment)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the places that are the cache's, and nothing between them."""
        old, size = self.memory, self.memory.itemsize
        run = aligned(math.prod(old.shape[1:]) * size, max(self.alignment, size)) // size

        def make() -> torch.Tensor:
            dense = fresh((len(old), run), old.dtype, old.device, self.alignment)
            return dense.as_strided(old.shape, (run, *old.stride()[1:])).copy_(old)

        memory = allocated("a copy of a cache", len(old) * run * size, old.device, make)
        like = [memory.as_strided(view.shape, (run, *view.stride()[1:]), memory.storage_offset()) for view in self.views]
        memo.update(zip(map(id, self.views), like, strict=True))
        return type(self)(memory, (like[0], like[1], like[2]), alignment=self.alignment)


def _check_memory(subject: str, tensor: Any, dtype: torch.dtype, device: torch.device, alignment: int) -> torch.Tensor:
    """Return a tensor that a cache can lie in.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is none; says why.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise ArgumentTypeError(subject, expected="a torch.Tensor with strides", got=repr(tensor)[:80])
    if tensor.dtype != dtype:
        raise ArgumentTypeError(subject, expected=dtype, got=tensor.dtype, fix=f"allocate it as {dtype}; bytes of any dtype have .view()")
    if tensor.device != device:
        raise ArgumentValueError(
            subject, expected=f"memory on {device}", got=tensor.device, fix="allocate it there, or name its device in RankInfo"
        )
    if tensor.is_inference() or tensor.requires_grad:
        got = "a tensor of torch.inference_mode" if tensor.is_inference() else "one that requires gradients"
        raise ArgumentValueError(
            subject,
            expected="a plain tensor, which can be written at any time",
            got=got,
            fix="allocate it outside that mode, as torch.empty does",
        )
    if tensor.data_ptr() % alignment:
        got, fix = f"{tensor.data_ptr():#x}", "allocate some bytes more, and pass a slice that begins at such an address"
        raise ArgumentValueError(subject, expected=f"an address that is a multiple of {alignment}", got=got, fix=fix)
    return tensor


def given_blocks(memory: torch.Tensor, grouping: Grouping, num_blocks: int, config: PagedConfig, device: torch.device) -> Store:
    """View an engine's buffer, ``[num_blocks, block_bytes]`` or so many bytes in one dim, as a cache.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is something else; says what.
    """
    alignment, block_bytes = max(config.alignment, PLACE), grouping.plan.block_bytes
    _check_memory(_SUBJECT, memory, torch.uint8, device, alignment)
    needed, shape = num_blocks * block_bytes, list(memory.shape)
    fits = (memory.dim() == 1 and memory.nbytes >= needed) or shape == [num_blocks, block_bytes]
    if not fits or not memory.is_contiguous():
        expected = f"[{num_blocks}, {block_bytes}] contiguous bytes, blocks and bytes of each, or at least {needed} in one dim"
        fix = "ask kvdock.plan_blocks(..., in_one_memory=True) for the bytes of a block, and give num_blocks in the configuration"
        raise ArgumentValueError(_SUBJECT, expected=expected, got=f"shape {shape}, strides {list(memory.stride())}", fix=fix)
    if memory.storage_offset() % PLACE:
        got, fix = f"byte {memory.storage_offset()}", "wrap the address itself, as torch.frombuffer and DLPack do"
        raise ArgumentValueError(_SUBJECT, expected=f"a slice that begins at a multiple of {PLACE} of its storage", got=got, fix=fix)
    blocks = memory.flatten()[:needed].view(num_blocks, block_bytes)
    return block_store(grouping, blocks, config.head_layout, alignment, is_given=True)


def given_layers(
    tensors: Iterable[object], grouping: Grouping, sources: Sequence[int], num_blocks: int, config: PagedConfig, device: torch.device
) -> Store:
    """View an engine's tensors of each layer as a cache: ``(k, v)``, or latents, and None for one that shares another's.

    Args:
        tensors: of each layer.
        grouping: what each layer keeps.
        sources: which layer each reads.
        num_blocks: blocks of the cache.
        config: the rest.
        device: of the cache.

    Raises:
        ArgumentTypeError, ArgumentValueError: something else than that, or tensors that share a byte.
        UnsupportedError: layers of several kinds or rules.
    """
    if grouping.use is None:
        kinds = ", ".join(str(group.retention) for group in grouping.plan.groups)
        fix = "pass one uint8 tensor for all layers, or keep_all=True where all have keys and values"
        raise UnsupportedError(_SUBJECT, expected="layers of one kind and one rule for tensors by layer", got=f"groups of {kinds}", fix=fix)
    if not isinstance(tensors, Iterable):
        raise ArgumentTypeError(_SUBJECT, expected="one uint8 tensor, or an entry for each layer", got=repr(tensors)[:80])
    (group,) = grouping.plan.groups
    given = [tuple(each) if isinstance(each, (tuple, list)) else (each,) for each in tensors]
    if len(given) != len(sources):
        fix = "give one entry for each layer of the KVSpec, None for one that shares another's"
        raise ArgumentValueError(_SUBJECT, expected=f"{len(sources)} entries, one a layer", got=len(given), fix=fix)
    for index, of in enumerate(sources):
        if of != index and given[index] != (None,) and not all(a is b for a, b in itertools.zip_longest(given[index], given[of])):
            expected = f"None, or what layer {of} has: layer {index} reads that"
            raise ArgumentValueError(f"{_SUBJECT}[{index}]", expected=expected, got="other tensors", fix="leave it out: pass None")
    pools = {
        layer: _layer_pools(f"{_SUBJECT}[{layer}]", given[layer], part, (num_blocks, group.block_size), config, device)
        for (layer, _), part in zip(group.members, group.parts, strict=True)
    }
    _check_apart({f"{_SUBJECT}[{layer}]: {name}": pool.memory for layer, found in pools.items() for name, pool in found.items()})
    named = {layer: {name: pool.views[0] for name, pool in found.items()} for layer, found in pools.items()}
    pairs, copied = {}, []
    for layer, found in pools.items():
        (_, rows, values), *others = [pool.views for pool in found.values()]
        half = rows.shape[3] // 2
        pairs[layer] = (rows, others[0][1] if others else values)
        copied.append(pairs[layer] if others else (rows[..., :half], rows[..., half:]))
    return Store(tuple(pool for found in pools.values() for pool in found.values()), named, pairs, tuple(copied))


def _layer_pools(
    subject: str, given: tuple[Any, ...], part: Part, sizes: tuple[int, int], config: PagedConfig, device: torch.device
) -> dict[str, GivenPool]:
    """Return the pools of a layer by name."""
    if len(given) != len(part.buffers):
        names = ", ".join(buffer.name for buffer in part.buffers)
        raise ArgumentValueError(subject, expected=f"{len(part.buffers)} tensor(s): {names}", got=len(given), fix="pass them in this order")
    found = {}
    for tensor, buffer in zip(given, part.buffers, strict=True):
        where = f"{subject}: {buffer.name}"
        _check_memory(where, tensor, buffer.dtype, device, config.alignment)
        shapes = [(*sizes, *buffer.shape), *([(*sizes, 1, *buffer.shape)] if buffer.values else [])]
        _check_shape(where, tensor, shapes, config)
        found[buffer.name] = GivenPool.of(tensor, buffer, config.alignment)
    return found


def _check_shape(subject: str, tensor: torch.Tensor, shapes: Sequence[tuple[int, ...]], config: PagedConfig) -> None:
    """Refuse another shape, a block whose bytes do not lie together in the order of heads that is wanted, and blocks that overlap."""
    shape = tuple(tensor.shape)
    if shape not in shapes:
        expected = " or ".join(str(list(each)) for each in shapes)
        fix = "pass [num_blocks, block_size, heads, dim] of this rank's heads, and num_blocks and block_size in the configuration"
        raise ArgumentValueError(subject, expected=expected, got=list(shape), fix=fix)
    is_hnd = config.head_layout is HeadLayout.HND and len(shape) == 4
    inner = torch.empty((shape[2], shape[1], shape[3]), device="meta").transpose(0, 1) if is_hnd else torch.empty(shape[1:], device="meta")
    wanted, found = inner.stride(), tensor.stride()[1:]
    if any(size > 1 and one != other for size, one, other in zip(shape[1:], wanted, found, strict=True)):
        expected = f"strides {list(wanted)} within a block: {config.head_layout.value.upper()}, dense"
        fix = "pass a view in the logical order, and the head_layout that it lies in"
        raise ArgumentValueError(subject, expected=expected, got=f"strides {list(found)}", fix=fix)
    step = tensor.stride(0) * tensor.itemsize
    if has_internal_overlap(tensor) or (step % config.alignment and shape[0] > 1):
        expected = f"blocks at least {math.prod(shape[1:])} elements apart, and a multiple of {config.alignment} bytes"
        raise ArgumentValueError(subject, expected=expected, got=f"{step} bytes", fix="give blocks room, or choose another alignment")


def _check_apart(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that share a byte."""
    for (one, a), (other, b) in itertools.combinations(tensors.items(), 2):
        if share_memory(a, b):
            got = f"{a.data_ptr():#x} and {b.data_ptr():#x}, which share bytes"
            raise ArgumentValueError(
                other, expected=f"memory apart from {one}", got=got, fix="give each buffer of each layer memory of its own"
            )
