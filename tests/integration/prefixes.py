"""A cache with a prefix cache, watched: what is stored is compared with what the model computes for it, from nothing."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from integration import zoo
from kvdock import MLAKVCache, PagedKVCacheConfig
from kvdock.integrations.transformers import PagedCacheForTransformers
from kvdock.prefix import Cleared, PrefixEvent, Removed, Stored
from kvdock.scheduler.grouped_blocks import GroupedBlocks

CLOSE = {"rtol": 1e-3, "atol": 1e-4}
"""What rounding in another order may change; measured: 6e-6 in logits."""


def reusing(
    of: Any, *, block_size: int = 4, num_blocks: int = 128, prefix: str = "radix", attention: str = "auto"
) -> PagedCacheForTransformers:
    """Make a cache that reuses prefixes."""
    conf = PagedKVCacheConfig(num_blocks=num_blocks, block_size=block_size)
    return PagedCacheForTransformers.for_model(of, conf, prefix=prefix, attention=attention)


class Watched:
    """A cache with a model, and its own account of which tokens are stored in which block."""

    def __init__(self, name: str, *, attention: str = "sdpa", block_size: int = 4, num_blocks: int = 128, model: Any = None) -> None:
        self.model = zoo.model(name, "eager" if name in zoo.EAGER_ONLY else attention) if model is None else model
        self.block_size = block_size
        self.cache = reusing(self.model, block_size=block_size, num_blocks=num_blocks)
        self.copies: list[PagedCacheForTransformers] = []
        self.stored: dict[int, tuple[Any, int | None, list[int]]] = {}  # by block: namespace, block before, tokens
        self.prefix = self.cache.prefix
        assert self.prefix is not None
        self.prefix.subscribe(self.note)
        self.prefix.hand_over()

    def note(self, event: PrefixEvent) -> None:
        """Keep the account."""
        if isinstance(event, Stored):
            before = event.parent
            for block, tokens in zip(event.blocks.tolist(), event.tokens.reshape(-1, self.block_size).tolist(), strict=True):
                self.stored[block] = event.namespace, before, tokens
                before = block
        elif isinstance(event, Removed):
            for block in event.blocks.tolist():
                del self.stored[block]
        elif isinstance(event, Cleared):
            self.stored.clear()

    def copy(self) -> PagedCacheForTransformers:
        """Copy the cache."""
        self.copies.append(copy.deepcopy(self.cache))
        return self.copies[-1]

    def generate(self, inputs: dict[str, torch.Tensor], *, commit: bool = True, namespace: Any = (), **settings: Any) -> Any:
        """Generate with reuse, the random numbers started anew."""
        torch.manual_seed(3)
        bound = self.cache.bind(**inputs, namespace=namespace)
        out = self.model.generate(**bound, **settings, return_dict_in_generate=True, output_logits=True)
        if commit:
            self.cache.commit(out)
        return out

    def without(self, inputs: dict[str, torch.Tensor], **settings: Any) -> Any:
        """Generate without any cache of ours."""
        torch.manual_seed(3)
        return self.model.generate(**inputs, **settings, return_dict_in_generate=True, output_logits=True)

    def same(self, inputs: dict[str, torch.Tensor], **settings: Any) -> Any:
        """Generate with and without reuse, compare, and return what came."""
        expected = self.without(inputs, **{key: value for key, value in settings.items() if key not in ("namespace", "commit")})
        got = self.generate(inputs, **settings)
        assert_same(expected, got, greedy="num_beams" not in settings and not settings.get("do_sample"))
        self.check()
        return got

    def check(self) -> None:
        """Prove that everything is whole, every block accounted for, and every stored key and value that of its tokens."""
        manager, prefix = self.cache.state.manager, self.prefix
        assert prefix is not None
        manager.check_integrity()
        blocks = prefix.stored_blocks()
        manager.hand_over()
        assert blocks.tolist() == sorted(self.stored)
        rows = sum(one.state.batch_size for one in (self.cache, *self.copies))
        assert manager.num_sequences == rows, "nobody else has any"
        for path in self.paths():
            self.check_content(path)

    def paths(self) -> list[list[int]]:
        """Return the blocks of each stored prefix that is no part of another."""
        inner = {before for _, before, _ in self.stored.values()}
        paths = []
        for leaf in self.stored.keys() - inner:
            path, at = [], leaf
            while at is not None:
                path.append(at)
                at = self.stored[at][1]
            paths.append(path[::-1])
        return paths

    def check_content(self, path: list[int]) -> None:
        """Compare keys and values of one prefix with those of a forward pass over its tokens."""
        tokens = [token for block in path for token in self.stored[block][2]]
        dynamic = zoo.dynamic_of_all(self.model)
        with torch.no_grad():
            self.model(input_ids=torch.tensor([tokens]), **{zoo.CACHE_KEYWORD: dynamic})
        pool, index = self.cache.state.pool, 0
        for layer, stored in zip(dynamic.layers, self.cache._found.stored, strict=False):
            if stored:
                rows = (
                    (torch.cat([layer.keys, layer.values], -1), layer.keys) if isinstance(pool, MLAKVCache) else (layer.keys, layer.values)
                )
                blocks = torch.from_numpy(self.blocks_of(path, index))
                there = blocks >= 0
                for cached, expected in zip((pool.k_cache(index), pool.v_cache(index)), rows, strict=True):
                    found = cached[blocks[there]]
                    torch.testing.assert_close(found, expected[0].transpose(0, 1).unflatten(0, (len(blocks), -1))[there], **CLOSE)
                index += 1
        assert index == pool.num_layers

    def blocks_of(self, path: list[int], layer: int) -> npt.NDArray[np.int32]:
        """Return a layer's blocks of what the prefix cache calls blocks: with several layer groups, units; -1 for what was let go."""
        pool, group = self.cache.state.manager._pool, self.cache.state.group_of[layer]
        if not isinstance(pool, GroupedBlocks):
            return np.array(path, dtype=np.int32)
        units = pool.units
        return units.table[path, units.starts[group] : units.starts[group] + units.widths[group]].reshape(-1)

    def stored_texts(self) -> list[list[int]]:
        """Return the tokens of each stored prefix that is no part of another, sorted."""
        return sorted([token for block in path for token in self.stored[block][2]] for path in self.paths())

    @property
    def cached(self) -> int:
        """Tokens of the last prompts that were found."""
        return self.cache.usage.cached_tokens

    def poison_free_blocks(self) -> None:
        """Write NaN wherever nobody's tokens are."""
        pool, blocks = self.cache.state.pool, self.cache.state.manager._pool
        allocator = blocks.units.blocks if isinstance(blocks, GroupedBlocks) else blocks.allocator
        free = np.flatnonzero(allocator.ref_counts(range(allocator.num_blocks)) == 0)
        for layer in range(pool.num_layers):
            pool.k_cache(layer)[free] = torch.nan
            pool.v_cache(layer)[free] = torch.nan


def assert_same(expected: Any, got: Any, *, greedy: bool) -> None:
    """Compare tokens exactly and logits closely; for greedy decoding also see that no tie makes the comparison vain."""
    assert torch.equal(expected.sequences, got.sequences)
    for left, right in zip(expected.logits, got.logits, strict=True):
        torch.testing.assert_close(left, right, **CLOSE)
        if greedy:
            first, second = left.topk(2).values.unbind(-1)
            assert (first - second).min() > 10 * (left - right).abs().max(), "a tie: choose another seed"


def longer(ids: torch.Tensor, *tokens: int) -> dict[str, torch.Tensor]:
    """Append tokens to each row, and make a mask of ones."""
    ids = torch.cat([ids, torch.tensor([tokens]).expand(len(ids), -1)], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def padded(*rows: list[int]) -> dict[str, torch.Tensor]:
    """Make a batch of prompts, padded on the left to the longest."""
    length = max(map(len, rows))
    ids = torch.tensor([[zoo.PAD] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def text(length: int, seed: int = 1) -> list[int]:
    """Make random token ids."""
    return zoo.prompt(length, seed=seed)["input_ids"][0].tolist()
