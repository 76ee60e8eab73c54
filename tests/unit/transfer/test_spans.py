"""Which bytes go where: contents compared bit for bit with a slow reference, and that runs are as long as can be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import kvdock
from kvdock import HeadLayout, KVCacheLayout
from kvdock.errors import IndexRangeError
from kvdock.layers import Buffer, ChunkedLayerSpec, HybridLayerSpec, OpaqueLayerSpec, SharedLayerSpec, StateLayerSpec
from kvdock.transfer import Spans, check_compatible, spans
from support_transfer import Side, expected_after, moved, wanted_of

BF16 = torch.bfloat16
HEADS = kvdock.KVSpec((kvdock.LayerSpec(4, 4, 2, 2), kvdock.LayerSpec(4, 2, 3, 5)), 64, BF16)
FEW = kvdock.KVSpec((kvdock.LayerSpec(2, 4, 2, 3), SharedLayerSpec(0)), 64, torch.float32)
LATENTS = kvdock.KVSpec((kvdock.MLALayerSpec(5, 2),) * 2, 64, BF16)
MIXED = kvdock.KVSpec(
    (
        kvdock.LayerSpec(4, 4, 4, 4),
        kvdock.LayerSpec(4, 4, 4, 4, window=6, sinks=1),
        ChunkedLayerSpec(4, 4, 4, 4, 8),
        kvdock.MLALayerSpec(20, 4),
        OpaqueLayerSpec(48),
    ),
    4096,
    BF16,
)
STATE = StateLayerSpec([Buffer("conv", (3, 5), BF16), Buffer("recurrent", (24,), torch.float32)])
STATES = kvdock.KVSpec((HybridLayerSpec([kvdock.LayerSpec(4, 4, 4, 4), STATE]), STATE), 64, BF16)
ORDERS = list(itertools.product(KVCacheLayout, HeadLayout))
SIZES = list(itertools.product([1, 2, 4, 8], repeat=2))


def compare(source: Side, target: Side, start: int, stop: int) -> list[list[Spans]]:
    """Move tokens to every rank of the target, compare every byte of its memory, and return the spans."""
    found = []
    for rank, layout in enumerate(target.layouts):
        for other in source.layouts:
            check_compatible("p", layout, other)
        wanted = wanted_of(layout, start, stop)
        after, runs = moved(source, target, rank, wanted)
        for got, expected in zip(after, expected_after(source, target, rank, wanted), strict=True):
            assert np.array_equal(got, expected)
        assert sum(each.total for each in runs) == sum(
            place.itemsize * int(np.prod(place.shape)) * sum(stop - start for start, stop in wanted[place.group]) for place in layout.places
        ), "whole: every rank's own bytes come, from whichever ranks have them"
        found.append(runs)
    return found


@pytest.mark.parametrize(("ranks", "others"), SIZES)
def test_heads_are_resharded_and_replicated_ones_come_once(ranks: int, others: int) -> None:
    source, target = (Side.make(FEW, size, 7, seed) for seed, size in enumerate((ranks, others)))
    source.fill(3)
    runs = compare(source, target, 0, 7)
    for rank, of in enumerate(runs):
        if ranks == others:
            assert [number for number, each in enumerate(of) if len(each)] == [rank], "equal ranks talk one to one"


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "others"), SIZES)
@pytest.mark.parametrize("spec", [HEADS, LATENTS], ids=["heads", "latents"])
def test_every_order_in_memory_and_size_of_blocks(spec: kvdock.KVSpec, ranks: int, others: int) -> None:
    orders = ORDERS if spec is HEADS else [(order, HeadLayout.NHD) for order in KVCacheLayout]
    for (number, first), (other, second) in itertools.product(enumerate(orders), repeat=2):
        for size, by in ((4, 4), (4, 8), (6, 4), (1, 3)):
            source = Side.make(spec, ranks, 9, number, block_size=size, layout=first[0], head_layout=first[1])
            target = Side.make(spec, others, 9, 9 + other, block_size=by, layout=second[0], head_layout=second[1], alignment=64)
            source.fill(1)
            compare(source, target, *((0, 9) if size == 4 else (3, 8)))


@pytest.mark.parametrize(("first", "second"), list(itertools.product(ORDERS, repeat=2)))
def test_orders_in_memory(first: tuple[KVCacheLayout, HeadLayout], second: tuple[KVCacheLayout, HeadLayout]) -> None:
    source = Side.make(HEADS, 1, 7, 1, block_size=4, layout=first[0], head_layout=first[1])
    target = Side.make(HEADS, 2, 7, 2, block_size=3, layout=second[0], head_layout=second[1])
    source.fill(1)
    compare(source, target, 1, 7)


@pytest.mark.parametrize(("ranks", "others"), [(1, 1), (1, 2), (2, 1), (4, 2), (2, 8)])
@pytest.mark.parametrize("keep_all", [False, True], ids=["groups", "one group there"])
def test_layer_groups_whose_blocks_differ(ranks: int, others: int, *, keep_all: bool) -> None:
    source = Side.make(MIXED, ranks, 9, 1, num_blocks=40, keep_all=keep_all)
    target = Side.make(MIXED, others, 9, 2, num_blocks=40, head_layout=HeadLayout.HND)
    assert len(target.layouts[0].groups) == 3
    source.fill(1)
    compare(source, target, 2, 9)


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_go_from_rank_to_rank(ranks: int) -> None:
    source, target = (Side.make(STATES, ranks, 9, seed, num_blocks=20) for seed in (1, 2))
    compare(source, target, 0, 9)


def test_what_was_held_on_several_ranks_is_whole_on_one() -> None:
    """The reference reads the source through its views; this one compares with what the model wrote."""
    source, target, one = (Side.make(HEADS, size, 9, seed) for seed, size in enumerate((4, 1, 1)))
    source.fill(5)
    target.fill(5)
    after, _ = moved(source, Side(one.caches, one.layouts, target.tables), 0, wanted_of(one.layouts[0], 0, 9))
    for region, memory in zip(after, one.bytes(0), strict=True):
        memory[:] = region
    for layer, name in itertools.product(range(2), "kv"):
        seen = [cache.buffers(layer)[name].view(torch.int16) for cache in (one.caches[0], target.caches[0])]
        for token in range(9):
            at = target.tables[0][token // 4], token % 4
            assert torch.equal(seen[0][at], seen[1][at])


def longest(runs: Spans) -> bool:
    """Whether no two neighbours touch on both sides."""
    ends = runs.source + runs.nbytes, runs.target + runs.nbytes
    same = (runs.source_region[1:] == runs.source_region[:-1]) & (runs.target_region[1:] == runs.target_region[:-1])
    return not (same & (ends[0][:-1] == runs.source[1:]) & (ends[1][:-1] == runs.target[1:])).any()


def test_runs_are_as_long_as_can_be() -> None:
    spec = kvdock.KVSpec.uniform(num_layers=3, num_kv_heads=4, head_dim=8, max_positions=64, dtype=BF16)
    counts = {}
    for name, layout, heads in (("by layers", *ORDERS[0]), ("by blocks", *ORDERS[2]), ("by heads", *ORDERS[1])):
        one, two = (Side.make(spec, ranks, 32, 1, block_size=8, layout=layout, head_layout=heads) for ranks in (1, 2))
        whole = spans(one.layouts[0], one.layouts[0], [[0, 1, 2, 3]], [[4, 5, 6, 7]], [[(0, 32)]])
        half = spans(one.layouts[0], two.layouts[1], [[0, 5, 2, 7]], [[4, 5, 6, 7]], [[(0, 32)]])
        assert longest(whole)
        assert longest(half)
        counts[name] = len(whole), len(half)
    assert counts == {
        "by layers": (2 * 3, 2 * 3 * 32),  # neighbouring blocks are one run; half of the heads are one for each token
        "by blocks": (2, 2 * 3 * 32),
        "by heads": (2 * 3, 2 * 3 * 4),  # a block's neighbouring heads are one run
    }
    scattered = spans(one.layouts[0], one.layouts[0], [[3, 1, 0, 2]], [[4, 5, 6, 7]], [[(0, 32)]])
    assert len(scattered) == 2 * 3 * 4


def test_only_the_tokens_that_are_wanted() -> None:
    source, target = (Side.make(HEADS, 1, 12, seed) for seed in (1, 2))
    for wanted in ([], [(5, 5)], [(0, 1), (3, 5), (11, 12)]):
        after, runs = moved(source, target, 0, [wanted])
        for got, expected in zip(after, expected_after(source, target, 0, [wanted]), strict=True):
            assert np.array_equal(got, expected)
        assert runs[0].total == sum(stop - start for start, stop in wanted) * (4 * 2 * 2 + 4 * 3 + 2 * 5) * 2


@pytest.mark.parametrize(
    ("tables", "wanted", "message"),
    [
        (
            ([[0, 1]], [[0, 1]]),
            [[(0, 9)]],
            r"spans: source_tables\[0\]: expected at least 3 blocks of 4 for 9 tokens, got 2\. Fix: make room",
        ),
        (
            ([[0, 1, 2]], [[0, 1]]),
            [[(0, 9)]],
            r"spans: target_tables\[0\]: expected at least 3 blocks of 4 for 9 tokens, got 2\. Fix: make room",
        ),
        (([[0, 12]], [[0, 1]]), [[(0, 8)]], r"spans: source_tables\[0\]: expected blocks from 0 to 11, got 12\. Fix: pass the sequence's"),
        (([[0, 1]], [[0, -1]]), [[(0, 8)]], r"spans: target_tables\[0\]: expected blocks from 0 to 11, got -1\. Fix: pass the sequence's"),
        (([[0, 1]], [[0, 1]]), [[(0, 2**40)]], r"expected at least 274877906944 blocks of 4"),
        (([], [[0, 1]]), [[(0, 8)]], r"spans: source_tables: expected 1, one for each group, got 0\. Fix: pass one for each of `groups`"),
        (([[0, 1]], [[0, 1]]), [], r"spans: wanted: expected 1, one for each group, got 0\. Fix"),
    ],
)
def test_a_block_list_that_does_not_fit(
    tables: tuple[list[list[int]], list[list[int]]], wanted: list[list[tuple[int, int]]], message: str
) -> None:
    layout = Side.make(HEADS, 1, 8).layouts[0]
    with pytest.raises(IndexRangeError, match=message):
        spans(layout, layout, *tables, wanted)
