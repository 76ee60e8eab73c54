"""What came from a peer is found by prompts that come later: whole blocks with what they must hold, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import kvdock
from support_files import KINDS, cached, check_sequence, compute
from support_transfer import Clock, Rank, relay

WHOLE: dict[str, Callable[[int], int]] = {
    "equal": lambda count: count // 4 * 4,
    "chunks": lambda count: count // 4 * 4,  # a chunk begins with a block
    "only windows": lambda count: count * (count % 4 == 0),  # else the window of 9 begins within a block, of which a part comes
    "windows": lambda count: count * (count % 12 == 0),  # as many tokens are a block of the full layer
    "sinks": lambda count: 0,  # three sinks are never a block
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_block_of_which_a_part_came_is_found_by_nobody(kind: str) -> None:
    for count in (16, 17, 19, 21, 24, 25):
        clock, spec = Clock(), kvdock.KVSpec(KINDS[kind], max_positions=4096, dtype=torch.float16)
        owner, asker = (Rank(name, spec, clock, num_blocks=60) for name in "pd")
        owner.meet(asker)
        prompt = list(range(count))
        owner.exchange.offer("r", compute(owner.cache, owner.manager, prompt, finish=False), ["d"])
        transfer = asker.exchange.ask("r", asker.manager.begin(prompt), ["p"])
        relay(owner, asker)
        owner.loop.move()
        relay(owner, asker)
        assert transfer.error is None
        check_sequence(asker.cache, transfer.seq, prompt, count)
        asker.manager.finish(transfer.seq)
        assert cached(asker.cache, asker.manager, prompt) == WHOLE[kind](count)
        for stop in range(1, count):  # one that parts anywhere
            other = [*prompt[:stop], 99]
            seq = asker.manager.begin(other)
            check_sequence(asker.cache, seq, other, seq.cached_len)
            asker.manager.abort(seq)
        asker.check()
