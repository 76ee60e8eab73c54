"""Shares against a loop over tokens, attention over shares against one over a mask, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdock
from kvdock.distributed import ContextShare
from support_shares import DIM, HEADS, Shared
from support_slow import examples

DTYPES = (torch.int32, torch.int64)


def owner(position: int, size: int, block: int) -> int:
    return position // block % size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "block"), [(1, 1), (2, 1), (3, 2), (5, 3), (4, 16)])
def test_counts_at_every_boundary(size: int, block: int, dtype: torch.dtype) -> None:
    counts = torch.arange(3 * size * block + 2, dtype=dtype)
    for index in range(size):
        found = ContextShare(size, index).tokens(counts, block)
        assert found.dtype == dtype
        assert found.tolist() == [sum(owner(at, size, block) == index for at in range(count)) for count in counts.tolist()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(st.integers(1, 6), st.integers(1, 20), st.lists(st.integers(-3, 2000), max_size=30))
@settings(max_examples=examples(25), deadline=None)
def test_slots_go_where_a_loop_puts_them(dtype: torch.dtype, size: int, block: int, slots: list[int]) -> None:
    for index in range(size):
        expected = []
        for slot in slots:
            number, inside = divmod(slot, size * block)
            expected.append(number * block + inside % block if slot >= 0 and inside // block == index else -1)
        found = ContextShare(size, index).slots(torch.tensor(slots, dtype=dtype), block)
        assert (found.tolist(), found.dtype) == (expected, dtype)


def test_the_longest_sequences_do_not_overflow() -> None:
    most = 2**31 - 1
    found = [int(ContextShare(7, index).tokens(torch.tensor([most], dtype=torch.int32), 512)) for index in range(7)]
    assert sum(found) == most
    assert max(found) - min(found) <= 512
    assert ContextShare(2, 1).slots(torch.tensor([most], dtype=torch.int32), 512).tolist() == [(most // 1024) * 512 + 511]


@pytest.mark.parametrize(("method", "name"), [("tokens", "counts"), ("slots", "slot_mapping")])
@pytest.mark.parametrize(
    ("values", "got"),
    [
        (np.array([1]), "ndarray"),
        ([1], "list"),
        (5, "int"),
        (torch.tensor([2], dtype=torch.uint8), "torch.uint8"),
        (torch.tensor([2], dtype=torch.int16), "torch.int16"),
        (torch.tensor([2.5]), "torch.float32"),
        (torch.tensor([True]), "torch.bool"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(method: str, name: str, values: Any, got: str) -> None:
    """Bytes went below zero, and so over the top: of two tokens the second rank was said to have a whole block."""
    with pytest.raises(kvdock.ArgumentTypeError) as caught:
        getattr(ContextShare(2, 1), method)(values, 4)
    fix = "Fix: pass torch.from_numpy(...) of what a manager returns"
    assert str(caught.value) == f"ContextShare.{method}: {name}: expected an int32 or int64 tensor, got {got}. {fix}"


@pytest.mark.parametrize("method", ["tokens", "slots"])
@pytest.mark.parametrize(("block", "kind", "text"), [
    (0, kvdock.ArgumentValueError, "expected at least 1, got 0"),
    (-4, kvdock.ArgumentValueError, "expected at least 1, got -4"),
    (2.5, kvdock.ArgumentTypeError, "expected an int of at least 1, got 2.5"),
    (True, kvdock.ArgumentTypeError, "expected an int of at least 1, got True"),
    (None, kvdock.ArgumentTypeError, "expected an int of at least 1, got None"),
])  # fmt: skip
def test_a_block_size_is_one(method: str, block: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        getattr(ContextShare(2, 1), method)(torch.arange(3), block)
    assert str(caught.value) == f"ContextShare.{method}: block_size: {text}"


@given(
    size=st.integers(1, 4), block=st.integers(1, 4), before=st.integers(0, 20), queries=st.integers(1, 5), causal=st.booleans(),
    window=st.none() | st.integers(1, 30), data=st.data(),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_shares_together_are_attention_under_a_mask(
    size: int, block: int, before: int, queries: int, causal: bool, window: int | None, data: st.DataObject
) -> None:
    """Against softmax in plain torch, over keys that are gathered by the manager's slots."""
    ranks = Shared(size, block)
    length = min(before + queries, 12 * size * block)
    queries = min(queries, length)
    (seq,) = ranks.begin(length)
    table, lens = ranks.tables([seq])
    start = data.draw(st.integers(0, length))
    q = ranks.draw(queries, HEADS, DIM)
    options: dict[str, Any] = {"causal": causal, "window": window, "starts": torch.tensor([start])}
    cu = torch.tensor([0, queries])
    parts = [
        share.attend(q, *pool, table, lens, cu_query_lens=cu, **options) for share, pool in zip(ranks.shares, ranks.parts, strict=True)
    ]
    out, lse = kvdock.ops.merge_attention(parts)

    slots = torch.from_numpy(seq.slot_mapping(0, length)).long()
    k, v = (pool.flatten(0, 1)[slots] for pool in ranks.whole)
    at, keys = torch.arange(length - queries, length)[:, None], torch.arange(length)
    seen = (keys >= start) & ((keys <= at) | torch.tensor(not causal))
    if window is not None:
        seen &= keys > at - window
    scores = torch.einsum("qhd,khd->qhk", q, k) * DIM**-0.5
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1).to(lse.dtype), rtol=1e-5, atol=1e-5)
    expected = torch.einsum("qhk,khd->qhd", scores.softmax(-1).nan_to_num(), v)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no queries": ({"q": None}, kvdock.ArgumentTypeError, "q: expected a torch.Tensor, got NoneType. Fix: convert it with torch.as_tensor"),
    "no pool": ({"k_cache": torch.zeros(())}, kvdock.ArgumentValueError, "k_cache: expected 4 dimensions, got shape []"),
    "a list": ({"seq_lens": [7, 5]}, kvdock.ArgumentTypeError, "seq_lens: expected a torch.Tensor, got list. Fix: convert it with "
               "torch.as_tensor"),
    "one length": ({"seq_lens": torch.tensor(7)}, kvdock.ArgumentValueError, "seq_lens: expected 1 dimensions, got shape []"),
    "lengths missing": ({"seq_lens": torch.tensor([7])}, kvdock.ArgumentValueError, "seq_lens: expected 2 rows, for the 2 of block_table, "
                        "got shape [1]"),
    "starts missing": ({"starts": torch.tensor([0])}, kvdock.ArgumentValueError, "starts: expected 2 rows, for the 2 of block_table, got "
                       "shape [1]"),
    "starts over": ({"starts": torch.tensor([0] * 3)}, kvdock.ArgumentValueError, "starts: expected 2 rows, for the 2 of block_table, got "
                    "shape [3]"),
    "starts that are floats": ({"starts": torch.zeros(2)}, kvdock.ArgumentTypeError, "starts: expected int32 or int64, got torch.float32"),
    "sums missing": ({"cu_query_lens": torch.tensor([0, 2])}, kvdock.ArgumentValueError, "cu_query_lens: expected 3 rows, for the 2 of "
                     "block_table, got shape [2]"),
    "sums that are floats": ({"cu_query_lens": torch.zeros(3)}, kvdock.ArgumentTypeError, "cu_query_lens: expected int32 or int64, got "
                             "torch.float32"),
    "more queries": ({"q": torch.zeros(3, HEADS, DIM)}, kvdock.ArgumentValueError, "q: expected 2 rows, for the 2 of block_table, got "
                     f"shape [3, {HEADS}, {DIM}]"),
    "no window": ({"window": 0}, kvdock.ArgumentValueError, "window: expected at least 1, got 0"),
    "a text": ({"window": "a"}, kvdock.ArgumentTypeError, "window: expected an int of at least 1, got 'a'"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "text"), WRONG.values(), ids=WRONG)
def test_calls_that_make_no_rows_are_refused(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    """Lengths, starts and sums of another number were taken as they came, and what was missing saw nothing."""
    ranks = Shared(2, 2)
    table, lens = ranks.tables(ranks.begin(7, 5))
    k, v = ranks.parts[0]
    call = {"q": ranks.draw(2, HEADS, DIM), "k_cache": k, "v_cache": v, "block_table": table, "seq_lens": lens, **change}
    with pytest.raises(kind) as caught:
        ranks.shares[0].attend(**call)
    fix = {"int32 or int64": ". Fix: convert it with .int()", "shape [": ". Fix: pass what kvdock.ops.paged_attention takes, and returns"}
    assert str(caught.value) == f"ContextShare.attend: {text}{next((fix[part] for part in fix if part in text), '')}"
