"""The ops as functions. Arguments and errors are described here; what they mean is in `kvdock_conformance.reference`.

What runs is in `kvdock.ops.calls`, one module for each op: ``paged_caching_`` there is the code of `paged_caching_` here.

All may be called from any thread, on tensors of any device that a backend claims. None records gradients, synchronises
with a device, or changes an input. Sizes: NB blocks of ``block`` places; Hk, Hv heads and Dk, Dv elements of keys and of
values; T tokens, or B rows of S tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.guarded import raise_memory
from kvdock.ops.attention import FAR
from kvdock.ops.dispatcher import ACTIVE_OPS
from kvdock.spec import check_int

__all__ = [
    "copy_blocks_",
    "gather_paged",
    "mla_caching_",
    "mla_gather",
    "paged_attention",
    "paged_caching_",
    "static_update_",
    "swap_blocks_",
]

BlockPairs = torch.Tensor | npt.NDArray[np.integer[Any]] | Sequence[tuple[int, int]]
"""``[N, 2]`` (src, dst) block ids: a tensor, a numpy array or a list of pairs."""


def paged_caching_(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots of a paged cache.

    Args:
        k_cache: ``[NB, block, Hk, Dk]``, any strides but an innermost of 1; written.
        v_cache: ``[NB, block, Hv, Dv]``, with strides of its own; written.
        k: ``[T, Hk, Dk]`` or ``[B, S, Hk, Dk]`` in the cache's dtype, any strides but an innermost of 1.
        v: ``[T, Hv, Dv]`` or ``[B, S, Hv, Dv]``.
        slot_mapping: ``[T]`` or ``[B, S]`` int32 or int64: ``block_id * block + offset`` for each token; negative means
            padding, which is skipped. Which of two equal slots wins is unspecified.
        k_scale: scale of a quantised ``k_cache``; an error for any other.
        v_scale: scale of a quantised ``v_cache``; an error for any other.

    Raises:
        ArgumentTypeError: an argument is no tensor or has the wrong dtype.
        ArgumentValueError: a wrong device, rank, shape or stride, or a source that overlaps a cache.
        IndexRangeError: on host memory, a slot is not below ``NB * block``. On a device it is skipped and counted; see
            `Backend.skipped_writes` and `kvdock.debug`.
        UnsupportedError: no kernel serves these dtypes.

    Nothing is written when it raises. Zero tokens is a no-op.
    """
    ACTIVE_OPS["paged_caching_"](k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale)


def static_update_(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache_lengths: int | torch.Tensor
) -> None:
    """Write new positions behind what each row of a static cache holds.

    Args:
        k_cache: ``[B, Hk, S, Dk]``, any strides but an innermost of 1; written.
        v_cache: ``[B, Hv, S, Dv]``; written.
        k: ``[b, Hk, s, Dk]`` in the cache's dtype, for the first ``b <= B`` rows.
        v: ``[b, Hv, s, Dv]``.
        cache_lengths: positions already taken: an int, or an int32 or int64 tensor ``[]``, ``[1]`` (all rows alike) or
            ``[b]`` (one length for each row) on the caches' device.

    Raises:
        ArgumentTypeError: an argument is no tensor or has the wrong dtype.
        ArgumentValueError: a wrong device, rank, shape or stride, or a source that overlaps a cache.
        IndexRangeError: lengths that the host can read are negative, or ``length + s > S``. In a tensor on a device such
            a row is skipped whole and counted.
    """
    ACTIVE_OPS["static_update_"](k_cache, v_cache, k, v, host_int(cache_lengths))


def host_int(value: Any) -> Any:
    """Turn any integer, such as numpy's, into an int; leave tensors, and what the op must refuse, as they are."""
    if isinstance(value, (int, torch.Tensor)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def gather_paged(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the keys and values at given slots of a paged cache.

    Args:
        k_cache: ``[NB, block, Hk, Dk]``, any strides but an innermost of 1.
        v_cache: ``[NB, block, Hv, Dv]``.
        slot_mapping: ``[T]`` or ``[B, S]`` int32 or int64; a negative slot reads as zeros. Slots may repeat.
        k_scale: scale of a quantised ``k_cache``; an error for any other.
        v_scale: scale of a quantised ``v_cache``; an error for any other.
        out: where to put the result: ``[..., Hk, Dk]`` and ``[..., Hv, Dv]`` in the caches' dtype, any strides but an
            innermost of 1. Must not overlap the caches. By default new tensors.

    Returns:
        ``(k, v)``; the tensors of ``out`` themselves where given.

    Raises:
        ArgumentTypeError: an argument is no tensor or has the wrong dtype.
        ArgumentValueError: a wrong device, rank, shape or stride, or an output that overlaps a cache.
        IndexRangeError: on host memory, a slot is not below ``NB * block``; on a device it reads as zeros.
    """
    k_out, v_out = (None, None) if out is None else output_pair(out)
    pair: tuple[torch.Tensor, torch.Tensor] = ACTIVE_OPS["gather_paged"](k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out)
    return pair


def output_pair(out: Any, op: str = "gather_paged") -> tuple[Any, Any]:
    """Return the two tensors of ``out``."""
    if not isinstance(out, (tuple, list)) or len(out) != 2 or (out[0] is None and out[1] is None):
        raise ArgumentTypeError(f"{op}: out", expected="a pair (k, v) of tensors", got=type(out).__name__, fix="pass both, or None")
    return out[0], out[1]


def copy_blocks_(k_cache: torch.Tensor, v_cache: torch.Tensor, block_pairs: BlockPairs) -> None:
    """Copy whole blocks inside one paged cache, as copy-on-write needs.

    Args:
        k_cache: ``[NB, block, Hk, Dk]``, any strides but an innermost of 1; written.
        v_cache: ``[NB, block, Hv, Dv]``; written.
        block_pairs: ``[N, 2]`` (src, dst), int32 or int64, in host memory or on the caches' device. A pair with a
            negative id is padding, and skipped.

    Raises:
        ArgumentTypeError: an argument is no tensor or has the wrong dtype.
        ArgumentValueError: a wrong device, rank, shape or stride; or, where the host can read the pairs, two pairs with
            one destination, or a destination that is also a source.
        IndexRangeError: a block id that the host can read is not below NB; on a device such a pair is skipped and counted.
    """
    ACTIVE_OPS["copy_blocks_"](k_cache, v_cache, pairs_tensor(block_pairs))


def pairs_tensor(block_pairs: BlockPairs, op: str = "copy_blocks_") -> torch.Tensor:
    """Return block pairs as a tensor ``[N, 2]``, in host memory unless they are a tensor already; ``op`` is for errors."""
    if isinstance(block_pairs, torch.Tensor):
        return block_pairs
    if torch.compiler.is_dynamo_compiling():
        # Not by way of numpy, which would be traced as torch on the default device.
        return torch.as_tensor(block_pairs, device="cpu") if len(block_pairs) else torch.zeros((0, 2), dtype=torch.int64, device="cpu")
    try:
        pairs = np.array(block_pairs, order="C")  # a copy: torch shares memory, and would ask for a writable array
        if pairs.size and pairs.dtype.kind not in "iu":
            raise TypeError(pairs.dtype)
        return torch.from_numpy(pairs) if pairs.size else torch.zeros((0, 2), dtype=torch.int64, device="cpu")
    except (TypeError, ValueError) as error:
        kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentValueError
        fix = "pass a list of pairs, or an integer array or tensor of shape [N, 2]"
        raise kind(f"{op}: block_pairs", expected="[N, 2] integers (src, dst)", got=repr(block_pairs)[:80], fix=fix) from error


def swap_blocks_(src_cache: torch.Tensor, dst_cache: torch.Tensor, block_pairs: BlockPairs) -> None:
    """Copy whole blocks from one pool to another, of one device or between a device and host memory.

    It is ordered like any launch: behind what the device's current stream was given before. A copy to host memory that the device
    writes itself (page-locked, as `kvdock.cache.swapping.host_cache` and ``Tensor.pin_memory`` make it) may be on its way when this
    returns. It is there once the stream has come so far: wait for an event of the stream before the host reads it, or before another
    device does. Pageable host memory is staged, and this waits for the device.

    Args:
        src_cache: ``[NBs, block, H, D]``, any strides but an innermost of 1.
        dst_cache: ``[NBd, block, H, D]`` in the same dtype, with strides of its own; written.
        block_pairs: ``[N, 2]`` (src, dst), int32 or int64, in host memory or on the pools' device: a block of ``src_cache``, and
            where it goes in ``dst_cache``. Sources may repeat. A pair with a negative id is padding, and skipped.

    Raises:
        ArgumentTypeError: an argument is no tensor or has the wrong dtype.
        ArgumentValueError: blocks of unlike shape, pools on two devices of which none is the host, a wrong stride, or pools that
            overlap; or, where the host can read the pairs, two with one destination.
        IndexRangeError: a block id that the host can read is not below NBs, or NBd; on a device such a pair is skipped and counted.
        UnsupportedError: no kernel serves these dtypes.

    Nothing is written when it raises. Zero pairs are a no-op.
    """
    ACTIVE_OPS["swap_blocks_"](src_cache, dst_cache, pairs_tensor(block_pairs, "swap_blocks_"))


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_query_lens: torch.Tensor | None = None,
    max_query_len: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend from new tokens to their sequences, whose keys and values lie in a paged cache already.

    The queries of a sequence are its last tokens. N queries of Hq heads, B sequences, tables of W blocks; Hq is a multiple of Hk, and
    query head ``h`` reads head ``h * Hk // Hq`` of the cache. A query that sees no key, such as one of a sequence of length 0 or one
    behind those that ``cu_query_lens`` counts, gets zeros, and as its ``lse`` the logit of the sink, or -inf.

    Args:
        q: ``[N, Hq, Dk]`` in the cache's dtype, any strides but an innermost of 1.
        k_cache: ``[NB, block, Hk, Dk]``, any strides but an innermost of 1.
        v_cache: ``[NB, block, Hk, Dv]``.
        block_table: ``[B, W]`` int32, the blocks of each sequence in order. Entries where no query looks may be anything.
        seq_lens: ``[B]`` int32 or int64: tokens of each sequence in the cache, those of its queries included; 0 for padding.
        cu_query_lens: ``[B + 1]`` int32 or int64, sums of how many queries each sequence has, from 0 to N. By default one each.
        max_query_len: most queries of one sequence; by default N, or 1 without ``cu_query_lens``. Says how to split the work.
        scale: what scores are multiplied by; by default ``Dk ** -0.5``.
        causal: whether a query sees no key behind its own token's.
        window: how many keys it sees at most: its own token's and those before it. Keys behind, where it sees such, do not count.
        softcap: if given, scores become ``softcap * tanh(scores / softcap)``, before masks.
        sinks: ``[Hq]``, a logit of each head that takes part in the softmax and has no value.
        starts: ``[B]`` int32 or int64, first token of each sequence that may be seen, as of sequences that are padded on the left.
        k_scale: scale of a quantised ``k_cache``; an error for any other.
        v_scale: scale of a quantised ``v_cache``; an error for any other.
        return_lse: whether to return the logarithms of the sums too: see `merge_attention`.
        out: where to put the result, ``[N, Hq, Dv]``. By default a new tensor.

    Returns:
        ``[N, Hq, Dv]`` in the dtype of ``q``; with ``return_lse`` also ``[N, Hq]`` float32, the natural logarithm of the sum of
        ``exp(score)`` over what was seen, sinks included.

    Raises:
        ArgumentTypeError: an argument is no tensor or has the wrong dtype.
        ArgumentValueError: a wrong device, rank, shape or stride, heads that do not divide, a window, softcap or scale that means
            nothing, or an output that overlaps an input.
        IndexRangeError: on host memory, a length beyond the table, a block that is not in the pool where a query looks, or sums that do
            not end at N; nothing is written. On a device such keys are not seen and are counted: see `Backend.skipped_writes`.
        UnsupportedError: no kernel serves these dtypes.
    """
    is_sound = isinstance(q, torch.Tensor) and q.dim() == 3  # else the op says what is wrong
    lse = _new(q, "paged_attention", q.shape[:2], torch.float32) if return_lse and is_sound else None
    usual = q.shape[0] if is_sound and cu_query_lens is not None else 1
    most = usual if max_query_len is None else host_int(max_query_len)
    found: torch.Tensor = ACTIVE_OPS["paged_attention"](
        *(q, k_cache, v_cache, block_table, seq_lens, cu_query_lens, starts, sinks, k_scale, v_scale),
        *(most, scale, causal, min(window, FAR) if type(window) is int else window, softcap, out, lse),
    )
    return found if lse is None else (found, lse)


def _new(like: torch.Tensor, op: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    try:
        return like.new_empty(shape, dtype=dtype)
    except (MemoryError, RuntimeError) as error:
        raise_memory(error, op)


def mla_caching_(
    kv_cache: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor, *, scale: torch.Tensor | None = None
) -> None:
    """Write the latents of new tokens (MLA), each with its rotary part behind it, into their slots of a paged cache.

    `paged_attention` reads what is written as keys of one head, and the latents as values: ``k_cache=kv_cache`` and
    ``v_cache=kv_cache[..., :rank]``, without a copy.

    Args:
        kv_cache: ``[NB, block, 1, rank + rope]``, any strides but an innermost of 1; written.
        kv_c: the latents, ``[T, rank]`` or ``[B, S, rank]`` in the cache's dtype, any strides but an innermost of 1.
        k_pe: the rotary parts, ``[T, rope]`` or ``[B, S, rope]``, with strides of their own.
        slot_mapping: ``[T]`` or ``[B, S]`` int32 or int64; negative means padding, which is skipped. Which of two equal slots
            wins is unspecified.
        scale: scale of a quantised ``kv_cache``; an error for any other.

    Raises:
        KVDockError: as `paged_caching_`; nothing is written.
    """
    ACTIVE_OPS["mla_caching_"](kv_cache, kv_c, k_pe, slot_mapping, scale)


def mla_gather(
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    rank: int,
    *,
    scale: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the latents at given slots of a paged cache, and their rotary parts.

    Args:
        kv_cache: ``[NB, block, 1, rank + rope]``, any strides but an innermost of 1.
        slot_mapping: ``[T]`` or ``[B, S]`` int32 or int64; a negative slot reads as zeros. Slots may repeat.
        rank: elements of a latent: a row has more, and the others are the rotary part.
        scale: scale of a quantised ``kv_cache``; an error for any other.
        out: where to put the result: ``[..., rank]`` and ``[..., rope]`` in the cache's dtype, any strides but an innermost of 1.
            Must not overlap the cache. By default new tensors.

    Returns:
        ``(kv_c, k_pe)``; the tensors of ``out`` themselves where given.

    Raises:
        KVDockError: as `gather_paged`, and where ``rank`` does not split a row.
    """
    check_int("mla_gather: rank", rank, 1)
    kv_c, k_pe = new_latents(kv_cache, slot_mapping, rank) if out is None else output_pair(out, "mla_gather")
    if out is not None and isinstance(kv_c, torch.Tensor) and kv_c.dim() and kv_c.shape[-1] != rank:
        fix = "pass the latent first, or the rank of this cache"
        raise ArgumentValueError("mla_gather: out", expected=f"rows of rank={rank!r} elements first", got=f"{kv_c.shape[-1]}", fix=fix)
    ACTIVE_OPS["mla_gather"](kv_cache, slot_mapping, scale, kv_c, k_pe)
    return kv_c, k_pe


def new_latents(kv_cache: Any, slot_mapping: Any, rank: Any) -> tuple[Any, Any]:
    """Return room for what `mla_gather` reads; none where a tensor is wrong, which the op explains.

    Raises:
        ArgumentValueError: ``rank`` leaves no rotary part.
    """
    if not isinstance(kv_cache, torch.Tensor) or not isinstance(slot_mapping, torch.Tensor) or not kv_cache.dim():
        return None, None
    rope = kv_cache.shape[-1] - rank
    if rope < 1:
        fix = "pass the rank of the latent alone, without the rotary part"
        raise ArgumentValueError("mla_gather: rank", expected=f"less than the {kv_cache.shape[-1]} elements of a row", got=rank, fix=fix)
    return _new(kv_cache, "mla_gather", (*slot_mapping.shape, rank)), _new(kv_cache, "mla_gather", (*slot_mapping.shape, rope))
