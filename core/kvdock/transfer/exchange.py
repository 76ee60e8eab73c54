"""One rank's side of all transfers: who asks whom for which blocks, and that they are held meanwhile.

::

    asker                                         owner
    begin(prompt): blocks for it                  begin(prompt), compute, commit
    ask(name, seq, peers) -> a message to each    offer(name, seq, takers)
                                                  take(peer, message): an ask waits for its offer, and is pushed
    poll(): all is there, and committed           poll(): all takers are served, the sequence is finished

It has no channel: the engine carries messages by one of its own, and none is believed. It decides nothing about requests either.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from kvdock.cache.paged import PagedKVCache
from kvdock.errors import ArgumentValueError, KVDockError, TransferError
from kvdock.scheduler.cache_manager import CacheManager
from kvdock.scheduler.cached import holds_needed, is_partly_written, note_only_needed, note_partly_written
from kvdock.scheduler.sequence import CacheSequence
from kvdock.transfer.arguments import check_lendable, check_parts, check_text, count_of, names_of, ticket_of
from kvdock.transfer.compatibility import check_compatible
from kvdock.transfer.interface import Ticket, TicketState, Transport
from kvdock.transfer.layout import PoolLayout
from kvdock.transfer.leases import Inbound, Limits, Outbound, Transfer
from kvdock.transfer.mail import Mail, Waiting
from kvdock.transfer.messages import MOST_TAG, MOST_TEXT, Ask, Hello, Part, Stop, digest_of, read_any
from kvdock.transfer.refusals import lost
from kvdock.transfer.serving import check_ask, check_held, groups_of, needed_bytes, nominal_tables, rest_of_blocks, wanted_tokens
from kvdock.transfer.spans import Spans, Wanted, sends, spans

__all__ = ["Exchange"]


class Exchange:
    """Moves sequences between this rank's pool and those of peers. Belongs to the manager's thread.

    Whatever happens, each sequence that it is given ends: blocks are given back when no byte of them can move any more, and not before.

    Args:
        manager: gives and takes blocks.
        cache: where they lie.
        transport: carries the bytes; the exchange registers the cache with it, and closes it.
        model: a name of the weights, see `PoolLayout.of`.
        limits: how long to wait.
        clock: what `Limits` are measured with.
    """

    def __init__(
        self,
        manager: CacheManager,
        cache: PagedKVCache,
        transport: Transport,
        *,
        model: str,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = Limits() if limits is None else limits
        check_parts(manager, cache, transport, self.limits)
        self._manager, self._cache, self._transport, self._clock = manager, cache, transport, clock
        self._layout, self._groups = PoolLayout.of(cache, cache.rank, model), groups_of(manager, cache.groups)
        self.hello = Hello(self._layout, transport.name, transport.register(self._layout, cache.region_bytes())).to_bytes()
        self._peers: dict[str, PoolLayout] = {}
        self._open: list[Transfer] = []
        self._is_closed = False
        self._mail, self._waiting = Mail(clock), Waiting()

    @property
    def peers(self) -> Mapping[str, PoolLayout]:
        """The layouts of the peers that are connected, by name."""
        return MappingProxyType(self._peers)

    @property
    def num_open(self) -> int:
        """Transfers that are not over: their blocks are held."""
        return len(self._open)

    def connect(self, peer: str, hello: bytes) -> None:
        """Get to know a peer, by the `hello` of its exchange.

        Raises:
            TransferError: another version, another transport, keys and values of another model, or known already. It names the peer.
                Or the exchange is closed.
            ArgumentTypeError, ArgumentValueError: a name that is no text, or a long one.
        """
        check_text("Exchange.connect: peer", peer, MOST_TEXT)
        if self._is_closed:
            raise TransferError(
                f"peer {peer!r}", expected="an open exchange", got="a closed one", fix="make another, with a transport of its own"
            )
        if peer in self._peers:
            raise TransferError(f"peer {peer!r}", expected="a new one", got="one that is connected", fix="drop it first")
        theirs = Hello.from_bytes(peer, hello)
        if theirs.transport != self._transport.name:
            expected = f"the transport {self._transport.name!r}, as here"
            raise TransferError(f"peer {peer!r}", expected=expected, got=repr(theirs.transport[:80]), fix="make both by the same name")
        check_compatible(peer, self._layout, theirs.layout)
        self._transport.connect(peer, theirs.layout, theirs.described)
        self._peers[peer] = theirs.layout
        self._mail.hear(peer)

    def ask(
        self, name: str, seq: CacheSequence, peers: Sequence[str], *, num_tokens: int | None = None, start: int | None = None
    ) -> Inbound:
        """Ask for a sequence's keys and values. They are written into its blocks, and committed when all are there.

        Args:
            name: what the other side offers it as.
            seq: has room for them, and knows their ids. If the transfer fails it is aborted.
            peers: every rank of the side that has them.
            num_tokens: so many first tokens; by default all that there is room for.
            start: the first token that is wanted; by default the one behind what was cached.

        Returns:
            What becomes of it; `poll` returns it when it is over.

        Raises:
            TransferError: a peer is not connected, or its connection is broken.
            ArgumentTypeError, StaleHandleError: no open sequence of the manager; names that are none.
            ArgumentValueError: it is in another transfer; fewer ids are known; the peers do not have all heads.
        """
        check_text("Exchange.ask: name", name, MOST_TEXT)
        peers = names_of("Exchange.ask: peers", peers)
        check_lendable("Exchange.ask", self._manager, seq, self._open)
        count = count_of("Exchange.ask: num_tokens", num_tokens, seq.num_tokens)
        first = count_of("Exchange.ask: start", start, seq.cached_len)
        if not 0 <= first <= count <= min(seq.num_tokens, seq.num_known):
            expected = f"0 <= start <= num_tokens <= {min(seq.num_tokens, seq.num_known)}, of which room and ids are known"
            fix = "begin with all ids, or ask for fewer tokens"
            raise ArgumentValueError("Exchange.ask", expected=expected, got=f"start={first}, num_tokens={count}", fix=fix)
        wanted, rest = (of(self._groups, first, count) for of in (wanted_tokens, rest_of_blocks))
        tables = tuple(seq.block_table(group) for group in range(len(self._layout.groups)))

        def runs_of(peer: str, tokens: Sequence[Wanted]) -> Spans:
            layout = self._known(peer)
            return spans(layout, self._layout, nominal_tables(layout, count), tables, tokens)

        found = {peer: runs for peer in peers if len(runs := runs_of(peer, wanted))}
        total, needed = sum(runs.total for runs in found.values()), needed_bytes(self._layout, wanted)
        if total != needed:
            ranks = ", ".join(f"{peer} is rank {self._peers[peer].tp_rank} of {self._peers[peer].tp_size}" for peer in peers)
            fix = "name every rank of the other side"
            raise ArgumentValueError("Exchange.ask: peers", expected=f"all {needed} bytes", got=f"{total}, where {ranks}", fix=fix)
        tag, now, digest = secrets.randbelow(MOST_TAG + 1), self._clock(), digest_of(seq.tokens[:count], seq.namespace)
        transfer = Inbound(name, seq, count, now + self.limits.deadline)
        parts = {tag: wanted} | ({tag ^ 1: rest} if any(rest) else {})
        try:
            for peer, runs in found.items():
                for number, tokens in parts.items():
                    comes = runs if number == tag else runs_of(peer, tokens)
                    transfer.tickets[peer, number] = ticket_of(self._transport, self._transport.expect(peer, comes, number))
        except BaseException:
            for ticket in transfer.tickets.values():  # nobody was asked, so nothing comes
                ticket.cancel("another peer could not be asked")
            raise
        transfer.rest = {key for key in transfer.tickets if key[1] != tag}
        blocks = tuple(tuple(table.tolist()) for table in tables)
        for peer in found:
            asked = [Part(number, tuple(tokens), transfer.tickets[peer, number].note) for number, tokens in parts.items()]
            self._mail.say(peer, Ask(name, count, digest, blocks, *asked).to_bytes())
            self._mail.hear(peer)  # its silence counts from here on
        self._open.append(transfer)
        return transfer

    def offer(self, name: str, seq: CacheSequence, takers: Sequence[str], *, num_tokens: int | None = None) -> Outbound:
        """Let peers ask for a sequence, each once. It is finished when all have it, or when the time for that is over.

        Args:
            name: what they ask for it as.
            seq: what was computed and committed; nobody else ends it, or makes it longer, until the transfer is over.
            takers: every rank of the side that asks. Those that get their heads from other ranks than this one are not waited for.
            num_tokens: so many first tokens; by default all that are computed.

        Raises:
            TransferError: a taker is not connected.
            ArgumentTypeError, StaleHandleError: no open sequence of the manager; names that are none.
            ArgumentValueError: it is in another transfer, or offered already; more tokens than are computed, or fewer than what
                was let go of allows.
            OutOfBlocksError: fewer tokens need blocks that were let go, and others were promised their room.
        """
        check_text("Exchange.offer: name", name, MOST_TEXT)
        takers = names_of("Exchange.offer: takers", takers)
        if self._offered(name):
            raise ArgumentValueError("Exchange.offer: name", expected="a new one", got=repr(name), fix="wait until the first is over")
        check_lendable("Exchange.offer", self._manager, seq, self._open)
        count = count_of("Exchange.offer: num_tokens", num_tokens, seq.computed)
        if not max(seq.shortest, 1) <= count <= seq.computed:
            expected = f"{max(seq.shortest, 1)} to {seq.computed} tokens, which are computed and kept"
            raise ArgumentValueError("Exchange.offer: num_tokens", expected=expected, got=count, fix="commit them first, or leave it out")
        served = [peer for peer in takers if sends(self._layout, self._known(peer))]
        transfer = Outbound(name, seq, count, self._clock() + self.limits.deadline, served)
        self._holding(transfer, count)
        self._open.append(transfer)
        for peer, ask in self._waiting.take(name):
            self._serve(transfer, peer, ask)
        return transfer

    def take(self, peer: str, message: bytes) -> None:
        """Take a message of a peer.

        Raises:
            TransferError: a peer that is not connected, another version, or nothing that an exchange says. It names the peer; `drop` it.
        """
        self._known(peer)
        said = read_any(peer, message)
        self._mail.hear(peer)
        if isinstance(said, Stop):
            self._stopped(peer, said)
        elif isinstance(said, Ask):
            if transfer := self._offered(said.name):
                self._serve(transfer, peer, said)
            elif refusal := self._waiting.add(peer, said, self._clock() + self.limits.deadline):
                self._mail.say(peer, Stop(said.needed.tag, refusal).to_bytes())

    def outgoing(self) -> list[tuple[str, bytes]]:
        """Return what is to be sent, (peer, message) in this order, and forget it."""
        return self._mail.collect()

    def poll(self) -> list[Transfer]:
        """Return the transfers that are over since the last call. Call it in each step, and while there is nothing else to do."""
        if not self._is_closed:
            self._transport.poll()
        now = self._clock()
        for transfer in self._open:
            for peer in {peer for peer in transfer.pending() if self._mail.silence(peer) > self.limits.silence}:
                fix = "see whether it still runs; if it does, have it call poll and outgoing in each step, or raise Limits.silence"
                expected = f"a word within {self.limits.silence} s"
                self._give_up(transfer, peer, TransferError(f"peer {peer!r}", expected=expected, got="none", fix=fix))
            was = transfer.stopped_at
            transfer.step(now)
            if was is None and transfer.stopped_at is not None:
                self._tell(transfer)
            if transfer.stopped_at is not None and now - transfer.stopped_at > self.limits.grace:
                for peer in set(transfer.pending()):
                    self.drop(peer, "its tickets did not end in time")
        for peer, ask in self._waiting.over(now):
            self._mail.say(peer, Stop(ask.needed.tag, f"nobody offered {ask.name!r} in time").to_bytes())
        self._mail.beat({peer for transfer in self._open for peer in transfer.pending()} | self._waiting.peers(), self.limits.beat)
        return self._settle()

    def cancel(self, transfer: Transfer, reason: str) -> None:
        """End a transfer, as when nobody waits for it any more. `poll` returns it when its blocks are given back."""
        if not transfer.is_over:
            self._stop(transfer, lost(transfer.name, f"a call to cancel: {reason}"))

    def drop(self, peer: str, reason: str) -> None:
        """Forget a peer, as when its process is gone. What was to come from it or to go to it fails."""
        self._transport.disconnect(peer)
        self._peers.pop(peer, None)
        self._mail.forget(peer)
        self._waiting.forget(peer)
        for transfer in self._open:
            if isinstance(transfer, Outbound) and peer in transfer.takers:
                transfer.lose(peer, reason)
            elif isinstance(transfer, Inbound) and any(of == peer for of, _ in transfer.tickets):
                self._stop(transfer, lost(transfer.name, f"none: {reason}", expected=f"peer {peer!r}"))

    def close(self, reason: str = "the exchange was closed") -> list[Transfer]:
        """End everything, and close the transport. Returns the transfers that were open; of the peers, nobody is told but by silence.

        A second call does nothing.
        """
        if not self._is_closed:
            self._is_closed = True
            self._transport.close()
        for transfer in self._open:
            transfer.stop(lost(transfer.name, reason), self._clock())
            transfer.step(self._clock())
        self._peers.clear()
        self._waiting.clear()
        return self._settle()

    def _serve(self, transfer: Outbound, peer: str, ask: Ask) -> None:
        """Push what was asked for, or say why not."""
        try:
            if peer not in transfer.takers:
                expected = f"one of {sorted(transfer.takers)}, which have not asked yet"
                raise TransferError(
                    f"blocks of {ask.name!r}: taker", expected=expected, got=repr(peer), fix="name it when they are offered; it asks once"
                )
            theirs, seq = self._peers[peer], transfer.seq
            check_ask(ask, peer, transfer.num_tokens, digest_of(seq.tokens[: ask.num_tokens], seq.namespace), self._groups, theirs)
            self._push(transfer, peer, ask, ask.needed)
            transfer.takers.discard(peer)
        except KVDockError as error:
            self._mail.say(peer, Stop(ask.needed.tag, str(error)).to_bytes())
        else:
            self._serve_rest(transfer, peer, ask)

    def _serve_rest(self, transfer: Outbound, peer: str, ask: Ask) -> None:
        """Push what else is in the blocks that were asked for, or say that it is not here: it was let go, or never came."""
        if ask.rest is None:
            return
        try:
            subject, is_whole = f"ask of peer {peer!r} for {ask.name!r}: rest", not is_partly_written(self._manager, transfer.seq)
            check_held(subject, ask.rest, ask.num_tokens, self._groups, self._peers[peer], whole=is_whole)
            self._push(transfer, peer, ask, ask.rest)
            transfer.rest.add((peer, ask.rest.tag))
        except KVDockError as error:
            self._mail.say(peer, Stop(ask.rest.tag, str(error)).to_bytes())

    def _push(self, transfer: Outbound, peer: str, ask: Ask, part: Part) -> None:
        seq, theirs = self._holding(transfer, ask.num_tokens), self._peers[peer]
        tables = [seq.block_table(group) for group in range(len(self._layout.groups))]
        runs = spans(self._layout, theirs, tables, [np.array(table, dtype=np.int64) for table in ask.tables], part.wanted)
        transfer.tickets[peer, part.tag] = ticket_of(self._transport, self._transport.push(peer, runs, part.tag, part.note))

    def _holding(self, transfer: Outbound, num_tokens: int) -> CacheSequence:
        """Return what holds the blocks of so many tokens until the transfer is over: a fork, where the sequence has let go of some.

        The block table of a longer one has block 0 in their place, with what is somebody else's.
        """
        if holds_needed(self._manager, transfer.seq, num_tokens):
            return transfer.seq
        if num_tokens not in transfer.forks:
            transfer.forks[num_tokens] = self._manager.fork(transfer.seq, num_tokens)
        return transfer.forks[num_tokens]

    def _offered(self, name: str) -> Outbound | None:
        found = (each for each in self._open if isinstance(each, Outbound) and each.name == name and each.stopped_at is None)
        return next(found, None)

    def _stopped(self, peer: str, said: Stop) -> None:
        self._waiting.stop(peer, said.tag)
        for transfer in self._open:
            ticket: Ticket | None = transfer.tickets.get((peer, said.tag))
            if ticket is not None and (peer, said.tag) in transfer.rest:
                ticket.cancel(said.reason)
            elif ticket is not None and isinstance(transfer, Inbound):
                self._stop(transfer, lost(transfer.name, said.reason, expected=f"peer {peer!r} to send them"))
            elif ticket is not None:
                ticket.cancel(f"the peer stopped it: {said.reason}")

    def _give_up(self, transfer: Transfer, peer: str, error: TransferError) -> None:
        """End what a peer has to do with a transfer: of blocks that are to come all, of those that others ask for only its own."""
        if isinstance(transfer, Inbound):
            self._stop(transfer, error)
            return
        for (of, tag), ticket in transfer.tickets.items():
            if of == peer and ticket.poll() is TicketState.PENDING:
                ticket.cancel(str(error))
                self._mail.say(peer, Stop(tag, str(error)).to_bytes())

    def _stop(self, transfer: Transfer, error: TransferError) -> None:
        is_first = transfer.stopped_at is None
        transfer.stop(error, self._clock())
        if is_first:
            self._tell(transfer)

    def _tell(self, transfer: Transfer) -> None:
        """Tell all peers of a transfer that it is over; those that are done with it do not mind."""
        for peer, tag in transfer.tickets:
            if peer in self._peers:
                self._mail.say(peer, Stop(tag, str(transfer.error)).to_bytes())

    def _settle(self) -> list[Transfer]:
        """Give back what is over."""
        ended = [transfer for transfer in self._open if transfer.is_over]
        self._open = [transfer for transfer in self._open if not transfer.is_over]
        for transfer in ended:
            for fork in transfer.forks.values() if isinstance(transfer, Outbound) else ():
                self._manager.finish(fork)
            if not transfer.seq.is_open:  # somebody ended it all the same, and has its blocks
                transfer.error = transfer.error or lost(transfer.name, "a sequence that was ended meanwhile")
            elif isinstance(transfer, Outbound):
                self._manager.finish(transfer.seq)
            elif isinstance(transfer, Inbound) and transfer.error is None:
                self._commit(transfer)
            else:
                self._manager.abort(transfer.seq)
        return ended

    def _commit(self, transfer: Inbound) -> None:
        """Let a sequence go on with what came. Where layers let tokens go, nobody may find a block of which only a part came."""
        seq, count = transfer.seq, transfer.num_tokens
        if count > seq.computed:
            note_only_needed(self._manager, seq, count)
            if not transfer.is_whole:
                note_partly_written(self._manager, seq, count)
        self._manager.commit(seq, [], computed=max(count, seq.computed))

    def _known(self, peer: str) -> PoolLayout:
        if peer not in self._peers:
            known = ", ".join(map(repr, self._peers)) or "none"
            raise TransferError(f"peer {peer!r}", expected=f"one that is connected: {known}", got="another", fix="connect it first")
        return self._peers[peer]
