"""What came from a peer is found by prompts that come later: whole blocks with what they must hold, and nothing else."""

from __future__ import annotations

import pytest
import torch

import kvdock
from kvdock.errors import ArgumentValueError, IndexRangeError
from kvdock.transfer import Exchange, TicketState
from support_files import KINDS, cached, check_sequence, compute
from support_transfer import Clock, Loop, Rank, relay

LETS_GO = ["only windows", "windows", "sinks", "chunks"]
COUNTS = (16, 17, 19, 21, 24, 25, 28)


def rank_of(kind: str, name: str, block_size: int = 4, num_blocks: int = 60) -> Rank:
    """Return a rank whose layers let go of tokens in some way."""
    spec = kvdock.KVSpec(KINDS[kind], max_positions=4096, dtype=torch.float16)
    return Rank(name, spec, Clock(), num_blocks=num_blocks, block_size=block_size)


def plain(rank: Rank) -> Rank:
    """Give a rank a manager that keeps all tokens, whatever its layers need."""
    rank.manager = kvdock.CacheManager(rank.cache.num_blocks, rank.cache.block_size)
    rank.loop, rank.free = Loop(rank.name), rank.manager.available_size
    rank.exchange = Exchange(rank.manager, rank.cache, rank.loop, model="m")
    return rank


def moved(owner: Rank, asker: Rank, seq: kvdock.scheduler.CacheSequence, count: int | None = None) -> kvdock.transfer.Inbound:
    """Move the first ``count`` tokens of a sequence 0, 1, ... to another rank, and return what became of it there."""
    if not asker.exchange.peers:
        owner.meet(asker)
    offered = owner.exchange.offer("r", seq, [asker.name])
    wanted = asker.manager.begin(list(range(count or seq.num_tokens)))
    transfer = asker.exchange.ask("r", wanted, [owner.name])
    relay(owner, asker)
    owner.loop.move()
    ended = relay(owner, asker)
    assert (offered in ended) == (transfer.error is None), "it is finished when all have it"
    return transfer


def received(kind: str, count: int, *, block_size: int = 4) -> tuple[Rank, kvdock.scheduler.CacheSequence]:
    """Return a rank with blocks of some size, and a sequence that came to it from one with blocks of 4."""
    owner, asker = rank_of(kind, "p"), rank_of(kind, "d", block_size)
    transfer = moved(owner, asker, compute(owner.cache, owner.manager, list(range(count)), finish=False))
    assert transfer.error is None
    owner.check()
    return asker, transfer.seq


def in_blocks(rank: Rank, count: int) -> list[set[int]]:
    """Return of each group the tokens in all blocks that are needed behind ``count`` tokens."""
    sizes, rules = zip(*((group.block_size, group.retention) for group in rank.cache.groups), strict=True)
    ranges = [rule.blocks(count, size) for rule, size in zip(rules, sizes, strict=True)]
    return [
        {token for part in parts for token in range(part.start * size, min(part.stop * size, count))}
        for parts, size in zip(ranges, sizes, strict=True)
    ]


def all_within(some: list[set[int]], others: list[set[int]]) -> bool:
    return all(one <= other for one, other in zip(some, others, strict=True))


def longest(rank: Rank, count: int) -> int:
    """Return behind how many tokens of a sequence a prompt can go on, if all blocks are there that are needed behind ``count``."""
    there, unit = in_blocks(rank, count), rank.manager.block_size
    return max((n for n in range(unit, count + 1, unit) if all_within(in_blocks(rank, n), there)), default=0)


def check_others(rank: Rank, count: int) -> None:
    """Begin prompts that part from 0, 1, ... anywhere: what they find is right."""
    for stop in range(1, count):
        other = [*range(stop), 99]
        one = rank.manager.begin(other)
        check_sequence(rank.cache, one, other, one.cached_len)
        rank.manager.abort(one)
    rank.check()


@pytest.mark.parametrize("kind", ["equal", *LETS_GO])
def test_whole_blocks_are_found_though_a_window_begins_within_one(kind: str) -> None:
    hits = []
    for count in COUNTS:
        prompt, (asker, seq) = list(range(count)), received(kind, count)
        check_sequence(asker.cache, seq, prompt, count)
        asker.manager.finish(seq)
        hits.append(cached(asker.cache, asker.manager, prompt))
        assert hits[-1] == longest(asker, count)
        check_others(asker, count)
    assert len({*hits} - {0}) > 0, "some are found"


@pytest.mark.parametrize("kind", LETS_GO)
def test_a_block_whose_beginning_its_owner_has_not_is_found_by_nobody(kind: str) -> None:
    """An owner of smaller blocks has let go of it, and one to which a part came never had it: they say so, and send what is needed."""
    lacked = 0
    for count in COUNTS:
        prompt, (second, seq) = list(range(count)), received(kind, count, block_size=8)
        is_whole = all_within(in_blocks(second, count), in_blocks(rank_of(kind, "p"), count))
        third = rank_of(kind, "e", 8)
        transfer = moved(second, third, seq)
        assert transfer.error is None
        assert transfer.is_whole == is_whole
        check_sequence(third.cache, transfer.seq, prompt, count)
        third.manager.finish(transfer.seq)
        for rank in (second, third):
            assert cached(rank.cache, rank.manager, prompt) == (longest(rank, count) if is_whole else 0)
            check_others(rank, count)
        lacked += not is_whole
    assert (lacked > 0) == (kind != "chunks"), "a chunk begins with a block"


@pytest.mark.parametrize("kind", LETS_GO)
def test_fewer_tokens_than_are_offered_come_from_blocks_that_were_let_go_and_are_there_still(kind: str) -> None:
    """Block tables have block 0 in their place, which is somebody else's."""
    for offered, count in ((25, 24), (28, 27), (28, 25), (29, 28), (40, 20), (41, 40), (41, 33)):
        owner, asker = rank_of(kind, "p"), rank_of(kind, "d")
        transfer = moved(owner, asker, compute(owner.cache, owner.manager, list(range(offered)), finish=False), count)
        assert transfer.error is None
        check_sequence(asker.cache, transfer.seq, list(range(count)), count)
        asker.manager.finish(transfer.seq)
        assert cached(asker.cache, asker.manager, list(range(count))) == longest(asker, count)
        check_others(asker, count)
        owner.check()


def test_fewer_tokens_whose_blocks_are_gone_are_refused_by_name() -> None:
    owner, asker = rank_of("only windows", "p", num_blocks=14), rank_of("only windows", "d")
    seq = compute(owner.cache, owner.manager, list(range(28)), finish=False)
    other = owner.manager.begin([7] * owner.manager.available_size)  # takes all blocks that nobody holds
    transfer = moved(owner, asker, seq, 27)
    text = r"expected peer 'p' to send them, got CacheManager\.fork: num_tokens: expected at least 28: what was before is let go, came in"
    with pytest.raises(kvdock.errors.TransferError, match=text):
        raise transfer.error or AssertionError
    asker.check()
    owner.exchange.cancel(owner.exchange._open[0], "nobody takes it")
    relay(owner)
    owner.manager.finish(other)
    owner.check()


def test_what_is_offered_is_held_though_the_sequence_has_let_go_of_it() -> None:
    owner, asker = rank_of("only windows", "p", num_blocks=14), rank_of("only windows", "d")
    owner.meet(asker)
    owner.exchange.offer("r", compute(owner.cache, owner.manager, list(range(28)), finish=False), ["d"], num_tokens=27)
    other = owner.manager.begin([7] * owner.manager.available_size)  # takes all blocks that nobody holds
    transfer = asker.exchange.ask("r", asker.manager.begin(list(range(27))), ["p"])
    relay(owner, asker)
    owner.loop.move()
    relay(owner, asker)
    assert transfer.error is None
    check_sequence(asker.cache, transfer.seq, list(range(27)), 27)
    owner.manager.finish(other)
    owner.check()


def test_a_rest_that_fails_on_its_way_fails_nothing_else() -> None:
    owner, asker = rank_of("only windows", "p"), rank_of("only windows", "d")
    owner.meet(asker)
    offered = owner.exchange.offer("r", compute(owner.cache, owner.manager, list(range(25)), finish=False), ["d"])
    transfer = asker.exchange.ask("r", asker.manager.begin(list(range(25))), ["p"])
    relay(owner, asker)
    assert {len(owner.loop.pushed), len(asker.loop.expected)} == {2}
    (rest,) = transfer.rest
    assert rest in asker.loop.expected
    assert (asker.loop.expected[rest].runs.total, transfer.tickets[rest].poll()) == (2 * 2 * 2 * 8 * 2, TicketState.PENDING)
    for ticket in (asker.loop.expected[rest], owner.loop.pushed["d", rest[1]]):
        ticket.fail("a cable broke")
    assert relay(owner, asker) == [], "what is needed is still to come"
    owner.loop.move()
    assert {*relay(owner, asker)} == {offered, transfer}
    assert (offered.error, transfer.error, transfer.seq.shortest) == (None, None, 25)
    check_sequence(asker.cache, transfer.seq, list(range(25)), 25)
    asker.manager.finish(transfer.seq)
    assert cached(asker.cache, asker.manager, list(range(25))) == 0
    asker.check()
    owner.check()


def test_managers_that_keep_all_ask_for_all() -> None:
    """What they show to other prompts is every block, so that every token must come; an owner that has let go of some says so."""
    whole, other, passing = plain(rank_of("only windows", "p")), plain(rank_of("only windows", "d")), rank_of("only windows", "e")
    prompt = list(range(25))
    transfer = moved(whole, other, compute(whole.cache, whole.manager, prompt, finish=False))
    assert transfer.error is None
    other.manager.finish(transfer.seq)
    assert cached(other.cache, other.manager, prompt) == 24
    check_others(other, 25)
    refused = moved(passing, plain(rank_of("only windows", "f")), compute(passing.cache, passing.manager, prompt, finish=False))
    assert "ask of peer 'f' for 'r': needed: expected tokens that layer 0 has: [(17, 25)], got 0 to 25" in str(refused.error)


def test_what_came_in_part_cannot_be_cut_or_offered_with_fewer_tokens() -> None:
    """The window of a token before the end begins with one that did not come, in a block that is there."""
    asker, seq = received("only windows", 29, block_size=8)  # from token 21 on, and 20 with the rest of its owner's block
    assert seq.shortest == 29
    text = r"expected at least 29: what was before is let go, came in part, or is in a state, got 28\. Fix: "
    for call in (asker.manager.truncate, asker.manager.fork):
        with pytest.raises(IndexRangeError, match=text):
            call(seq, 28)
    with pytest.raises(ArgumentValueError, match="expected 29 to 29 tokens, which are computed and kept, got 28"):
        asker.exchange.offer("again", seq, [], num_tokens=28)
    other = rank_of("only windows", "e", 8)
    assert "CacheManager.fork: num_tokens: expected at least 29" in str(moved(asker, other, asker.manager.fork(seq, 29), 28).error)
    fork = asker.manager.fork(seq, 29)
    with pytest.raises(IndexRangeError, match=text):
        asker.manager.truncate(fork, 28)
    asker.exchange.close()
    for each in (seq, fork):
        asker.manager.truncate(each, 0)
        asker.manager.finish(each)
    asker.check()


def test_whole_blocks_that_came_can_be_cut() -> None:
    for kind, shortest in (("equal", 0), ("only windows", 24)):
        asker, seq = received(kind, 25)
        assert seq.shortest == shortest
        asker.manager.truncate(seq, max(shortest, 7))
        check_sequence(asker.cache, seq, list(range(25)), max(shortest, 7))
        asker.manager.finish(seq)
        asker.check()
