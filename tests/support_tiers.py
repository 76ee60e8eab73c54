"""Tiers with a memory that is really written, and an engine whose prompts come back from them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentValueError, OutOfBlocksError
from kvdock.layers import KeepAll, Retention
from kvdock.scheduler import CacheManager, Tier
from kvdock_conformance.checking.group_engine import GROUPED, GroupEngine, Request, group_of, unit_of

__all__ = ["JUNK", "MODELS", "FailingTier", "MemoryTier", "TierEngine"]

MODELS: dict[str, Sequence[tuple[Retention, int]]] = {"full": [(KeepAll(), 4)], **GROUPED}
"""Layer groups of models by name; the first has one that keeps all."""

JUNK = -12345


class MemoryTier(Tier):
    """Copies rows of arrays: what was stored under a number is what is loaded from it."""

    def __init__(self, num_blocks: int, pool: npt.NDArray[np.int64]) -> None:
        self.pool = pool
        self.memory = np.full((num_blocks, *pool.shape[1:]), JUNK)
        self.calls: list[tuple[str, list[list[int]]]] = []
        self.ahead: list[list[int]] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.memory)})"

    @property
    def num_blocks(self) -> int:
        return len(self.memory)

    def store(self, pairs: Any, source: Tier | None) -> None:
        self.look_at("store", pairs)
        assert source is None or isinstance(source, MemoryTier)
        self.copy(pairs, self.pool if source is None else source.memory, self.memory)

    def load(self, pairs: Any) -> None:
        self.look_at("load", pairs)
        assert not (self.memory[pairs[:, 0]] == JUNK).all(axis=1).any(), "what is loaded was stored"
        self.copy(pairs, self.memory, self.pool)

    def prefetch(self, blocks: Any) -> None:
        self.ahead.append(blocks.tolist())

    def copy(self, pairs: Any, source: npt.NDArray[np.int64], destination: npt.NDArray[np.int64]) -> None:
        destination[pairs[:, 1]] = source[pairs[:, 0]]

    def look_at(self, name: str, pairs: Any) -> None:
        assert pairs.dtype == np.int64
        assert pairs.shape == (len(pairs), 2)
        assert len(pairs)
        assert pairs.min() >= 0
        assert len(set(pairs[:, 1].tolist())) == len(pairs), "each destination once"
        self.calls.append((name, pairs.tolist()))


class FailingTier(MemoryTier):
    """Raises now and then, when half is copied and the rest is overwritten."""

    def __init__(self, num_blocks: int, pool: npt.NDArray[np.int64], fails: Any) -> None:
        super().__init__(num_blocks, pool)
        self.fails = fails

    def copy(self, pairs: Any, source: npt.NDArray[np.int64], destination: npt.NDArray[np.int64]) -> None:
        if self.fails(self, self.calls[-1][0]):
            super().copy(pairs[: len(pairs) // 2], source, destination)
            destination[pairs[len(pairs) // 2 :, 1]] = JUNK
            raise OSError("the disk is gone")
        super().copy(pairs, source, destination)


class TierEngine(GroupEngine):
    """The kit's engine on a manager with tiers.

    Args:
        name: of a model in `MODELS`.
        num_blocks: blocks of the pool.
        sizes: blocks of each tier.
        fails: says whether a tier fails to "store", or to "load"; None: none does.
        how: what else the manager takes.
    """

    def __init__(self, name: str, num_blocks: int, sizes: Sequence[int], *, fails: Any = None, **how: Any) -> None:
        self.groups = [group_of(rule, size) for rule, size in MODELS[name]]
        size = None if any(not each.retention.is_state for each in self.groups) else unit_of(name)
        self.memory = np.zeros((num_blocks, max(each.block_size for each in self.groups)), dtype=np.int64)
        self.tiers = [self.tier(n, fails) for n in sizes]
        how = {"null_block": True, "clock": lambda: 0, "state_interval": 8, **how}
        self.manager = CacheManager(num_blocks, size, groups=self.groups, tiers=self.tiers, **how)
        self.all: list[Request] = []
        self.told: list[Any] = []
        self.refused = self.computed = self.found = 0
        self.priorities: Sequence[int] = (0,)
        self.fetches = 0.0  # of what begins, and how often it is fetched before
        self.pins: list[tuple[Any, Request]] = []
        self.rng = random.Random(num_blocks)  # noqa: S311 - the same in every run

    def tier(self, num_blocks: int, fails: Any) -> MemoryTier:
        """Make a tier."""
        return MemoryTier(num_blocks, self.memory) if fails is None else FailingTier(num_blocks, self.memory, fails)

    def begin(self, ids: list[int], namespace: tuple[Any, ...] = (), **how: Any) -> Request | None:
        if self.rng.random() < self.fetches:
            self.manager.fetch(ids, namespace)
            self.check()
        planned = self.manager.plan(ids, namespace, at_most=how.get("at_most"))
        one = super().begin(ids, namespace, priority=self.rng.choice(self.priorities), **how)
        if one is not None:
            self.found += one.seq.cached_len
            if not set(how) & {"max_cached_len", "partial", "reserve"} and type(self.tiers[0]) is MemoryTier:
                assert one.seq.cached_len == planned.cached_len
        return one

    def run(self, ids: list[int], namespace: tuple[Any, ...] = (), *, keep: bool = True, **how: Any) -> int:
        """Compute a prompt and end it; return how much of it was found."""
        one = self.begin(ids, namespace, **how)
        assert one is not None
        cached = one.seq.cached_len
        while one.seq.computed < len(ids):
            assert self.step(one)
        self.end(one, "keep" if keep else "drop")
        self.check()
        return cached

    def request(self, rng: random.Random) -> None:
        """Let a prompt of a few that part somewhere run to its end, or some way; or another call come between."""
        family, length = rng.randrange(6), rng.randint(8, 26)
        ids = [family] * length + [rng.randrange(3) for _ in range(rng.randrange(4))]
        how = {"at_most": rng.randint(1, 12)} if rng.random() < 0.3 else {}
        one = self.begin(ids, rng.choice([(), (), ("other",)]), **how)
        self.check()
        while one is not None and one.seq.computed < len(ids) + rng.randrange(3):
            if not self.step(one):
                break
        if one is not None and rng.random() < 0.3:
            most = min(one.seq.num_tokens, len(one.ids))
            rng.choice([self.fork, self.truncate])(one, rng.choice([most, rng.randint(0, most)]))
        self.check()
        if one is not None and rng.random() < 0.2:
            with suppress(ArgumentValueError, OutOfBlocksError):  # less than a block is cached, or promises need it
                known = Request(one.seq, one.ids[: one.seq.computed], one.namespace)
                self.pins.append((self.manager.pin(known.ids, known.namespace), known))
        while len(self.all) > rng.randrange(3):
            self.end(rng.choice(self.all), rng.choice(["keep", "keep", "keep", "drop", "abort"]))
            self.check()
        while self.pins:
            self.pins.pop()[0].release()

    def check(self) -> None:
        super().check()
        self.told.append(self.manager.tier_usage)
