"""An engine loop of your own on kvdock's paged cache: sequences of any length share one pool of blocks.

    python examples/paged_loop.py                   # or: --device cuda

The model is a toy with random weights; what counts is what happens around it. Each sequence has a block table. In each
step all running sequences go through the model at once, as one row of tokens without padding: whole prompts of those that
just came, one token of each other. A request may ask for several continuations: they share the blocks of the prompt, and a
shared block is copied before it is written. A request waits until the pool has room for it.

At the end each continuation is computed again without any cache. If a token differs, the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

import kvdock
from kvdock.scheduler import BlockAllocator, BlockTable

VOCABULARY, LAYERS, HEADS, KV_HEADS, DIM = 100, 2, 4, 2, 16
HIDDEN = HEADS * DIM
BLOCK_SIZE, NUM_BLOCKS = 4, 24

Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``attention(layer, q, k, v)``: what the new tokens ``q`` [T, HEADS, DIM] see, as [T, HEADS, DIM]."""


class ToyModel:
    """A decoder with random weights, in float64 so that rounding never decides which token is next."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._random = torch.Generator().manual_seed(7)
        self.embedding, self.output = self._weights(VOCABULARY), self._weights(HIDDEN, VOCABULARY)
        self.places = self._weights(256)
        self.qkv = [self._weights(HIDDEN, (HEADS + 2 * KV_HEADS) * DIM) for _ in range(LAYERS)]

    def _weights(self, rows: int, columns: int = HIDDEN) -> torch.Tensor:
        """Draw a matrix."""
        weights = torch.randn(rows, columns, generator=self._random, dtype=torch.float64) / HIDDEN**0.5
        return weights.to(self.device)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Return the logits ``[T, VOCABULARY]`` of tokens ``[T]`` at positions ``[T]``."""
        hidden = self.embedding[tokens] + self.places[positions]
        for layer, weights in enumerate(self.qkv):
            fused = (hidden @ weights).unflatten(1, (-1, DIM))
            q, k, v = fused.split([HEADS, KV_HEADS, KV_HEADS], dim=1)  # slices: kvdock honours their strides
            hidden = hidden + attention(layer, q, k, v).flatten(1)
        return hidden @ self.output


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Let the last tokens of a sequence, ``q`` [t, HEADS, DIM], see all of it, ``keys`` [length, KV_HEADS, DIM]."""
    length = len(keys)
    place = torch.arange(length, device=q.device)
    mask = place[length - len(q) :, None] >= place
    q, keys, values = (tensor.transpose(0, 1) for tensor in (q, keys, values))
    return scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True).transpose(0, 1)


@attrs.define
class Running:
    """One sequence: its tokens, the blocks of those that went through the model, and how many there will be."""

    tokens: list[int]
    table: BlockTable
    stop: int
    branches: int = 1

    @property
    def most_blocks(self) -> int:
        """Blocks that it and its branches hold at most. The last token never goes through the model."""
        return self.branches * -(-(self.stop - 1) // self.table.block_size)

    def branch(self, logits: torch.Tensor) -> list[Running]:
        """Append the next token; where several continuations are wanted, go on as so many sequences."""
        best, *others = logits.topk(self.branches).indices.tolist()
        forks = [Running([*self.tokens, token], self.table.fork(), self.stop) for token in others]
        return [Running([*self.tokens, best], self.table, self.stop), *forks]


def step(model: ToyModel, cache: kvdock.PagedKVCache, running: Sequence[Running]) -> list[torch.Tensor]:
    """Run every sequence's new tokens through the model; return each one's logits behind its last token."""
    held = [sequence.table.length for sequence in running]
    lengths = [len(sequence.tokens) for sequence in running]
    for sequence, start, stop in zip(running, held, lengths, strict=True):
        cache.copy_blocks(sequence.table.grow(stop - start))  # the pairs to copy; mostly none
    everywhere = [on_device(cache, sequence.table.slot_mapping(0, stop)[0]) for sequence, stop in zip(running, lengths, strict=True)]
    slots = torch.cat([every[start:] for every, start in zip(everywhere, held, strict=True)])
    counts = [stop - start for start, stop in zip(held, lengths, strict=True)]

    def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache.update(layer, k, v, slots)
        parts = zip(q.split(counts), everywhere, strict=True)
        return torch.cat([attend(part, *cache.gather(layer, every)) for part, every in parts])

    tokens = torch.tensor([token for sequence, start in zip(running, held, strict=True) for token in sequence.tokens[start:]])
    places = torch.cat([torch.arange(start, stop) for start, stop in zip(held, lengths, strict=True)])
    logits = model(tokens.to(model.device), places.to(model.device), attention)
    return [part[-1] for part in logits.split(counts)]


def on_device(cache: kvdock.PagedKVCache, slots: np.ndarray) -> torch.Tensor:
    """Bring slots to where the pool is."""
    return torch.from_numpy(slots).to(cache.device)


def serve(model: ToyModel, cache: kvdock.PagedKVCache, requests: Sequence[tuple[list[int], int, int]]) -> list[list[int]]:
    """Serve requests ``(prompt, new tokens, continuations)``; return all tokens of each continuation."""
    allocator = BlockAllocator(cache.num_blocks)
    waiting = deque(Running(prompt, BlockTable(allocator, cache.block_size), len(prompt) + new, n) for prompt, new, n in requests)
    running: list[Running] = []
    done: list[list[int]] = []
    while waiting or running:
        while waiting and sum(sequence.most_blocks for sequence in [*running, waiting[0]]) <= cache.num_blocks:
            running.append(waiting.popleft())
        results = step(model, cache, running)
        print(f"{len(running)} sequences run, {len(waiting)} wait, {allocator.num_used} of {cache.num_blocks} blocks are in use")
        branches = [branch for sequence, logits in zip(running, results, strict=True) for branch in sequence.branch(logits)]
        running = [sequence for sequence in branches if len(sequence.tokens) < sequence.stop]
        for sequence in branches:
            if len(sequence.tokens) == sequence.stop:
                done.append(sequence.tokens)
                sequence.table.clear()  # gives its blocks back
    allocator.check_integrity()
    assert allocator.num_used == 0, allocator  # noqa: S101 - an example may say what it relies on
    return done


def is_same_without_cache(model: ToyModel, tokens: list[int], new: int) -> bool:
    """Compute a continuation's tokens, all but its first, again from nothing but the tokens before each."""
    for length in range(len(tokens) - new + 1, len(tokens)):
        past = torch.tensor(tokens[:length], device=model.device)
        logits = model(past, torch.arange(length, device=model.device), lambda _, q, k, v: attend(q, k, v))
        if int(logits[-1].argmax()) != tokens[length]:
            return False
    return True


def main() -> int:
    """Serve five requests on a pool that is too small for all of them at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where model and pool are, as torch names it")
    model = ToyModel(parser.parse_args().device)
    spec = kvdock.KVSpec.uniform(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM, max_positions=256, dtype=torch.float64)
    config = kvdock.PagedKVCacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    cache = kvdock.create_cache(spec, config, kvdock.RankInfo(model.device))
    print(cache)
    new = 8
    lengths_and_branches = [(6, 1), (13, 3), (3, 1), (21, 1), (10, 2)]
    requests = [([(7 * i + length) % VOCABULARY for i in range(length)], new, n) for length, n in lengths_and_branches]
    done = serve(model, cache, requests)
    same = [is_same_without_cache(model, tokens, new) for tokens in done]
    for tokens in done:
        print(f"prompt of {len(tokens) - new:2} tokens, then {tokens[-new:]}")
    print(f"{sum(same)} of {len(same)} continuations have the tokens that the model gives without a cache")
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
