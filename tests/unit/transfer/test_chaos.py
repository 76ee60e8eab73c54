"""Whatever happens in whatever order, every transfer ends, what came is right, and no block is lost: drawn histories of four ranks."""

from __future__ import annotations

import random

import attrs
import pytest
import torch

import kvdock
from kvdock.errors import TransferError
from kvdock.transfer import Inbound, Limits, Transfer
from support_transfer import Clock, Rank, holds

SPEC = kvdock.KVSpec((kvdock.LayerSpec(4, 2, 2, 3), kvdock.LayerSpec(4, 4, 2, 2)), 256, torch.bfloat16)
LIMITS = Limits(deadline=40, silence=9, beat=2, grace=3)


@attrs.define(eq=False)
class World:
    """Two owners that share the heads, two askers that do, and the messages between them."""

    chance: random.Random
    clock: Clock = attrs.field(factory=Clock)
    owners: list[Rank] = attrs.field(factory=list)
    askers: list[Rank] = attrs.field(factory=list)
    mail: list[tuple[str, str, bytes]] = attrs.field(factory=list)
    dead: set[str] = attrs.field(factory=set)
    prompts: dict[str, list[int]] = attrs.field(factory=dict)
    open: list[tuple[Rank, Transfer]] = attrs.field(factory=list)
    right: int = 0
    failed: int = 0

    def __attrs_post_init__(self) -> None:
        self.owners += [Rank(f"p{rank}", SPEC, self.clock, 2, rank, limits=LIMITS) for rank in range(2)]
        self.askers += [Rank(f"d{rank}", SPEC, self.clock, 2, rank, limits=LIMITS, block_size=8, num_blocks=12) for rank in range(2)]
        for owner in self.owners:
            owner.meet(*self.askers)

    @property
    def alive(self) -> list[Rank]:
        return [rank for rank in (*self.owners, *self.askers) if rank.name not in self.dead]

    def begin(self) -> None:
        """Have a prompt computed on all owners and asked for on all askers, each of them perhaps not."""
        name = f"r{len(self.prompts)}"
        self.prompts[name] = prompt = [self.chance.randrange(50) for _ in range(self.chance.randint(2, 25))]
        for rank in self.alive:
            if self.chance.random() < 0.1:
                continue
            try:
                if rank in self.owners:
                    takers = [asker.name for asker in self.askers if asker.name in rank.exchange.peers]
                    self.open.append((rank, rank.exchange.offer(name, rank.computed(prompt), takers)))
                else:
                    self.ask(rank, name, prompt)
            except kvdock.OutOfBlocksError:
                continue  # there is not always room, and nothing has changed

    def ask(self, rank: Rank, name: str, prompt: list[int]) -> None:
        """Ask all owners that there are; one that is gone is an error, and the sequence is still the engine's."""
        seq = rank.manager.begin(prompt)
        try:
            self.open.append((rank, rank.exchange.ask(name, seq, [owner.name for owner in self.owners], start=0)))
        except TransferError:
            rank.manager.abort(seq)

    def deliver(self) -> None:
        """Carry some messages in their order, and lose those to whoever is dead."""
        for rank in self.alive:
            self.mail += [(rank.name, peer, message) for peer, message in rank.exchange.outgoing()]
        by_name = {rank.name: rank for rank in self.alive}
        count = self.chance.randint(0, len(self.mail))
        for sender, peer, message in self.mail[:count]:
            if peer in by_name and sender in by_name[peer].exchange.peers:
                by_name[peer].exchange.take(sender, message)
        del self.mail[:count]

    def move(self) -> None:
        """Have one of the owners copy what it has pushed."""
        owner = self.chance.choice(self.owners)
        if owner.name not in self.dead:
            owner.loop.move()

    def wait(self) -> None:
        self.clock.now += self.chance.choice([0.1, 1, 1, 3])

    def cancel(self) -> None:
        """End a transfer, as an engine does whose user is gone."""
        mine = [(rank, transfer) for rank, transfer in self.open if rank in self.alive]
        if mine and self.chance.random() < 0.3:
            rank, transfer = self.chance.choice(mine)
            rank.exchange.cancel(transfer, "its user is gone")

    def kill(self) -> None:
        """End a process, at most one; others may be told, or find out by its silence."""
        if not self.dead and self.chance.random() < 0.1:
            gone = self.chance.choice(self.alive)
            self.dead.add(gone.name)
            for rank in self.alive:
                if self.chance.random() < 0.5 and gone.name in rank.exchange.peers:
                    rank.exchange.drop(gone.name, "its process is gone")

    def stick(self) -> None:
        """Let tickets of some rank not end when they are cancelled, for a while."""
        rank = self.chance.choice(self.alive)
        rank.loop.stuck = not rank.loop.stuck

    def poll(self) -> None:
        """Let all look, and check what ended."""
        for rank in self.alive:
            for transfer in rank.exchange.poll():
                assert transfer.is_over
                self.open.remove((rank, transfer))
                self.check(rank, transfer)
            rank.manager.check_integrity()

    def check(self, rank: Rank, transfer: Transfer) -> None:
        """What came through is right and shareable; what did not is closed."""
        if not isinstance(transfer, Inbound):
            assert not transfer.seq.is_open
        elif transfer.error is None:
            assert holds(rank, transfer.seq, self.prompts[transfer.name])
            rank.manager.finish(transfer.seq)
            self.right += 1
        else:
            assert not transfer.seq.is_open
            self.failed += 1

    def run(self, steps: int) -> None:
        """Do things in any order, and then wait until all is over."""
        for _ in range(steps):
            kinds = [self.begin, self.deliver, self.deliver, self.move, self.move, self.wait, self.cancel, self.kill, self.stick, self.poll]
            self.chance.choice(kinds)()
            self.poll()
        for rank in self.alive:
            rank.loop.stuck = False
        for _ in range(60):
            self.clock.now += 1
            self.deliver()
            self.poll()
        assert [transfer for rank, transfer in self.open if rank in self.alive] == [], "nothing waits for ever"
        for rank in self.alive:
            rank.check()


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_wrong_or_for_ever(seed: int) -> None:
    world = World(random.Random(seed))  # noqa: S311 - what is drawn is a test case
    world.run(60)
    assert world.right + world.failed > 0


@pytest.mark.slow
def test_many_histories() -> None:
    right = failed = killed = 0
    for seed in range(100, 220):
        world = World(random.Random(seed))  # noqa: S311 - as above
        world.run(80)
        right, failed, killed = right + world.right, failed + world.failed, killed + bool(world.dead)
    assert min(right, failed, killed) > 30, "all of it happens"
