"""An engine loop of your own on kvdock: sequences of any length share one pool of blocks, and what they have in common.

    python examples/paged_loop.py                   # or: --device cuda

The model is a toy with random weights; what counts is what happens around it. A `CacheManager` says which blocks each
sequence has. In each step all running sequences go through the model at once, as one row of tokens without padding: what is
not cached of prompts that just came, one token of each other. A request may ask for several continuations: they share the
blocks of the prompt, and a shared block is copied before it is written. A request waits until the pool has room for it. What
others have computed of its prompt is not computed again.

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
from kvdock.scheduler import CacheSequence

VOCABULARY, LAYERS, HEADS, KV_HEADS, DIM = 100, 2, 4, 2, 16
HIDDEN = HEADS * DIM
BLOCK_SIZE, NUM_BLOCKS = 4, 16

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
        hidden = 6 * (self.embedding[tokens] + self.places[positions])  # large enough that it matters what is attended to
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


@attrs.define(eq=False)
class Request:
    """One continuation: its tokens, how many there will be, and the sequence that has its blocks, while it runs."""

    tokens: list[int]
    stop: int
    branches: int = 1
    reserve: int = 0
    sequence: CacheSequence | None = None

    def begin(self, manager: kvdock.CacheManager) -> bool:
        """Take blocks, if there are enough: also for all tokens to come, but for one that will have several continuations."""
        self.reserve = 0 if self.branches > 1 else self.stop - 1 - len(self.tokens)  # the last one never goes through the model
        if not manager.plan(self.tokens, reserve=self.reserve).fits:
            return False
        self.sequence = manager.begin(self.tokens, reserve=self.reserve)
        return True

    def branch(self, manager: kvdock.CacheManager, logits: torch.Tensor) -> list[Request]:
        """Append the next token; where several continuations are wanted, go on as so many sequences."""
        best, *others = logits.topk(self.branches).indices.tolist()
        forks = [Request([*self.tokens, token], self.stop, sequence=manager.fork(self.sequence)) for token in others]
        self.tokens, self.branches = [*self.tokens, best], 1
        return [self, *forks]


class Engine:
    """Serves requests, one step after the other."""

    def __init__(self, model: ToyModel, cache: kvdock.PagedKVCache) -> None:
        self.model, self.cache = model, cache
        self.manager = kvdock.CacheManager(cache.num_blocks, cache.block_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def serve(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return all tokens of each continuation."""
        done: list[list[int]] = []
        self.waiting.extend(requests)
        while self.waiting or self.running:
            self.make_room()
            stats = self.manager.prefix.stats
            print(f"{len(self.running)} sequences run, {len(self.waiting)} wait, {stats.hit_tokens} prompt tokens were found so far")
            results = zip(self.running, self.step(self.sequences()), strict=True)
            self.running = [branch for request, logits in results for branch in request.branch(self.manager, logits)]
            computed = [sequence.num_tokens for sequence in self.sequences()]
            self.manager.commit(self.sequences(), [request.tokens[-1] for request in self.running], computed=computed)
            for request in [request for request in self.running if len(request.tokens) == request.stop]:
                self.running.remove(request)
                self.manager.finish(request.sequence)  # what it computed can still be found
                done.append(request.tokens)
        self.manager.check_integrity()
        return done

    def sequences(self) -> list[CacheSequence]:
        """Return the sequences of all that run."""
        return [request.sequence for request in self.running]

    def make_room(self) -> None:
        """Make room for the next token of each, and let requests begin that fit. Who has reserved room never has to go."""
        while True:
            try:
                self.cache.copy_blocks(self.manager.extend(self.sequences(), 1))  # mostly none: shared blocks that are written next
                break
            except kvdock.OutOfBlocksError:
                back = next(request for request in reversed(self.running) if not request.reserve)
                self.manager.abort(back.sequence)  # what it committed stays cached, as long as there is room
                self.running.remove(back)
                self.waiting.appendleft(back)
        while self.waiting and self.waiting[0].begin(self.manager):
            self.running.append(self.waiting.popleft())

    def step(self, sequences: Sequence[CacheSequence]) -> list[torch.Tensor]:
        """Run what is not computed of every sequence through the model; return each one's logits behind its last token."""
        starts = [sequence.computed for sequence in sequences]
        everywhere = [self.on_device(sequence.slot_mapping(0, sequence.num_tokens)) for sequence in sequences]
        slots = torch.cat([every[start:] for every, start in zip(everywhere, starts, strict=True)])
        counts = [len(every) - start for every, start in zip(everywhere, starts, strict=True)]

        def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cache.update(layer, k, v, slots)
            parts = zip(q.split(counts), everywhere, strict=True)
            return torch.cat([attend(part, *cache.gather(layer, every)) for part, every in parts])

        cache = self.cache
        tokens = np.concatenate([sequence.tokens[start:] for sequence, start in zip(sequences, starts, strict=True)])
        places = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
        logits = self.model(self.on_device(tokens), self.on_device(places), attention)
        return [part[-1] for part in logits.split(counts)]

    def on_device(self, numbers: np.ndarray) -> torch.Tensor:
        """Bring numbers to where the pool is."""
        return torch.from_numpy(numbers).to(self.cache.device)


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
    text = [7 * i % VOCABULARY for i in range(21)]  # prompts begin alike
    requests = [Request(text[:length], length + new, branches) for length, branches in [(6, 1), (13, 3), (3, 1), (21, 1), (10, 2)]]
    done = Engine(model, cache).serve(requests)
    same = [is_same_without_cache(model, tokens, new) for tokens in done]
    for tokens in done:
        print(f"prompt of {len(tokens) - new:2} tokens, then {tokens[-new:]}")
    print(f"{sum(same)} of {len(same)} continuations have the tokens that the model gives without a cache")
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
