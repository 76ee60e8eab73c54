"""One rank of a group with more ranks than KV heads: it holds its share of the tokens, and the group finds what one process finds.

Run by `test_context_parallel`, with torch's launcher. Each rank computes everything as one process would, too, and compares.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import kvdock
from kvdock.distributed import ContextShare, check_alike, gather_heads, merge_over_ranks

LAYERS, DIM, BLOCK, VOCAB, STEPS = 2, 16, 4, 64, 6


class Model:
    """Weights of a toy model that all ranks draw alike; of the heads each uses its own."""

    def __init__(self, kv_heads: int, query_heads: int) -> None:
        random = torch.Generator().manual_seed(1)
        width = query_heads * DIM
        self.embedding = torch.randn(VOCAB, width, generator=random, dtype=torch.float64)
        self.weights = [
            [
                torch.randn(width, heads * DIM, generator=random, dtype=torch.float64) / width**0.5
                for heads in (query_heads, kv_heads, kv_heads)
            ]
            for _ in range(LAYERS)
        ]

    def forward(self, ids: torch.Tensor, attention: Any) -> torch.Tensor:
        """The hidden states of tokens; ``attention`` has what is before them."""
        hidden = self.embedding[ids]
        for layer, (to_q, to_k, to_v) in enumerate(self.weights):
            q, k, v = ((hidden @ weight).unflatten(1, (-1, DIM)) for weight in (to_q, to_k, to_v))
            hidden = torch.tanh(hidden + attention(layer, q, k, v).flatten(1))
        return hidden


def caches(heads: int, block: int) -> Any:
    spec = kvdock.KVSpec.uniform(num_layers=LAYERS, num_kv_heads=heads, head_dim=DIM, max_positions=4096, dtype=torch.float64)
    return kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(num_blocks=32, block_size=block), kvdock.RankInfo("cpu"))


def main(kv_heads: int) -> None:
    """Generate greedily from prompts in chunks, alone and together, and compare."""
    dist.init_process_group("gloo")
    rank = kvdock.RankInfo.from_process_group("cpu")
    share = ContextShare.of(rank, kv_heads)
    groups = [dist.new_group(range(first, first + share.size)) for first in range(0, rank.tp_size, share.size)]
    group = groups[rank.tp_rank // share.size]
    query_heads = 2 * rank.tp_size
    mine = slice(2 * rank.tp_rank, 2 * rank.tp_rank + 2)
    head = rank.head_range(kv_heads)
    model = Model(kv_heads, query_heads)
    manager = kvdock.CacheManager(32, share.size * BLOCK)
    manager.keep_digest()
    alone, part = caches(kv_heads, share.size * BLOCK), caches(len(head), BLOCK)
    prompts = np.random.default_rng(3)
    sequences = [manager.begin(prompts.integers(0, VOCAB, length), at_most=7) for length in (3, 17, 40)]
    for seq in sequences:
        is_done = False
        while not is_done:
            is_done = seq.num_tokens >= seq.num_known
            chunk = torch.from_numpy(np.asarray(seq.tokens[seq.computed : seq.num_tokens]))
            step(model, manager, [seq], chunk, alone, part, share, group, head, mine)
            if not is_done:
                manager.extend(seq, min(7, seq.num_known - seq.num_tokens))
    for _ in range(STEPS):
        manager.extend(sequences, 1)
        step(model, manager, sequences, torch.tensor([int(seq.tokens[-1]) for seq in sequences]), alone, part, share, group, head, mine)
    check_alike(manager.digest())
    held = [int(share.tokens(torch.tensor(seq.num_tokens), BLOCK)) for seq in sequences]
    print(f"rank {rank.tp_rank} of {rank.tp_size} is right, with {held} of {[seq.num_tokens for seq in sequences]} tokens", flush=True)
    if rank.tp_rank == 1:
        manager.extend(sequences, 8 * BLOCK)
    try:
        check_alike(manager.digest())
    except kvdock.IntegrityError as error:
        print(f"rank {rank.tp_rank} reads: {error}", flush=True)
    dist.destroy_process_group()


def step(
    model: Model,
    manager: kvdock.CacheManager,
    sequences: list[Any],
    ids: torch.Tensor,
    alone: Any,
    part: Any,
    share: ContextShare,
    group: Any,
    head: range,
    mine: slice,
) -> None:
    """One step of all sequences, computed alone and together; commits the likeliest ids."""
    slots = torch.from_numpy(np.concatenate([seq.slot_mapping(seq.computed, seq.num_tokens) for seq in sequences]))
    counts = [0] + [seq.num_tokens - seq.computed for seq in sequences]
    cu = torch.tensor(counts).cumsum(0)
    lens = torch.tensor([seq.num_tokens for seq in sequences])
    table = torch.zeros(len(sequences), 32, dtype=torch.int32)
    for row, seq in zip(table, sequences, strict=True):
        row[: len(seq.block_table())] = torch.from_numpy(seq.block_table())

    def by_one(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pools = alone.update(layer, k, v, slots)
        return kvdock.ops.paged_attention(q, *pools, table, lens, cu_query_lens=cu)

    def by_all(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pools = part.update(layer, k[:, head.start : head.stop], v[:, head.start : head.stop], share.slots(slots, BLOCK))
        together = gather_heads(q[:, mine], group)
        out, _ = merge_over_ranks(*share.attend(together, *pools, table, lens, cu_query_lens=cu), group)
        own = out[:, 2 * share.index : 2 * share.index + 2].contiguous()
        return gather_heads(own)  # a real model multiplies by its part of the next weight, and sums over ranks

    expected, got = model.forward(ids, by_one), model.forward(ids, by_all)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)  # the sums that are merged are float32
    likeliest = (got[cu[1:] - 1] @ model.embedding.T).argmax(1)
    for seq, token in zip(sequences, likeliest.tolist(), strict=True):
        is_done = seq.num_tokens >= seq.num_known
        manager.commit(seq, [token] if is_done else [], computed=seq.num_tokens)


if __name__ == "__main__":
    main(int(sys.argv[1]))
