"""Ranks that exchange blocks while processes, channels and copies fail: histories of a few of them, by one clock."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import attrs
import pytest
import torch

import kvdock
from kvdock.errors import TransferError
from kvdock.transfer import Inbound, Limits, Runs, Spans, TicketState, Transfer, gather, scatter
from support_faults import Faults
from support_transfer import Clock, LoopTicket, Rank, holds

__all__ = ["LIMITS", "SPEC", "World", "transfer_history"]

SPEC = kvdock.KVSpec((kvdock.LayerSpec(4, 2, 2, 3), kvdock.LayerSpec(4, 4, 2, 2)), 256, torch.bfloat16)
LIMITS = Limits(deadline=40, silence=9, beat=2, grace=3)


@attrs.define(eq=False)
class World:
    """Two owners that share the heads, two askers that do, and the messages between them.

    Args:
        faults: chance, and what was injected.
        is_hostile: whether messages are damaged and lost, copies fail and times pass, beside all that ends a process or a request.
    """

    faults: Faults
    is_hostile: bool = False
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
        self.make_ranks()
        for owner in self.owners:
            owner.meet(*self.askers)

    def make_ranks(self) -> None:
        """Make both sides."""
        self.owners += [Rank(f"p{rank}", SPEC, self.clock, 2, rank, limits=LIMITS) for rank in range(2)]
        self.askers += [Rank(f"d{rank}", SPEC, self.clock, 2, rank, limits=LIMITS, block_size=8, num_blocks=12) for rank in range(2)]

    @property
    def chance(self) -> random.Random:
        return self.faults.chance

    @property
    def alive(self) -> list[Rank]:
        return [rank for rank in (*self.owners, *self.askers) if rank.name not in self.dead]

    def kinds(self) -> list[Callable[[], None]]:
        """Return what may happen, as often as it is likely."""
        usual = [self.begin, self.deliver, self.deliver, self.move, self.move, self.wait, self.cancel, self.kill, self.stick, self.poll]
        rare = [
            self.lose,
            self.damage,
            self.damage,
            self.foreign,
            self.foreign,
            self.fail_copy,
            self.fail_copy,
            self.cut_off,
            self.pass_time,
        ]
        return usual + [*usual, *[self.deliver, self.move, self.meet_again] * 3] * 4 + rare if self.is_hostile else usual

    def prompt(self) -> list[int]:
        """Draw a prompt."""
        return [self.chance.randrange(50) for _ in range(self.chance.randint(2, 25))]

    def begin(self) -> None:
        """Have a prompt computed on all owners and asked for on all askers, each of them perhaps not."""
        name = f"r{len(self.prompts)}"
        self.prompts[name] = prompt = self.prompt()
        for rank in self.alive:
            if self.chance.random() < 0.1:
                continue
            try:
                if rank in self.owners:
                    takers = [asker.name for asker in self.askers if asker.name in rank.exchange.peers]
                    self.open.append((rank, rank.exchange.offer(name, self.computed(rank, prompt), takers)))
                else:
                    self.ask(rank, name, prompt)
            except kvdock.OutOfBlocksError:
                self.faults.note("a pool is full")  # there is not always room, and nothing has changed

    def computed(self, rank: Rank, prompt: list[int]) -> kvdock.scheduler.CacheSequence:
        """Compute a prompt."""
        return rank.computed(prompt)

    def holds(self, rank: Rank, transfer: Transfer) -> bool:
        """Whether what came is right."""
        return holds(rank, transfer.seq, self.prompts[transfer.name])

    def ask(self, rank: Rank, name: str, prompt: list[int], start: int | None = 0) -> None:
        """Ask all owners that there are; one that is gone is an error, and the sequence is still the engine's."""
        seq = rank.manager.begin(prompt)
        try:
            self.open.append((rank, rank.exchange.ask(name, seq, [owner.name for owner in self.owners], start=start)))
        except TransferError:
            rank.manager.abort(seq)

    def deliver(self) -> None:
        """Carry some messages in their order, and lose those to whoever is dead."""
        self.collect()
        by_name = {rank.name: rank for rank in self.alive}
        count = self.chance.randint(0, len(self.mail))
        for sender, peer, message in self.mail[:count]:
            if peer in by_name and sender in by_name[peer].exchange.peers:
                by_name[peer].exchange.take(sender, message)
            elif peer in self.dead:
                self.faults.note("a message is lost with its process")
        del self.mail[:count]

    def collect(self) -> None:
        """Fetch what is to be carried."""
        for rank in self.alive:
            self.mail += [(rank.name, peer, message) for peer, message in rank.exchange.outgoing()]

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
            self.faults.note("a request is cancelled")

    def kill(self) -> None:
        """End a process, at most one; others may be told, or find out by its silence."""
        if not self.dead and self.chance.random() < 0.1:
            gone = self.chance.choice(self.alive)
            self.dead.add(gone.name)
            self.faults.note("a rank is killed")
            for rank in self.alive:
                if self.chance.random() < 0.5 and gone.name in rank.exchange.peers:
                    rank.exchange.drop(gone.name, "its process is gone")

    def stick(self) -> None:
        """Let tickets of some rank not end when they are cancelled, for a while."""
        rank = self.chance.choice(self.alive)
        rank.loop.stuck = not rank.loop.stuck

    def lose(self) -> None:
        """Lose a message between two that live on."""
        self.collect()
        if self.mail:
            del self.mail[self.chance.randrange(len(self.mail))]
            self.faults.note("a message is lost")

    def damage(self) -> None:
        """Damage a message on its way: cut it, or change a byte. It is refused, and whoever refuses it drops the peer."""
        self.collect()
        places = [at for at, (sender, peer, _) in enumerate(self.mail) if self.can_hear(peer, sender)]
        if not places:
            return
        sender, peer, message = self.mail.pop(self.chance.choice(places))
        at = self.chance.randrange(len(message))
        if self.chance.random() < 0.3:
            self.refuse(peer, sender, message[:at], "a message is cut")
        else:
            changed = bytes([message[at] ^ self.chance.randrange(1, 256)])
            self.refuse(peer, sender, message[:at] + changed + message[at + 1 :], "a byte of a message is changed")

    def foreign(self) -> None:
        """Let something arrive that no exchange says."""
        rank = self.chance.choice(self.alive)
        if rank.exchange.peers:
            sender = self.chance.choice(sorted(rank.exchange.peers))
            other = rank.exchange.hello.replace(b"/1 ", b"/7 ", 1)
            said = [rank.exchange.hello, other, self.chance.randbytes(40), b"", b"GET / HTTP/1.1\r\n\r\n", b"kvdock-transfer/2 ask\n[]"]
            self.refuse(rank.name, sender, self.chance.choice(said), "a message is none of an exchange")

    def can_hear(self, peer: str, sender: str) -> bool:
        return any(rank.name == peer and sender in rank.exchange.peers for rank in self.alive)

    def refuse(self, peer: str, sender: str, message: bytes, kind: str) -> None:
        """Have a message taken, which must be refused. Who refused it drops the peer, or takes it for a stranger's."""
        (rank,) = [rank for rank in self.alive if rank.name == peer]
        self.faults.note(kind)
        before = rank.exchange.num_open, rank.manager.num_sequences, rank.manager.available_size
        with pytest.raises(TransferError, match=re.escape(repr(sender))):
            rank.exchange.take(sender, message)
        assert before == (rank.exchange.num_open, rank.manager.num_sequences, rank.manager.available_size)
        if self.chance.random() < 0.5:
            rank.exchange.drop(sender, "it says what nobody understands")

    def fail_copy(self) -> None:
        """Let a copy fail when half of it is written; one of the sides knows, or both."""
        pushed = [(owner, peer, tag) for owner in self.owners if owner in self.alive for peer, tag in owner.loop.pushed]
        for owner, peer, tag in self.chance.sample(pushed, len(pushed)):
            here, there = owner.loop.pushed[peer, tag], owner.loop.here[peer].expected.get((owner.name, tag))
            if there is None or {here.state, there.state} != {TicketState.PENDING}:
                continue
            half = Spans(*(getattr(here.runs, field.name)[: len(here.runs) // 2] for field in attrs.fields(Spans)))
            scatter(owner.loop.here[peer].memory, Runs.of_target(half), gather(owner.loop.memory, Runs.of_source(half)))
            self.fail_tickets(here, there)
            return

    def fail_tickets(self, *tickets: LoopTicket) -> None:
        """Let some of the two sides' tickets fail."""
        self.faults.note("a copy fails when half of it is written")
        for ticket in self.chance.choice([tickets, tickets, tickets[:1], tickets[1:]]):
            ticket.fail("the card is gone")

    def cut_off(self) -> None:
        """Break a rank's connection to a peer: nothing new is pushed or expected, until they meet again."""
        rank = self.chance.choice(self.alive)
        if rank.loop.connected:
            rank.loop.connected.discard(self.chance.choice(sorted(rank.loop.connected)))
            self.faults.note("a connection is broken")

    def pass_time(self) -> None:
        """Let a deadline pass, or the time that a peer may be silent."""
        if self.open:
            seconds, what = self.chance.choice([(41, "the deadline passes"), (10, "nobody says a word for too long")])
            self.clock.now += seconds
            self.faults.note(what)

    def meet_again(self) -> None:
        """Let two that have lost one another connect again, both ways."""
        for owner in self.owners:
            for asker in self.askers:
                lost = asker.name not in owner.loop.connected or owner.name not in asker.loop.connected
                if lost and not self.dead & {owner.name, asker.name}:
                    for one, other in ((owner, asker), (asker, owner)):
                        if other.name in one.exchange.peers:
                            one.exchange.drop(other.name, "it comes anew")
                    owner.meet(asker)
                    return

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
            assert self.holds(rank, transfer)
            rank.manager.finish(transfer.seq)
            self.right += 1
            self.faults.note("", "transfers that came through")
        else:
            assert not transfer.seq.is_open
            self.failed += 1
            self.faults.note("", "transfers that ended with an error")

    def run(self, steps: int) -> None:
        """Do things in any order, and then wait until all is over."""
        for _ in range(steps):
            self.chance.choice(self.kinds())()
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
            for ticket in [*rank.loop.pushed.values(), *rank.loop.expected.values()] if self.is_hostile else []:
                if ticket.was_stuck:
                    self.faults.note("a ticket does not end when it is cancelled")


def transfer_history(faults: Faults) -> None:
    """Let four ranks exchange prompts while everything fails."""
    World(faults, is_hostile=True).run(200)
