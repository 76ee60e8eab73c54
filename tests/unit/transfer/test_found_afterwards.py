"""What came from a peer is found by prompts that come later: whole blocks with what they must hold, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import kvdock
from kvdock.errors import ArgumentValueError, IndexRangeError
from support_files import KINDS, cached, check_sequence, compute
from support_transfer import Clock, Rank, relay

WHOLE: dict[str, Callable[[int], int]] = {
    "equal": lambda count: count // 4 * 4,
    "chunks": lambda count: count // 4 * 4,  # a chunk begins with a block
    "only windows": lambda count: count * (count % 4 == 0),  # else the window of 9 begins within a block, of which a part comes
    "windows": lambda count: count * (count % 12 == 0),  # as many tokens are a block of the full layer
    "sinks": lambda count: 0,  # three sinks are never a block
}


def received(kind: str, count: int) -> tuple[Rank, kvdock.scheduler.CacheSequence]:
    """Return a rank, and a sequence of 0, 1, ... that came to it."""
    clock, spec = Clock(), kvdock.KVSpec(KINDS[kind], max_positions=4096, dtype=torch.float16)
    owner, asker = (Rank(name, spec, clock, num_blocks=60) for name in "pd")
    owner.meet(asker)
    owner.exchange.offer("r", compute(owner.cache, owner.manager, list(range(count)), finish=False), ["d"])
    transfer = asker.exchange.ask("r", asker.manager.begin(list(range(count))), ["p"])
    relay(owner, asker)
    owner.loop.move()
    relay(owner, asker)
    assert transfer.error is None
    return asker, transfer.seq


@pytest.mark.parametrize("kind", WHOLE)
def test_a_block_of_which_a_part_came_is_found_by_nobody(kind: str) -> None:
    for count in (16, 17, 19, 21, 24, 25):
        prompt, (asker, seq) = list(range(count)), received(kind, count)
        check_sequence(asker.cache, seq, prompt, count)
        asker.manager.finish(seq)
        assert cached(asker.cache, asker.manager, prompt) == WHOLE[kind](count)
        for stop in range(1, count):  # one that parts anywhere
            other = [*prompt[:stop], 99]
            one = asker.manager.begin(other)
            check_sequence(asker.cache, one, other, one.cached_len)
            asker.manager.abort(one)
        asker.check()


def test_what_came_in_part_cannot_be_cut_or_offered_with_fewer_tokens() -> None:
    """The window of a token before the end begins with one that did not come, in a block that is there."""
    asker, seq = received("only windows", 25)
    assert seq.shortest == 25
    text = r"expected at least 25: what was before is let go, came in part, or is in a state, got 24\. Fix: "
    for call in (asker.manager.truncate, asker.manager.fork):
        with pytest.raises(IndexRangeError, match=text):
            call(seq, 24)
    with pytest.raises(ArgumentValueError, match="expected 25 to 25 tokens, which are computed and kept, got 24"):
        asker.exchange.offer("again", seq, [], num_tokens=24)
    fork = asker.manager.fork(seq, 25)
    with pytest.raises(IndexRangeError, match=text):
        asker.manager.truncate(fork, 24)
    for each in (seq, fork):
        asker.manager.truncate(each, 0)
        asker.manager.finish(each)
    asker.check()


def test_whole_blocks_that_came_can_be_cut() -> None:
    asker, seq = received("equal", 25)
    assert seq.shortest == 0
    asker.manager.truncate(seq, 7)
    check_sequence(asker.cache, seq, list(range(25)), 7)
    asker.manager.finish(seq)
    asker.check()
