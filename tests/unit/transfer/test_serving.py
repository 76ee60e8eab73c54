"""What a sequence needs of each layer group, and which asks can be served."""

from __future__ import annotations

import attrs
import pytest
import torch

import kvdock
from kvdock.errors import TransferError
from kvdock.layers import Buffer, StateLayerSpec
from kvdock.transfer import spans
from kvdock.transfer.messages import Ask, Part
from kvdock.transfer.serving import check_ask, needed_bytes, nominal_tables, rest_of_blocks, wanted_tokens
from support_transfer import Side

HEADS = kvdock.LayerSpec(4, 4, 4, 4)
SPEC = kvdock.KVSpec((HEADS, attrs.evolve(HEADS, window=5, sinks=2)), 4096, torch.bfloat16)
STATES = kvdock.KVSpec((HEADS, StateLayerSpec([Buffer("s", (64,), torch.float32)])), 4096, torch.bfloat16)


@pytest.mark.parametrize(
    ("start", "stop", "whole", "window"),
    [
        (0, 12, [(0, 12)], [(0, 2), (8, 12)]),
        (1, 12, [(1, 12)], [(1, 2), (8, 12)]),
        (9, 12, [(9, 12)], [(9, 12)]),
        (0, 3, [(0, 3)], [(0, 3)]),
        (4, 5, [(4, 5)], [(4, 5)]),
        (12, 12, [], []),
    ],
)
def test_what_later_tokens_need(start: int, stop: int, whole: list[tuple[int, int]], window: list[tuple[int, int]]) -> None:
    groups = Side.make(SPEC, 1, 12, num_blocks=20).caches[0].groups
    assert [list(each) for each in wanted_tokens(groups, start, stop)] == [whole, window]


@pytest.mark.parametrize(
    ("start", "stop", "rest"),
    [
        (0, 12, [(2, 4)]),  # two sinks, and a window from 8 on, which a block begins with
        (0, 14, [(2, 4), (8, 10)]),
        (0, 10, [(2, 6)]),  # one stretch of blocks: sinks and window are in blocks that touch
        (9, 14, [(9, 10)]),  # what is before was there
        (3, 14, [(3, 4), (8, 10)]),
        (0, 3, []),
        (14, 14, []),
    ],
)
def test_what_is_beside_it_in_its_blocks(start: int, stop: int, rest: list[tuple[int, int]]) -> None:
    groups = Side.make(SPEC, 1, 14, num_blocks=20).caches[0].groups
    assert [group.block_size for group in groups] == [4, 4]
    assert [list(each) for each in rest_of_blocks(groups, start, stop)] == [[], rest]


def test_a_state_has_no_rest() -> None:
    assert rest_of_blocks(Side.make(STATES, 1, 12, num_blocks=20).caches[0].groups, 0, 11) == [(), ()]


def test_a_state_is_wanted_whole() -> None:
    groups = Side.make(STATES, 1, 12, num_blocks=20).caches[0].groups
    wanted = wanted_tokens(groups, 7, 9)
    assert {group.retention.is_state: list(tokens) for group, tokens in zip(groups, wanted, strict=True)} == {
        False: [(7, 9)],
        True: [(0, 1)],
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_that_are_needed_are_those_that_all_owners_send(ranks: int) -> None:
    """Tables that stand for a peer's, and its real ones, write the same bytes of the target."""
    source, target = Side.make(SPEC, ranks, 12, 1, num_blocks=20), Side.make(SPEC, 2, 12, 2, num_blocks=20)
    wanted = wanted_tokens(target.caches[0].groups, 3, 12)
    for layout in target.layouts:
        total = 0
        for of in source.layouts:
            known = spans(of, layout, source.tables, target.tables, wanted)
            nominal = spans(of, layout, nominal_tables(of, 12), target.tables, wanted)
            written = [
                {(region, at) for region, begin, size in zip(*map(list, parts), strict=True) for at in range(begin, begin + size)}
                for parts in ((each.target_region, each.target, each.nbytes) for each in (known, nominal))
            ]
            assert written[0] == written[1]
            total += nominal.total
        assert total == needed_bytes(layout, wanted) > 0


def ask(num_tokens: int = 12, **changes: object) -> Ask:
    """Return an ask for all that is needed of 12 tokens."""
    groups = Side.make(SPEC, 1, 12, num_blocks=20).caches[0].groups
    needed = Part(1, tuple(wanted_tokens(groups, 0, num_tokens)))
    return attrs.evolve(Ask("r", num_tokens, "same", ((0,), (1,)), needed), **changes)


def test_an_ask_for_less_than_is_offered_is_served() -> None:
    side = Side.make(SPEC, 1, 12, num_blocks=20)
    for each in (ask(), ask(9), ask(1), ask(needed=Part(1, ((), ())))):
        check_ask(each, "d", 12, "same", side.caches[0].groups, side.layouts[0])


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (ask(13), "num_tokens: expected at most 12, which are offered, got 13"),
        (ask(digest="other"), "digest: expected the token ids that are offered, got others"),
        (ask(needed=Part(1, (((0, 12),),))), "needed: expected one for each of 2 groups, got 1"),
        (ask(needed=Part(1, (((0, 12),), ((0, 12),)))), r"needed: expected tokens that layer 1 has: \[\(0, 2\), \(8, 12\)\], got 0 to 12"),
        (ask(needed=Part(1, (((0, 12),), ((1, 3),)))), r"needed: expected tokens that layer 1 has: .*, got 1 to 3"),
        (ask(9, needed=Part(1, (((0, 12),), ()))), r"needed: expected tokens that layer 0 has: \[\(0, 9\)\], got 0 to 12"),
    ],
)
def test_an_ask_for_what_is_not_there(asked: Ask, text: str) -> None:
    """What a window has let go would come from a block that is another's by now."""
    side = Side.make(SPEC, 1, 12, num_blocks=20)
    with pytest.raises(TransferError, match=f"^ask of peer 'd' for 'r': {text}"):
        check_ask(asked, "d", 12, "same", side.caches[0].groups, side.layouts[0])


@pytest.mark.parametrize("num_tokens", [11, 13])
def test_a_state_is_of_all_tokens_or_of_others(num_tokens: int) -> None:
    side = Side.make(STATES, 1, 12, num_blocks=20)
    wanted = tuple(wanted_tokens(side.caches[0].groups, 0, num_tokens))
    asked = Ask("r", num_tokens, "same", ((0,), (1,)), Part(1, wanted))
    with pytest.raises(TransferError, match=f"num_tokens: expected 12, which are offered, got {num_tokens}"):
        check_ask(asked, "d", 12, "same", side.caches[0].groups, side.layouts[0])


@pytest.mark.parametrize("spec", [SPEC, STATES, kvdock.KVSpec((HEADS,) * 2, 64, torch.float16)], ids=["groups", "states", "one group"])
def test_the_bytes_of_regions_are_views_of_the_memory(spec: kvdock.KVSpec) -> None:
    cache = Side.make(spec, 1, 8, num_blocks=20).caches[0]
    for region, memory in zip(cache.memory_regions(), cache.region_bytes(), strict=True):
        assert (memory.data_ptr(), memory.numel(), memory.dtype) == (region.address, region.nbytes, torch.uint8)
        place = region.places[-1]
        run = place.block(1)
        memory[run.start : run.stop] = 7
        assert (cache.buffers(place.layer)[place.name][1].contiguous().view(torch.uint8) == 7).all()
