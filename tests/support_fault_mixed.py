"""Histories of pools that do all three: each has two host tiers in a row, is saved and loaded, and exchanges blocks with others."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch

import kvdock
from kvdock.errors import ArgumentValueError, FileAccessError, FileContentError
from kvdock.files import load_pool, loading, save_pool
from kvdock.scheduler import Tier
from kvdock.transfer import Transfer
from support_fault_files import broken_disk, damage, full_disk
from support_faults import Faults, FaultyHost, InjectedError
from support_files import KINDS, cached, check_sequence, compute
from support_transfer import Rank
from support_world import LIMITS, World

__all__ = ["MixedWorld", "mixed_history"]


class TieredRank(Rank):
    """A rank whose pool gives its blocks up to two host tiers that fail, are slow, full and lost."""

    def __init__(self, faults: Faults, blocks: tuple[int, int], *args: Any, **how: Any) -> None:
        self.faults, self.blocks = faults, blocks
        super().__init__(*args, **how)

    def tiers(self) -> Sequence[Tier]:
        nbytes = sum(len(each) for each in self.cache.region_bytes()) // self.cache.num_blocks
        made = [FaultyHost(count * nbytes).bind(self.cache) for count in self.blocks]
        for tier in made:
            tier.faults = self.faults
        return made


@attrs.define(eq=False)
class MixedWorld(World):
    """One owner and two askers, each with tiers, and a folder that all save to and load from.

    What a token leaves in memory follows from all tokens up to it, so that any pool can be compared whatever way its blocks came.
    """

    folder: Path = attrs.field(kw_only=True)
    kind: str = "equal"
    texts: list[list[int]] = attrs.field(factory=list)

    def make_ranks(self) -> None:
        self.kind = self.chance.choice(["equal", "windows", "sinks", "chunks"])
        spec = kvdock.KVSpec(KINDS[self.kind], max_positions=4096, dtype=torch.float16)
        for name, side in (("p0", self.owners), ("d0", self.askers), ("d1", self.askers)):
            blocks, most = self.chance.choice([(6, 30), (40, 40), (1, 9)]), self.chance.choice([24, 60])
            side.append(TieredRank(self.faults, blocks, name, spec, self.clock, limits=LIMITS, num_blocks=most))

        def wait(seconds: float) -> None:
            self.clock.now += seconds

        self.faults.wait = wait

    def kinds(self) -> list[Callable[[], None]]:
        return [*super().kinds(), *[self.begin, self.run_again, self.run_again, self.save, self.load] * 8]

    def prompt(self) -> list[int]:
        """Draw one of a few prompts that part somewhere, so that they come again when pools have given them up."""
        ids = [self.chance.randrange(6)] * self.chance.choice([8, 16, 24]) + [self.chance.randrange(3)] * self.chance.randint(1, 6)
        self.texts.append(ids)
        return ids

    def computed(self, rank: Rank, prompt: list[int]) -> kvdock.scheduler.CacheSequence:
        more = [7] * self.chance.choice([0, 0, 1, 2, 5])  # askers want fewer tokens than these, of which windows have let go
        return compute(rank.cache, rank.manager, [*prompt, *more], finish=False)

    def ask(self, rank: Rank, name: str, prompt: list[int], start: int | None = None) -> None:
        """Ask for what is neither in the pool nor in its tiers."""
        super().ask(rank, name, prompt, None)

    def holds(self, rank: Rank, transfer: Transfer) -> bool:
        prompt = self.prompts[transfer.name]
        check_sequence(rank.cache, transfer.seq, prompt, len(prompt))
        return True

    def run_again(self) -> None:
        """Compute a prompt on some rank: what tiers and files brought of it is compared first."""
        rank = self.chance.choice(self.alive)
        try:
            compute(rank.cache, rank.manager, self.prompt())
        except kvdock.OutOfBlocksError:
            self.faults.note("a pool is full")
        self.look_at(rank)

    def save(self) -> None:
        """Save a pool, on a disk that is full or broken now and then."""
        rank, chance = self.chance.choice(self.alive), self.chance
        disk = chance.choice([contextlib.nullcontext, lambda: full_disk(1000), lambda: broken_disk(self.faults)])
        before = {each.name: each.read_bytes() for each in self.folder.iterdir()}
        try:
            with disk():
                save_pool(self.folder / "p.st", rank.manager, rank.cache, max_file_bytes=chance.choice([2000, 10**9]))
        except ArgumentValueError:
            stored = list(rank.manager.prefix.stored_prefixes())
            assert not any(cached(rank.cache, rank.manager, ids.tolist(), namespace) for ids, namespace in stored), "nothing to save"
        except FileAccessError as error:
            if "too large" in str(error):
                self.faults.note("a disk is full")
            if before != {each.name: each.read_bytes() for each in self.folder.iterdir()}:
                self.look_into_file()  # the device failed once all was in place
        assert not [each.name for each in self.folder.iterdir() if not each.name.startswith("p.")]

    def load(self) -> None:
        """Load a pool that another saved: a damaged copy, or the file itself, to the end or not."""
        rank, chance, path = self.chance.choice(self.alive), self.chance, self.folder / "p.st"
        if not path.exists():
            return
        before, real = rank.manager.num_sequences, loading.put

        def put(*args: Any) -> None:
            real(*args)
            self.faults.note("a load fails while it copies")
            raise InjectedError

        if chance.random() < 0.4:
            self.load_damaged(rank, path)
        else:
            fails = mock.patch.object(loading, "put", put) if chance.random() < 0.4 else contextlib.nullcontext()
            with contextlib.suppress(InjectedError), fails:
                load_pool(path, rank.manager, rank.cache)
        assert rank.manager.num_sequences == before
        self.look_at(rank)

    def look_into_file(self) -> None:
        """Load the file into a pool of its own, and compare."""
        other = Rank("other", self.owners[0].cache.spec, self.clock, num_blocks=200)
        assert load_pool(self.folder / "p.st", other.manager, other.cache).num_tokens
        self.look_at(other)

    def load_damaged(self, rank: Rank, path: Path) -> None:
        """Load files that are damaged, which is refused; then mend them."""
        files = {each: each.read_bytes() for each in self.folder.iterdir()}
        kind = damage(self.faults, path, sorted(each for each in files if each != path))
        used = rank.manager.blocks_used, rank.manager.prefix.size_info
        try:
            load_pool(path, rank.manager, rank.cache)
        except (FileContentError, FileAccessError):
            assert (rank.manager.blocks_used, rank.manager.prefix.size_info) == used
            self.faults.note(kind, "refused")
        else:
            self.faults.note(kind, "not read, and right")
        for each, data in files.items():
            each.write_bytes(data)

    def look_at(self, rank: Rank) -> None:
        """Compare all that a pool has cached with what it must hold, and prove that pool and tiers are whole."""
        rank.manager.check_integrity()
        for ids, namespace in list(rank.manager.prefix.stored_prefixes()):
            cached(rank.cache, rank.manager, ids.tolist(), namespace)

    def poll(self) -> None:
        super().poll()
        if self.chance.random() < 0.2:
            self.look_at(self.chance.choice(self.alive))


def mixed_history(faults: Faults, steps: int = 200) -> None:
    """Let three pools do all at once while everything fails."""
    faults.rate = faults.chance.choice([0.05, 0.15, 0.3])
    with tempfile.TemporaryDirectory() as name:
        world = MixedWorld(faults, is_hostile=True, folder=Path(name))
        world.run(steps)
        for rank in world.alive:
            world.look_at(rank)
