"""Pools of several ranks that hold one model's keys and values, and a slow reference of what a transfer writes."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
import torch

import kvdock
from kvdock.errors import TransferError
from kvdock.scheduler import Tier
from kvdock.transfer import (
    Exchange,
    Limits,
    PoolLayout,
    Runs,
    Spans,
    Ticket,
    TicketState,
    Transfer,
    Transport,
    Wanted,
    gather,
    scatter,
    spans,
)
from support_caches import runtime_for

OPS = runtime_for("portable").dispatcher

AGAIN = ". Fix: ask for them again, or compute them: nothing is held for them any more"
"""The end of what becomes of blocks that did not come, where nothing else helps."""


@attrs.frozen(eq=False)
class Side:
    """The ranks of one side: a cache of each, all with the same block tables."""

    caches: tuple[kvdock.PagedKVCache, ...]
    layouts: tuple[PoolLayout, ...]
    tables: tuple[list[int], ...]

    @classmethod
    def make(cls, spec: kvdock.KVSpec, ranks: int, tokens: int, seed: int = 0, **config: object) -> Side:
        """Make caches with random bits in them, and tables of blocks in random order with room for so many tokens."""
        options = {"num_blocks": 12, "block_size": 4, **config}
        made = [kvdock.RankInfo("cpu", ranks, rank) for rank in range(ranks)]
        caches = tuple(kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(**options), rank, ops=OPS) for rank in made)
        for number, cache in enumerate(caches):
            for at, memory in enumerate(cache.region_bytes()):
                memory.copy_(torch.from_numpy(np.random.default_rng([seed, number, at]).integers(0, 256, len(memory), dtype=np.uint8)))
        random = np.random.default_rng(seed)
        tables = []
        free = random.permutation(caches[0].num_blocks).tolist()
        for group in caches[0].groups:
            count = 1 if group.retention.is_state else -(-tokens // group.block_size)
            tables.append([free.pop() for _ in range(count)])
        layouts = tuple(PoolLayout.of(cache, rank, "m") for cache, rank in zip(caches, made, strict=True))
        return cls(caches, layouts, tuple(tables))

    def bytes(self, rank: int) -> list[np.ndarray]:
        """Return what each region of a rank holds; the array is the memory itself."""
        return [memory.numpy() for memory in self.caches[rank].region_bytes()]

    def fill(self, seed: int) -> None:
        """Write what the whole model would keep: each token's elements in all heads, the same on every rank that has them."""
        for cache, layout in zip(self.caches, self.layouts, strict=True):
            for place in layout.places:
                view, group = cache.buffers(place.layer)[place.name], layout.groups[place.group]
                rows = view.shape[0] * (1 if group.is_state else group.block_size)
                for token in range(rows):
                    table = self.tables[place.group]
                    if token // group.block_size >= len(table):
                        break
                    random = np.random.default_rng([seed, place.layer, sum(place.name.encode()), token])
                    whole = torch.from_numpy(random.integers(0, 256, (*place.whole, place.itemsize), dtype=np.uint8))
                    mine = whole if place.split < 0 else whole.narrow(place.split, place.start, place.shape[place.split])
                    at = (
                        (table[token // group.block_size],)
                        if group.is_state
                        else (table[token // group.block_size], token % group.block_size)
                    )
                    view[at] = mine.contiguous().to(view.device).view(view.dtype).squeeze(-1)


def wanted_of(layout: PoolLayout, start: int, stop: int) -> list[Wanted]:
    """Return the same tokens in each group, or the state."""
    return [[(0, 1)] if group.is_state else [(start, stop)] for group in layout.groups]


def expected_after(source: Side, target: Side, rank: int, wanted: Sequence[Wanted]) -> list[np.ndarray]:
    """Return what a target's rank holds afterwards: element by element, through the views of the caches, not by any layout's strides."""
    twin = Side(target.caches, target.layouts, target.tables)
    before = [region.copy() for region in twin.bytes(rank)]
    cache, layout = target.caches[rank], target.layouts[rank]
    for place in layout.places:
        group = layout.groups[place.group]
        view = cache.buffers(place.layer)[place.name]
        for of_cache, of_layout in zip(source.caches, source.layouts, strict=True):
            of = next(each for each in of_layout.places if (each.layer, each.name) == (place.layer, place.name))
            of_group, of_view = of_layout.groups[of.group], of_cache.buffers(place.layer)[place.name]
            for start, stop in wanted[place.group]:
                for token in range(start, stop):
                    here = target.tables[place.group][token // group.block_size]
                    there = source.tables[of.group][token // of_group.block_size]
                    row = view[here] if group.is_state else view[here, token % group.block_size]
                    from_row = of_view[there] if of_group.is_state else of_view[there, token % of_group.block_size]
                    if place.split < 0:
                        if of_layout.tp_rank == layout.tp_rank % of_layout.tp_size:
                            row.copy_(from_row)
                        continue
                    for element in range(place.shape[place.split]):
                        which = place.start + element - of.start
                        if 0 <= which < of.shape[of.split]:
                            row.select(place.split, element).copy_(from_row.select(of.split, which))
    after = [region.copy() for region in twin.bytes(rank)]
    for region, old in zip(twin.bytes(rank), before, strict=True):
        region[:] = old
    return after


def moved(source: Side, target: Side, rank: int, wanted: Sequence[Wanted]) -> tuple[list[np.ndarray], list[Spans]]:
    """Return what a target's rank holds after all spans were copied, and the spans of each source rank; nothing is written twice."""
    after = [region.copy() for region in target.bytes(rank)]
    written = [np.zeros(region.size, dtype=np.int64) for region in after]
    found = []
    for number, layout in enumerate(source.layouts):
        runs = spans(layout, target.layouts[rank], source.tables, target.tables, wanted)
        found.append(runs)
        memory = source.bytes(number)
        for of, begin, to, at, nbytes in zip(*(getattr(runs, field.name).tolist() for field in attrs.fields(Spans)), strict=True):
            after[to][at : at + nbytes] = memory[of][begin : begin + nbytes]
            written[to][at : at + nbytes] += 1
    assert all(int(times.max(initial=0)) <= 1 for times in written), "one sender for each byte"
    return after, found


class LoopTicket(Ticket):
    """A ticket of a `Loop`; `stuck` ones do not end when they are cancelled."""

    def __init__(self, loop: Loop, peer: str, runs: Spans) -> None:
        self.loop, self.peer, self.runs = loop, peer, runs
        self.state, self.stuck, self.was_stuck = TicketState.PENDING, loop.stuck, False

    def poll(self) -> TicketState:
        return self.state

    def cancel(self, reason: str) -> None:
        if not self.stuck:
            self.fail(reason)
        elif self.state is TicketState.PENDING:
            self.was_stuck = True

    def fail(self, reason: str) -> None:
        """End it, if it is not over."""
        if self.state is TicketState.PENDING:
            self.error, self.state = reason, TicketState.FAILED


class Loop(Transport):
    """A transport in one process: a push is copied when `move` is called, as one-sided writes are."""

    name = "loop"
    here: ClassVar[dict[str, Loop]] = {}

    def __init__(self, me: str) -> None:
        self.me, self.stuck = me, False
        self.memory: Sequence[torch.Tensor] = ()
        self.pushed: dict[tuple[str, int], LoopTicket] = {}
        self.expected: dict[tuple[str, int], LoopTicket] = {}
        self.connected: set[str] = set()
        self.here[me] = self

    def register(self, layout: PoolLayout, memory: Sequence[torch.Tensor]) -> bytes:
        self.memory = memory
        return self.me.encode()

    def connect(self, peer: str, layout: PoolLayout, described: bytes) -> None:
        if described.decode() != peer:
            raise TransferError(f"peer {peer!r}", got=described.decode())
        self.connected.add(peer)

    def push(self, peer: str, spans: Spans, tag: int, note: bytes) -> Ticket:
        return self._new(self.pushed, peer, spans, tag)

    def expect(self, peer: str, spans: Spans, tag: int) -> Ticket:
        return self._new(self.expected, peer, spans, tag)

    def _new(self, tickets: dict[tuple[str, int], LoopTicket], peer: str, spans: Spans, tag: int) -> Ticket:
        if peer not in self.connected:
            raise TransferError(f"peer {peer!r}", got="a broken connection")
        assert (peer, tag) not in tickets
        tickets[peer, tag] = LoopTicket(self, peer, spans)
        return tickets[peer, tag]

    def disconnect(self, peer: str) -> None:
        self.connected.discard(peer)
        for (of, _), ticket in [*self.pushed.items(), *self.expected.items()]:
            if of == peer:
                ticket.fail("disconnected")

    def close(self) -> None:
        for peer in list(self.connected):
            self.disconnect(peer)

    def move(self) -> None:
        """Copy what is pushed to whoever expects it still."""
        for (peer, tag), ticket in self.pushed.items():
            other = self.here[peer]
            expected = other.expected.get((self.me, tag))
            if ticket.state is not TicketState.PENDING or expected is None or expected.state is not TicketState.PENDING:
                continue
            scatter(other.memory, Runs.of_target(ticket.runs), gather(self.memory, Runs.of_source(ticket.runs)))
            assert expected.runs.total == ticket.runs.total
            ticket.state = expected.state = TicketState.DONE


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Rank:
    """One rank with a pool, a manager and an exchange; `relay` carries messages between ranks."""

    def __init__(
        self,
        name: str,
        spec: kvdock.KVSpec,
        clock: Clock,
        ranks: int = 1,
        rank: int = 0,
        model: str = "m",
        limits: Limits | None = None,
        device: str = "cpu",
        transport: Callable[[str], Any] = Loop,
        **config: object,
    ) -> None:
        options = {"num_blocks": 24, "block_size": 4, **config}
        self.name = name
        ops = OPS if device == "cpu" else None  # another device's kernels come from what is installed
        self.cache = kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(**options), kvdock.RankInfo(device, ranks, rank), ops=ops)
        self.manager = kvdock.CacheManager(self.cache.num_blocks, groups=self.cache.groups, null_block=True, tiers=self.tiers())
        self.loop = transport(name)
        self.exchange = Exchange(self.manager, self.cache, self.loop, model=model, limits=limits, clock=clock)
        self.free = self.manager.available_size

    def tiers(self) -> Sequence[Tier]:
        """Make what keeps the blocks that its pool gives up."""
        return ()

    def meet(self, *others: Rank) -> None:
        """Connect with others, both ways."""
        for other in others:
            self.exchange.connect(other.name, other.exchange.hello)
            other.exchange.connect(self.name, self.exchange.hello)

    def computed(self, tokens: Sequence[int]) -> kvdock.scheduler.CacheSequence:
        """Begin a sequence and write what a model would: bytes that follow from token, layer and head."""
        seq = self.manager.begin(tokens)
        layout = PoolLayout.of(self.cache, self.cache.rank, "m")
        tables = tuple(seq.block_table(group).tolist() for group in range(len(layout.groups)))
        Side((self.cache,), (layout,), tables).fill(sum(tokens))
        self.manager.commit(seq, [], computed=len(tokens))
        return seq

    def check(self, *, free: bool = True) -> None:
        """Prove that no block is lost; ``free``: all of them can be had again."""
        self.manager.check_integrity()
        if free:
            assert (self.manager.available_size, self.manager.num_sequences, self.exchange.num_open) == (self.free, 0, 0)


def relay(*ranks: Rank) -> list[Transfer]:
    """Carry messages until there are none, and return what ended."""
    by_name, ended = {rank.name: rank for rank in ranks}, []
    for _ in range(10):
        for rank in ranks:
            ended += rank.exchange.poll()
            for peer, message in rank.exchange.outgoing():
                if peer in by_name:
                    by_name[peer].exchange.take(rank.name, message)
    return ended


def holds(rank: Rank, seq: kvdock.scheduler.CacheSequence, tokens: Sequence[int], start: int = 0) -> bool:
    """Whether a sequence's blocks have what `Rank.computed` writes for these tokens, of all that later ones need."""
    layout = PoolLayout.of(rank.cache, rank.cache.rank, "m")
    for place in layout.places:
        group = rank.cache.groups[place.group]
        wanted = [range(1)] if group.retention.is_state else group.retention.spans(len(tokens))
        table, view = seq.block_table(place.group).tolist(), rank.cache.buffers(place.layer)[place.name]
        for token in itertools.chain(*wanted):
            if token < start and not group.retention.is_state:
                continue
            random = np.random.default_rng([sum(tokens), place.layer, sum(place.name.encode()), token])
            whole = torch.from_numpy(random.integers(0, 256, (*place.whole, place.itemsize), dtype=np.uint8))
            mine = whole if place.split < 0 else whole.narrow(place.split, place.start, place.shape[place.split])
            row = view[table[0]] if group.retention.is_state else view[table[token // group.block_size], token % group.block_size]
            if not torch.equal(row.cpu().contiguous().view(torch.uint8).flatten(), mine.flatten()):
                return False
    return True


def sealed(message: bytes) -> bytes:
    """Put the right checksum into a message that was written or changed by hand."""
    line, _, text = message.partition(b"\n")
    name, kind = line.split(b" ")[:2]
    return b"%b %b %08x\n%b" % (name, kind, zlib.crc32(text, zlib.crc32(kind)), text)
