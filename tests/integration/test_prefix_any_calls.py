"""Prefix reuse under any sequence of calls, in a pool that runs full.

After each call: the tokens are those without reuse, every block has the holders that are seen, and every stored key and value is
that of its tokens. At the end nothing is locked, and nothing but the prefix cache holds a block.
"""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from integration import zoo
from integration.prefixes import CLOSE, Watched, padded, text
from kvdock.errors import OutOfBlocksError
from kvdock.integrations.transformers import PagedCacheForTransformers
from support_slow import first_of

Inputs = dict[str, torch.Tensor]


class BrokenError(Exception):
    """Raised in the middle of a forward pass."""


class Script:
    """Calls that a seed chooses, on a cache, its copies, and texts that have much in common.

    Args:
        name: the model.
        seed: for block size, size of the pool, and all calls.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.chance = random.Random(f"{name} {seed}")  # noqa: S311 - not for secrets
        size = self.chance.choice((1, 2, 3, 4, 5, 8))
        self.watched = Watched(name, block_size=size, num_blocks=max(self.chance.choice((60, 120, 200, 400)) // size, 8))
        self.model = self.watched.model
        self.texts = [text(48, 7 * seed + index) for index in range(3)]
        self.texts.append(self.texts[0][:20] + self.texts[1][20:])
        self.found = self.failed = self.full = 0
        can_look_up = name not in zoo.WINDOWED or zoo.CROPS_WINDOWS
        self.calls = [self.generate, self.beams, self.chunks, self.by_hand, self.fail, *([self.look_up] if can_look_up else [])]

    def run(self, steps: int) -> None:
        """Make calls, and see that nothing is left in the end."""
        for _ in range(steps):
            self.step()
            self.watched.check()
        self.watched.copies.clear()
        gc.collect()
        self.watched.cache.reset()
        self.watched.check()
        assert self.watched.prefix.num_locks == 0
        assert self.watched.cache.state.manager.allocator.num_used == len(self.watched.stored)

    def step(self) -> None:
        """Make one call, store what it gave or not, and change something else now and then."""
        cache = self.chance.choice([self.watched.cache, *self.watched.copies])
        namespace = self.chance.choice(((), (), ("a",)))
        try:
            if self.chance.random() < 0.1:
                cache.bind(**self.prompts(3), namespace=namespace)
                cache.truncate(self.chance.randint(0, cache.get_seq_length()))
            out = self.chance.choice(self.calls)(cache, namespace)
        except OutOfBlocksError:
            self.full += 1
            return
        except BrokenError:
            self.failed += 1
            return
        self.found += cache.usage.cached_tokens
        if self.chance.random() < 0.75:
            cache.commit(out)
        self.change_something(cache)

    def change_something(self, cache: PagedCacheForTransformers) -> None:
        """Copy the cache, drop a copy, forget or reset."""
        if self.chance.random() < 0.25:
            self.watched.copies.append(copy.deepcopy(cache))
        if len(self.watched.copies) > 2:
            del self.watched.copies[self.chance.randrange(3)]
        if self.chance.random() < 0.05:
            self.watched.cache.reset()
        if self.chance.random() < 0.03:
            self.watched.cache.forget_prefixes()

    def prompts(self, most: int) -> Inputs:
        """Make a batch of one to ``most`` rows; one row alone may have padding, too."""
        rows = [self.chance.choice(self.texts)[: self.chance.randint(1, 48)] for _ in range(self.chance.randint(1, most))]
        inputs = padded(*rows)
        more = self.chance.randint(1, 9) if len(rows) == 1 and self.chance.random() < 0.3 else 0
        return {name: torch.cat([torch.zeros(len(rows), more, dtype=torch.long), value], dim=1) for name, value in inputs.items()}

    def compare(self, cache: PagedCacheForTransformers, namespace: Any, most: int, **way: Any) -> torch.Tensor:
        """Generate with reuse and without."""
        inputs, new = self.prompts(most), self.chance.randint(1, 8)
        way = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": self.chance.choice((1, new)), **way}
        torch.manual_seed(3)
        out: torch.Tensor = self.model.generate(**cache.bind(**inputs, namespace=namespace), **way)
        torch.manual_seed(3)
        assert torch.equal(out, self.model.generate(**inputs, **way))
        return out

    def generate(self, cache: PagedCacheForTransformers, namespace: Any) -> torch.Tensor:
        """Generate greedily, or sample several results."""
        several = {"do_sample": True, "num_return_sequences": self.chance.randint(1, 3)}
        return self.compare(cache, namespace, 4, **self.chance.choice(({}, several)))

    def beams(self, cache: PagedCacheForTransformers, namespace: Any) -> torch.Tensor:
        """Search with beams."""
        return self.compare(cache, namespace, 3, num_beams=3, num_return_sequences=self.chance.randint(1, 3))

    def chunks(self, cache: PagedCacheForTransformers, namespace: Any) -> torch.Tensor:
        """Compute the prompt in chunks."""
        return self.compare(cache, namespace, 3, prefill_chunk_size=self.chance.randint(1, 9))

    def look_up(self, cache: PagedCacheForTransformers, namespace: Any) -> torch.Tensor:
        """Guess tokens, and take back those that were wrong."""
        return self.compare(cache, namespace, 1, prompt_lookup_num_tokens=self.chance.randint(1, 4))

    def by_hand(self, cache: PagedCacheForTransformers, namespace: Any) -> torch.Tensor:
        """Make forward passes over the whole prompt or its rest, telling more or less; then two tokens more."""
        inputs = self.prompts(3)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        positions = (mask.cumsum(dim=-1) - 1).masked_fill(mask == 0, 0)
        cache.bind(**inputs, namespace=namespace)
        start = self.chance.choice((0, cache.get_seq_length()))
        told: dict[str, Any] = {"attention_mask": mask} if self.chance.random() < 0.7 else {}
        told |= {"position_ids": positions[:, start:]} if self.chance.random() < 0.5 else {}
        with torch.no_grad():
            expected = self.model(**inputs, position_ids=positions).logits[:, -1]
            got = self.model(input_ids=ids[:, start:], **told, **{zoo.CACHE_KEYWORD: cache}).logits[:, -1]
            torch.testing.assert_close(got, expected, **CLOSE)
            for _ in range(2):
                new = got.argmax(dim=-1, keepdim=True)
                ids, mask = torch.cat([ids, new], dim=1), torch.cat([mask, torch.ones_like(new)], dim=1)
                told = {"attention_mask": mask} if self.chance.random() < 0.5 else {}
                got = self.model(input_ids=new, **told, **{zoo.CACHE_KEYWORD: cache}).logits[:, -1]
        return ids

    def fail(self, cache: PagedCacheForTransformers, namespace: Any) -> torch.Tensor:
        """Break off in a layer of some pass."""
        left = self.chance.randint(1, 6)

        def count(*_: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise BrokenError

        handles = [module.register_forward_pre_hook(count) for name, module in self.model.named_modules() if name.endswith("mlp")]
        remove: list[Callable[[], None]] = [handle.remove for handle in handles]
        try:
            return self.compare(cache, namespace, 3)
        finally:
            for call in remove:
                call()


@pytest.mark.parametrize("seed", first_of([1, 0, *range(100, 108)]))
@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "gpt2"])
def test_any_sequence_of_calls(name: str, seed: int) -> None:
    Script(name, seed).run(15 if seed < 100 else 60)


@pytest.mark.slow
def test_such_sequences_find_much_fail_often_and_run_full() -> None:
    """Else they would prove little."""
    scripts = [Script("llama-gqa", seed) for seed in range(5)]
    for script in scripts:
        script.run(30)
    assert sum(script.found for script in scripts) > 50
    assert sum(script.failed for script in scripts) > 5
    assert sum(script.full for script in scripts) > 5
    assert sum(script.watched.prefix.stats.evicted_tokens for script in scripts) > 50
