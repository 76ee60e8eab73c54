"""Ranks that hold every n-th block each find together what one process finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdock
from kvdock.distributed import ContextShare, gather_heads, merge_over_ranks
from support_shares import DIM, HEADS, Shared


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_step_of_decoding(size: int) -> None:
    ranks = Shared(size, 4)
    sequences = ranks.begin(1, 4, 4 * size, 4 * size + 1, 37)
    table, lens = ranks.tables(sequences)
    ranks.compare(ranks.draw(5, 2 * HEADS, DIM), table, lens)
    for _ in range(5):
        slots = torch.empty(5, dtype=torch.int64).numpy()
        ranks.manager.extend(sequences, 1, slots=slots)
        ranks.write(torch.from_numpy(slots))
        table, lens = ranks.tables(sequences)
        ranks.compare(ranks.draw(5, HEADS, DIM), table, lens)


@given(st.integers(1, 4), st.integers(1, 5), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), min_size=1, max_size=4), st.data())
@settings(max_examples=10, deadline=None)
def test_chunks_of_prompts(size: int, block: int, rows: list[tuple[int, int]], data: st.DataObject) -> None:
    """Each row: its queries, and the tokens before them."""
    ranks = Shared(size, block)
    longest = 12 * size * block
    rows = [(queries, min(before, longest - queries)) for queries, before in rows if queries <= longest]
    queries = [count for count, _ in rows]
    sequences = [ranks.begin(count + before)[0] if count + before else ranks.manager.open_empty() for count, before in rows]
    table, lens = ranks.tables(sequences) if sequences else (torch.zeros(0, 12, dtype=torch.int32), torch.zeros(0, dtype=torch.int64))
    cu = torch.tensor([0, *torch.tensor(queries or [0]).cumsum(0).tolist()][: len(rows) + 1])
    options: dict[str, Any] = {
        "causal": data.draw(st.booleans()),
        "window": data.draw(st.none() | st.integers(1, 12)),
        "softcap": data.draw(st.none() | st.just(2.0)),
        "sinks": ranks.draw(2 * HEADS) if data.draw(st.booleans()) else None,
        "starts": torch.tensor([data.draw(st.integers(0, int(each))) for each in lens]) if data.draw(st.booleans()) else None,
    }
    ranks.compare(ranks.draw(sum(queries), 2 * HEADS, DIM), table, lens, cu_query_lens=cu, **options)


def test_padding_and_queries_of_no_sequence_see_nothing() -> None:
    ranks = Shared(2, 2)
    table, lens = ranks.tables(ranks.begin(7))
    table, lens = torch.cat([table, table * 0 - 1]), torch.cat([lens, lens * 0])
    q = ranks.draw(2, HEADS, DIM)
    ranks.compare(q, table, lens)
    parts = [share.attend(q, *pool, table, lens) for share, pool in zip(ranks.shares, ranks.parts, strict=True)]
    out, lse = kvdock.ops.merge_attention(parts)
    assert not out[1].any()
    assert torch.isneginf(lse[1]).all()


def test_a_share_in_numbers() -> None:
    share = ContextShare(3, 1)
    counts = torch.tensor([0, 1, 4, 5, 8, 9, 12, 17, 24])
    assert share.tokens(counts, 4).tolist() == [0, 0, 0, 1, 4, 4, 4, 5, 8]
    sums = sum(ContextShare(3, index).tokens(counts, 4) for index in range(3))
    assert torch.equal(sums, counts)
    slots = torch.tensor([[-1, 0, 4], [7, 12, 18]], dtype=torch.int32)
    assert share.slots(slots, 4).tolist() == [[-1, -1, 0], [3, -1, 6]]
    assert share.slots(slots, 4).dtype == torch.int32
    owners = [ContextShare(3, index).slots(torch.arange(48), 4) for index in range(3)]
    held = torch.stack(owners) >= 0
    assert (held.sum(0) == 1).all(), "each token is with one rank"
    assert [sorted(each[each >= 0].tolist()) for each in owners] == [list(range(16))] * 3, "and each place of a pool is one token's"


@pytest.mark.parametrize(
    ("ranks", "heads", "shares"),
    [
        (1, 1, [(1, 0)]),
        (2, 4, [(1, 0), (1, 0)]),
        (4, 4, [(1, 0)] * 4),
        (4, 1, [(4, 0), (4, 1), (4, 2), (4, 3)]),
        (4, 2, [(2, 0), (2, 1), (2, 0), (2, 1)]),
    ],
)
def test_where_ranks_outnumber_heads(ranks: int, heads: int, shares: list[tuple[int, int]]) -> None:
    found = [ContextShare.of(kvdock.RankInfo("cpu", ranks, rank), heads) for rank in range(ranks)]
    assert found == [ContextShare(*each) for each in shares]
    for rank, share in enumerate(found):
        head = kvdock.RankInfo("cpu", ranks, rank).head_range(heads)
        same = [other for other in range(ranks) if kvdock.RankInfo("cpu", ranks, other).head_range(heads) == head]
        assert same.index(rank) == share.index
        assert len(same) == share.size


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ContextShare(0, 0), kvdock.ArgumentValueError, "ContextShare: size: expected at least 1"),
        (lambda: ContextShare(2, 2), kvdock.ArgumentValueError, r"index: expected less than size = 2, got 2. Fix: count from 0"),
        (lambda: ContextShare(2, True), kvdock.ArgumentTypeError, "index"),
        (lambda: ContextShare(2, -1), kvdock.ArgumentValueError, "index"),
        (
            lambda: ContextShare(2, 0).slots(torch.zeros(1, dtype=torch.int32), 2**40),
            kvdock.ArgumentValueError,
            "block_size: expected at most",
        ),
        (lambda: gather_heads([1]), kvdock.ArgumentTypeError, r"gather_heads: q: expected a torch.Tensor, got list\. Fix: convert it"),
        (lambda: gather_heads(torch.zeros(2)), kvdock.ArgumentValueError, r"gather_heads: q: expected 3 dimensions, got shape \[2\]\. Fix"),
        (lambda: merge_over_ranks(torch.zeros(1, 2, 4), [1]), kvdock.ArgumentTypeError, "merge_over_ranks: lse: expected a torch.Tensor"),
        (lambda: merge_over_ranks(torch.zeros(1), torch.zeros(1)), kvdock.ArgumentValueError, "merge_over_ranks: out: expected 3 dim"),
        (lambda: ContextShare.of(kvdock.RankInfo("cpu", 3, 0), 2), kvdock.ArgumentValueError, "num_kv_heads = 2 on tp_size = 3"),
    ],
)
def test_errors(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_wrong_tables_are_refused_as_by_the_op() -> None:
    ranks = Shared(2, 2)
    table, lens = ranks.tables(ranks.begin(7))
    with pytest.raises(kvdock.ArgumentValueError, match="paged_attention"):
        ranks.shares[0].attend(ranks.draw(1, HEADS, DIM + 1), *ranks.parts[0], table, lens)
    with pytest.raises(kvdock.IndexRangeError, match="block_table"):
        ranks.shares[0].attend(ranks.draw(1, HEADS, DIM), *ranks.parts[0], table + 64, lens)


def test_a_group_of_one(alone: None) -> None:
    ranks = Shared(1, 4)
    table, lens = ranks.tables(ranks.begin(9, 3))
    q = ranks.draw(2, 3 * HEADS, DIM)
    assert torch.equal(gather_heads(q.transpose(0, 1).contiguous().transpose(0, 1)), q)
    found = merge_over_ranks(*ranks.shares[0].attend(q, *ranks.parts[0], table, lens))
    expected = kvdock.ops.paged_attention(q, *ranks.whole, table, lens, return_lse=True)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    assert dist.get_world_size() == 1
