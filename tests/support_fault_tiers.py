"""Histories of a manager whose tiers fail, are slow, full and lost: hits are lost, and nothing that was promised."""

from __future__ import annotations

import random
from typing import Any

from kvdock.scheduler.cached import cached_blocks
from kvdock_conformance.checking.group_calls import drive_engine
from kvdock_conformance.checking.group_engine import Request
from support_faults import Faults, FaultyMemory, Interrupted
from support_tiers import MODELS, MemoryTier, TierEngine
from support_transfer import Clock

__all__ = ["FaultyEngine", "tier_history"]


class FaultyEngine(TierEngine):
    """An engine on tiers that fail, which holds the manager to its promises.

    Args:
        faults: what is injected.
        model: layer groups, by name.
        num_blocks: blocks of the pool.
        sizes: blocks of each tier.
        how: what else the manager takes.
    """

    def __init__(self, faults: Faults, model: str, num_blocks: int, sizes: list[int], **how: Any) -> None:
        self.faults, self.promised = faults, dict[Request, int]()
        super().__init__(model, num_blocks, sizes, **how)

    def tier(self, num_blocks: int, fails: Any) -> MemoryTier:
        made = FaultyMemory(num_blocks, self.memory)
        made.faults = self.faults
        return made

    def begin(self, ids: list[int], namespace: tuple[Any, ...] = (), **how: Any) -> Request | None:
        before, refused = [(tier.num_blocks == usage.used, tier.copied) for tier, usage in self.usages()], self.refused
        one = super().begin(ids, namespace, **how)
        if self.refused > refused:
            self.faults.note("a pool has no room for a prompt")
        if one is not None and (how.get("reserve") or "at_most" not in how):
            self.promised[one] = one.seq.num_tokens + how.get("reserve", 0)
        for (tier, _), (was_full, copied) in zip(self.usages(), before, strict=True):
            if was_full and tier.copied > copied:
                self.faults.note("a tier is full when blocks come to it")
        return one

    def usages(self) -> list[tuple[Any, Any]]:
        return list(zip(self.tiers, self.manager.tier_usage, strict=True))

    def step(self, one: Request, n: int = 1) -> bool:
        """Compute; what was promised is there, whatever tiers do."""
        done = super().step(one, n)
        assert done or one.seq.num_tokens + n > self.promised.get(one, 0), "room was promised"
        return done

    def truncate(self, one: Request, tokens: int) -> None:
        self.promised.pop(one, None)  # what is cut off is promised again only as far as its blocks became free
        super().truncate(one, tokens)

    def again(self, chance: random.Random) -> None:
        """Run a prompt that came before and was evicted, as most were: of more than the pool holds."""
        while self.all:
            self.end(self.all[-1], "keep")
        ids = [100 + chance.randrange(9)] * 16
        ids += [chance.randrange(2)] * chance.choice([0, 1, 5])  # behind its end there is what windows and states need
        one = self.begin(ids)
        while one is not None and one.seq.computed < len(ids) and self.step(one):
            self.check()
        if one is not None:
            self.end(one, "keep")
        self.check()

    def check_cached(self) -> None:
        """Compare all that can be found in the pool with what it must hold; what is pinned can be found."""
        for ids, namespace in list(self.manager.prefix.stored_prefixes()):
            known = ids.tolist()
            count, tables = cached_blocks(self.manager, known, namespace)
            for group, table in enumerate(tables):
                self._check_blocks(group, table, known[:count], namespace)
        for pin, one in self.pins:
            assert cached_blocks(self.manager, one.ids, one.namespace)[0] >= pin.num_tokens > 0, "what is pinned stays"

    def _check_blocks(self, at: int, table: Any, ids: list[int], namespace: tuple[Any, ...]) -> None:
        group, unit = self.groups[at], self.manager.block_size
        for place, block in enumerate(table.tolist()):
            if block < 0:
                continue
            if group.retention.is_state:
                assert self.memory[block, 0] == self.content(at, ids[: (place + 1) * unit], namespace), "a state that is cached"
                continue
            for token in range(place * group.block_size, (place + 1) * group.block_size):
                found = self.memory[block, token % group.block_size]
                assert found == self.content(at, ids[: token + 1], namespace), "a block that is cached"

    def recover(self) -> None:
        """Give up what runs, as an engine does that caught a signal; all blocks are there again."""
        for pin, _ in self.pins:
            pin.release()
        self.pins.clear()
        while self.all:
            self.end(self.all[-1], "abort")
        self.check()
        assert self.manager.num_sequences == 0
        self.check_cached()


def tier_history(faults: Faults) -> None:
    """Make random calls of a manager with one to three tiers, and look at everything after each."""
    chance, clock = faults.chance, Clock()

    def wait(seconds: float) -> None:
        clock.now += seconds

    faults.wait, faults.rate, faults.interrupts = wait, chance.choice([0.1, 0.2, 0.4]), chance.random() < 0.3
    model = chance.choice([*MODELS, *["full"] * 6])
    sizes = chance.choice([[5], [40], [300], [7, 20], [20, 300], [1, 1, 50]])
    how = {"null_block": chance.random() < 0.7} if model != "full" else {}
    engine = FaultyEngine(faults, model, chance.choice([16, 20, 24]), sizes, clock=clock, **how)
    engine.priorities, engine.fetches = (0, 0, 0, 0, 1, 2), 0.2
    for _ in range(40):
        try:
            chance.choice([engine.request, engine.again])(chance)
        except Interrupted:
            engine.recover()
        engine.check_cached()
    faults.interrupts = False
    drive_engine(engine, chance.randrange(2**32), 20)
