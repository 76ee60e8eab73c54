"""The slow reference: what each op means, in plain loops over tokens, rows, positions and slots.

It is what every backend is compared with, and used by tests only. Each function takes the arguments of the op of its name
in `kvdock.ops`, in host memory, valid as far as shapes, strides and dtypes go, and checks none of that. Values are moved
as the integers that their bits spell, so that NaN payloads and the sign of zero arrive as they were.

What is out of range is never written. It is returned instead, in the order of the loops, so that one reference tells
both behaviours of the contract:

* on host memory the op raises `kvdock.IndexRangeError` for the first of these places, and writes nothing at all;
* on a device it writes what the reference writes, and counts ``len(result)`` skipped writes.

Negative slots and negative block ids are padding: skipped, and not returned. A negative length of a static cache is no
padding: nothing says which positions it means, so it counts as out of range.

Where the contract leaves the result open (equal slots, doubled or chained block pairs) the last one wins here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    Bits = npt.NDArray[np.integer[Any]]

__all__ = [
    "Place",
    "copy_blocks_",
    "gather_paged",
    "mla_caching_",
    "mla_gather",
    "paged_attention",
    "paged_caching_",
    "static_update_",
    "swap_blocks_",
]

Place = tuple[int, ...]
"""Position in an index argument: ``slot_mapping[place]``, ``block_pairs[place]``; for a static cache (row, position)."""


def paged_caching_(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> list[Place]:
    """Write the keys and values of each token into its slot.

    Args:
        k_cache: ``[NB, block, Hk, Dk]``; written.
        v_cache: ``[NB, block, Hv, Dv]``; written.
        k: ``[T, Hk, Dk]`` or ``[B, S, Hk, Dk]``.
        v: ``[T, Hv, Dv]`` or ``[B, S, Hv, Dv]``.
        slot_mapping: ``[T]`` or ``[B, S]``: ``block_id * block + offset``, negative for padding.

    Returns:
        The tokens whose slot is not below ``NB * block``, which were not written.
    """
    skipped: list[Place] = []
    moves, capacity = [(_bits(k_cache), _bits(k)), (_bits(v_cache), _bits(v))], _capacity(k_cache)
    for place, slot in _values(slot_mapping):
        if slot < 0:
            continue
        if slot >= capacity:
            skipped.append(place)
            continue
        block, offset = divmod(slot, k_cache.shape[1])
        for cache, source in moves:
            cache[block, offset] = source[place]
    return skipped


def static_update_(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_lengths: int | torch.Tensor,
) -> list[Place]:
    """Write new positions behind what each row of a static cache holds.

    Args:
        k_cache: ``[B, Hk, S, Dk]``; written.
        v_cache: ``[B, Hv, S, Dv]``; written.
        k: ``[b, Hk, s, Dk]``, ``b <= B``.
        v: ``[b, Hv, s, Dv]``.
        cache_lengths: positions already taken: an int, or a tensor ``[]``, ``[1]`` (all rows alike) or ``[b]``.

    Returns:
        ``(row, position in k)`` of every position of the rows that would start below 0 or end beyond S: these rows were
        skipped whole.
    """
    skipped: list[Place] = []
    moves = [(_bits(k_cache), _bits(k)), (_bits(v_cache), _bits(v))]
    rows, new = k.shape[0], k.shape[2]
    for row, start in enumerate(_lengths(cache_lengths, rows)):
        fits = 0 <= start <= k_cache.shape[2] - new
        for position in range(new):
            if not fits:
                skipped.append((row, position))
                continue
            for cache, source in moves:
                cache[row, :, start + position] = source[row, :, position]
    return skipped


def gather_paged(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> list[Place]:
    """Read the keys and values at given slots; what no slot of the pool stands for reads as zeros.

    Args:
        k_cache: ``[NB, block, Hk, Dk]``.
        v_cache: ``[NB, block, Hv, Dv]``.
        slot_mapping: ``[T]`` or ``[B, S]``, negative for padding.
        k_out: ``[..., Hk, Dk]``; written whole.
        v_out: ``[..., Hv, Dv]``; written whole.

    Returns:
        The tokens whose slot is not below ``NB * block``. On a device they are zeros, and no skipped writes.
    """
    beyond: list[Place] = []
    moves, capacity = [(_bits(k_cache), _bits(k_out)), (_bits(v_cache), _bits(v_out))], _capacity(k_cache)
    for place, slot in _values(slot_mapping):
        is_inside = 0 <= slot < capacity
        if slot >= 0 and not is_inside:
            beyond.append(place)
        block, offset = divmod(slot, k_cache.shape[1])
        for cache, out in moves:
            out[place] = cache[block, offset] if is_inside else 0
    return beyond


def copy_blocks_(k_cache: torch.Tensor, v_cache: torch.Tensor, block_pairs: torch.Tensor | Sequence[tuple[int, int]]) -> list[Place]:
    """Copy whole blocks inside one pool.

    Args:
        k_cache: ``[NB, block, Hk, Dk]``; written.
        v_cache: ``[NB, block, Hv, Dv]``, with a block size of its own; written.
        block_pairs: ``[N, 2]`` (src, dst). A pair with a negative id is padding.

    Returns:
        The pairs, ``(index,)``, with an id that is not below NB and none that is negative: these were skipped whole.
    """
    skipped: list[Place] = []
    caches = [_bits(k_cache), _bits(v_cache)]
    num_blocks = k_cache.shape[0]
    for index, (src, dst) in enumerate(_pairs(block_pairs)):
        if src < 0 or dst < 0:
            continue
        if src >= num_blocks or dst >= num_blocks:
            skipped.append((index,))
            continue
        for cache in caches:
            for offset in range(cache.shape[1]):
                cache[dst, offset] = cache[src, offset]
    return skipped


def swap_blocks_(src_cache: torch.Tensor, dst_cache: torch.Tensor, block_pairs: torch.Tensor | Sequence[tuple[int, int]]) -> list[Place]:
    """Copy whole blocks from one pool to another.

    Args:
        src_cache: ``[NBs, block, H, D]``.
        dst_cache: ``[NBd, block, H, D]``; written.
        block_pairs: ``[N, 2]`` (src, dst): a block of ``src_cache``, and where it goes. A pair with a negative id is padding.

    Returns:
        The pairs, ``(index,)``, with an id that is not in its pool and none that is negative: these were skipped whole.
    """
    skipped: list[Place] = []
    source, to = _bits(src_cache), _bits(dst_cache)
    for index, (src, dst) in enumerate(_pairs(block_pairs)):
        if src < 0 or dst < 0:
            continue
        if src >= len(source) or dst >= len(to):
            skipped.append((index,))
            continue
        for offset in range(to.shape[1]):
            to[dst, offset] = source[src, offset]
    return skipped


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor | None,
    starts: torch.Tensor | None,
    sinks: torch.Tensor | None,
    max_query_len: int,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> list[Place]:
    """Attend from each query to the keys of its sequence that it sees, in float64, one query after another.

    Args:
        q: ``[N, Hq, Dk]``.
        k_cache: ``[NB, block, Hk, Dk]``.
        v_cache: ``[NB, block, Hk, Dv]``.
        block_table: ``[B, W]``.
        seq_lens: ``[B]``: tokens of each sequence, those of its queries, which are its last, included.
        cu_query_lens: ``[B + 1]``; None for one query of each sequence.
        starts: ``[B]``: first token that is seen.
        sinks: ``[Hq]``: a logit without a value.
        max_query_len: means nothing here.
        scale: what scores are multiplied by; None for ``Dk ** -0.5``.
        causal: whether keys behind the query's own are not seen.
        window: how many keys up to its own a query sees.
        softcap: limit of scores.
        out: ``[N, Hq, Dv]``; written whole.
        lse: ``[N, Hq]``; written whole.

    Returns:
        Nothing: every index is in range.
    """
    import torch

    block, of_head = k_cache.shape[1], torch.arange(q.shape[1], device=q.device) * k_cache.shape[2] // q.shape[1]
    sums = list(range(len(seq_lens) + 1)) if cu_query_lens is None else cu_query_lens.tolist()
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    for row, length in enumerate(seq_lens.tolist()):
        start, shift = 0 if starts is None else int(starts[row]), length - sums[row + 1]
        least = start if window is None else max(start, shift + sums[row] - window + 1)  # which the first query sees
        keys = torch.arange(least, max(least, length), device=q.device)
        k, v = (cache[block_table[row].long()[keys // block], keys % block][:, of_head].double() for cache in (k_cache, v_cache))
        for query in range(sums[row], sums[row + 1]):
            first = start if window is None else max(start, shift + query - window + 1)
            seen = slice(first - least, max(first, shift + query + 1 if causal else length) - least)
            scores = torch.einsum("khd,hd->hk", k[seen], q[query].double()) * (q.shape[2] ** -0.5 if scale is None else scale)
            scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
            every = scores if sinks is None else torch.cat([scores, sinks[:, None].double()], 1)
            if every.shape[1]:
                out[query] = torch.einsum("hk,khd->hd", torch.softmax(every, 1)[:, : scores.shape[1]], v[seen])
                if lse is not None:
                    lse[query] = torch.logsumexp(every, 1)
    return []


def mla_caching_(kv_cache: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor) -> list[Place]:
    """Write the latent of each token into its slot, and its rotary part behind it.

    Args:
        kv_cache: ``[NB, block, 1, rank + rope]``; written.
        kv_c: ``[T, rank]`` or ``[B, S, rank]``.
        k_pe: ``[T, rope]`` or ``[B, S, rope]``.
        slot_mapping: ``[T]`` or ``[B, S]``: ``block_id * block + offset``, negative for padding.

    Returns:
        The tokens whose slot is not below ``NB * block``, which were not written.
    """
    skipped: list[Place] = []
    cache, latents, rotary, capacity = _bits(kv_cache), _bits(kv_c), _bits(k_pe), _capacity(kv_cache)
    rank = kv_c.shape[-1]
    for place, slot in _values(slot_mapping):
        if slot >= capacity:
            skipped.append(place)
        elif slot >= 0:
            row = cache[slot // kv_cache.shape[1], slot % kv_cache.shape[1], 0]
            row[:rank], row[rank:] = latents[place], rotary[place]
    return skipped


def mla_gather(kv_cache: torch.Tensor, slot_mapping: torch.Tensor, kv_c_out: torch.Tensor, k_pe_out: torch.Tensor) -> list[Place]:
    """Read the latents at given slots, and what is behind them; what no slot of the pool stands for reads as zeros.

    Args:
        kv_cache: ``[NB, block, 1, rank + rope]``.
        slot_mapping: ``[T]`` or ``[B, S]``, negative for padding.
        kv_c_out: ``[..., rank]``; written whole.
        k_pe_out: ``[..., rope]``; written whole.

    Returns:
        The tokens whose slot is not below ``NB * block``. On a device they are zeros, and no skipped writes.
    """
    beyond: list[Place] = []
    cache, latents, rotary, capacity = _bits(kv_cache), _bits(kv_c_out), _bits(k_pe_out), _capacity(kv_cache)
    rank = kv_c_out.shape[-1]
    for place, slot in _values(slot_mapping):
        if slot >= capacity:
            beyond.append(place)
        row = cache[slot // kv_cache.shape[1], slot % kv_cache.shape[1], 0] if 0 <= slot < capacity else None
        latents[place], rotary[place] = (0, 0) if row is None else (row[:rank], row[rank:])
    return beyond


def _values(index: torch.Tensor) -> Iterator[tuple[Place, int]]:
    """Yield every position of an index tensor with its value, the last dimension running fastest."""
    yield from zip(itertools.product(*(range(size) for size in index.shape)), index.reshape(-1).tolist(), strict=True)


def _pairs(block_pairs: torch.Tensor | Sequence[tuple[int, int]]) -> Sequence[Sequence[int]]:
    listed: Sequence[Sequence[int]] = block_pairs if isinstance(block_pairs, Sequence) else block_pairs.tolist()
    return listed


def _capacity(cache: torch.Tensor) -> int:
    return cache.shape[0] * cache.shape[1]


def _lengths(cache_lengths: int | torch.Tensor, rows: int) -> list[int]:
    if isinstance(cache_lengths, int):
        return [cache_lengths] * rows
    lengths = [int(length) for length in cache_lengths.reshape(-1)]
    return lengths * rows if len(lengths) == 1 else lengths


def _bits(tensor: torch.Tensor) -> Bits:
    """Return a tensor's own memory as integers of its elements' size: writing to them writes to the tensor."""
    import torch

    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits: Bits = tensor.detach().view(integers[tensor.element_size()]).numpy()
    return bits
