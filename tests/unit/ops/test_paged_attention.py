"""`paged_attention` in portable torch against the loops in float64: drawn batches, with NaN wherever no query may look."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import kvdock
from opskit import PROPERTY
from opskit.attention import ORDERS, TOLERANCE, assert_close, batch, meant


@pytest.fixture(autouse=True)
def portable() -> Any:
    with kvdock.use_backend("portable"):
        yield


@given(seed=st.integers(0, 2**20), dtype=st.sampled_from([*TOLERANCE]), order=st.sampled_from([*ORDERS]))
@PROPERTY
def test_any_batch(seed: int, dtype: torch.dtype, order: str) -> None:
    args = batch(seed, dtype, order)
    expected, sums = meant(args)
    with kvdock.use_backend("portable"):
        out, lse = kvdock.ops.paged_attention(**args, return_lse=True)
        alone = kvdock.ops.paged_attention(**args)
        into = torch.full_like(out, torch.nan)
        assert kvdock.ops.paged_attention(**args, out=into) is into
    assert out.dtype == dtype
    assert_close(out, expected, dtype)
    assert_close(lse, sums, torch.float32)
    assert torch.equal(alone, out)
    assert torch.equal(into, out)


def test_a_part_of_the_keys_at_a_time_comes_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for long contexts: a few columns of the table, and a few queries, in a step."""
    monkeypatch.setattr("kvdock.ops.portable.paged_attention._MOST", 1)
    for seed in range(8):
        args = batch(seed, torch.float64)
        out, lse = kvdock.ops.paged_attention(**args, return_lse=True)
        expected, sums = meant(args)
        assert_close(out, expected, torch.float64)
        assert_close(lse, sums, torch.float32)


def plain(**changed: Any) -> dict[str, Any]:
    """Return two sequences of 5 and 3 tokens, with 2 queries and 1, in blocks of 4."""
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(6, 4, 2, 8, generator=generator) for _ in "kv")
    return {
        "q": torch.randn(3, 4, 8, generator=generator),
        "k_cache": k,
        "v_cache": v,
        "block_table": torch.tensor([[1, 3, -1], [4, 99, 99]], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 3]),
        "cu_query_lens": torch.tensor([0, 2, 3]),
        **changed,
    }


def test_it_is_torchs_attention_over_the_same_keys() -> None:
    args = plain()
    k, v = (torch.cat([args[name][1], args[name][3]])[:5].transpose(0, 1) for name in ("k_cache", "v_cache"))
    mask = torch.ones(2, 5, dtype=torch.bool).tril(3)
    q = args["q"][:2].transpose(0, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    assert_close(kvdock.ops.paged_attention(**args)[:2], expected.transpose(0, 1), torch.float32)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "longer than the table": ({"seq_lens": torch.tensor([13, 3])}, kvdock.IndexRangeError, r"seq_lens\[0\]: expected between 0 and 12"),
    "a negative length": ({"seq_lens": torch.tensor([5, -1])}, kvdock.IndexRangeError, r"seq_lens\[1\]: expected between 0 and 12"),
    "more queries than tokens": ({"seq_lens": torch.tensor([1, 3])}, kvdock.IndexRangeError, r"seq_lens\[0\]: expected 0 for padding, or"),
    "sums that end early": ({"cu_query_lens": torch.tensor([0, 1, 2])}, kvdock.IndexRangeError, r"cu_query_lens\[2\]: .*to the 3 queries"),
    "sums that fall": ({"cu_query_lens": torch.tensor([0, 4, 3])}, kvdock.IndexRangeError, r"cu_query_lens\[2\]: expected sums"),
    "sums that begin late": ({"cu_query_lens": torch.tensor([1, 2, 3])}, kvdock.IndexRangeError, r"cu_query_lens\[0\]: expected sums"),
    "too few for the most": ({"max_query_len": 1}, kvdock.IndexRangeError, r"cu_query_lens\[1\]: expected at most max_query_len=1"),
    "a table without columns": (
        {"block_table": torch.zeros(2, 0, dtype=torch.int32)},
        kvdock.IndexRangeError,
        r"seq_lens\[0\]: expected between 0 and 0, for which",
    ),
    "queries of no sequence": (
        {
            "block_table": torch.zeros(0, 3, dtype=torch.int32),
            "seq_lens": torch.zeros(0, dtype=torch.int32),
            "cu_query_lens": torch.zeros(1, dtype=torch.int32),
        },
        kvdock.IndexRangeError,
        r"cu_query_lens\[0\]: expected sums .* to the 3 queries",
    ),
    "a block of no pool": (
        {"block_table": torch.tensor([[1, 6, 0], [4, 0, 0]], dtype=torch.int32)},
        kvdock.IndexRangeError,
        r"block_table\[0, 1\]: expected a block id between 0 and 5",
    ),
    "a start behind the end": ({"starts": torch.tensor([6, 0])}, kvdock.IndexRangeError, r"starts\[0\]: expected between 0 and the length"),
    "a wide table": ({"block_table": torch.zeros(3, 3, dtype=torch.int32)}, kvdock.ArgumentValueError, "seq_lens: expected shape"),
    "a table of another dtype": ({"block_table": torch.zeros(2, 3, dtype=torch.int64)}, kvdock.ArgumentTypeError, "block_table: "),
    "heads that do not divide": (
        {name: torch.zeros(6, 4, 3, 8) for name in ("k_cache", "v_cache")},
        kvdock.ArgumentValueError,
        "q: expected a multiple of the 3 heads of k_cache",
    ),
    "no sums": ({"cu_query_lens": None}, kvdock.ArgumentValueError, "q: expected one query for each of the 2 rows"),
    "sums of fewer": (
        {"cu_query_lens": torch.tensor([0, 3])},
        kvdock.ArgumentValueError,
        "cu_query_lens: expected one number more",
    ),
    "a window of 0": ({"window": 0}, kvdock.ArgumentValueError, "window: expected an int of at least 1 key, or None for all, got int 0"),
    "a window of True": ({"window": True}, kvdock.ArgumentValueError, "window: expected an int of at least 1 key"),
    "a window of numpy's": ({"window": np.int64(3)}, kvdock.ArgumentValueError, r".* got int64 np.int64\(3\). Fix: window.item\(\)$"),
    "a window of words": ({"window": "3"}, kvdock.ArgumentValueError, ".* got str '3'. Fix: pass such a value, or leave window out$"),
    "a negative cap": ({"softcap": -1.0}, kvdock.ArgumentValueError, "softcap: expected a finite number above 0"),
    "a scale of nan": ({"scale": float("nan")}, kvdock.ArgumentValueError, "scale: expected a finite number"),
    "an int that no float has room for as a scale": ({"scale": 10**400}, kvdock.ArgumentValueError, "scale: expected a finite number"),
    "a scale beyond float32": ({"scale": -1e39}, kvdock.ArgumentValueError, "scale: expected a finite number that float32 has room for"),
    "a cap beyond float32": ({"softcap": 1e39}, kvdock.ArgumentValueError, "softcap: expected a finite number above 0 that float32"),
    "a cap below float32": ({"softcap": 1e-320}, kvdock.ArgumentValueError, "softcap: expected a finite number above 0 that float32"),
    "causal by a number": ({"causal": 1}, kvdock.ArgumentValueError, "causal: expected True or False"),
    "another dtype": ({"q": torch.zeros(3, 4, 8, dtype=torch.float16)}, kvdock.ArgumentTypeError, "q: expected torch.float32"),
    "no tensor": ({"q": None}, kvdock.ArgumentTypeError, "q: expected a torch.Tensor"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("return_lse", [False, True])
def test_what_is_wrong_is_refused_before_anything_is_written(name: str, return_lse: bool) -> None:
    changed, error, text = WRONG[name]
    out = torch.full((3, 4, 8), 7.0)
    with pytest.raises(error, match=f"paged_attention: {text}"):
        kvdock.ops.paged_attention(**plain(**changed), out=out, return_lse=return_lse)
    assert bool((out == 7).all())


@pytest.mark.parametrize("backend", ["cpu", "portable"])
@pytest.mark.parametrize("window", [2**62, 2**63, 2**70])
def test_a_window_may_be_any_int(backend: str, window: int) -> None:
    args = plain()
    with kvdock.use_backend(backend):
        assert torch.equal(kvdock.ops.paged_attention(**args, window=window), kvdock.ops.paged_attention(**args))


@pytest.mark.parametrize("backend", ["cpu", "portable"])
@pytest.mark.parametrize(("rows", "queries", "width"), [(2, 2, 0), (0, 0, 3), (2, 0, 3), (2, 0, 0)])
@pytest.mark.parametrize("sinks", [None, torch.arange(4.0)])
def test_a_size_of_0_is_no_reason_to_leave_an_output_as_it_was(
    backend: str, rows: int, queries: int, width: int, sinks: torch.Tensor | None
) -> None:
    args = plain(q=torch.randn(queries, 4, 8), block_table=torch.zeros(rows, width, dtype=torch.int32), seq_lens=torch.zeros(rows).long())
    args |= {"cu_query_lens": None if rows == queries else torch.zeros(rows + 1, dtype=torch.int32), "sinks": sinks}
    expected = torch.full((queries, 4), -torch.inf) if sinks is None else sinks.expand(queries, 4)
    for out in (None, torch.full((queries, 4, 8), torch.nan), torch.full((queries, 4, 8), torch.nan, requires_grad=True)):
        with kvdock.use_backend(backend):
            found, lse = kvdock.ops.paged_attention(**args, out=out, return_lse=True)
            alone = kvdock.ops.paged_attention(**args, out=out)
        for each in (found, alone):
            assert torch.equal(each, torch.zeros(queries, 4, 8))
        assert torch.equal(lse, expected)


def test_an_output_within_an_input_is_refused() -> None:
    args = plain()
    with pytest.raises(kvdock.ArgumentValueError, match="q: expected memory outside out"):
        kvdock.ops.paged_attention(**args, out=args["q"])


def test_parts_of_the_keys_are_merged() -> None:
    """Windows cannot cut a context in two from the left, but `starts` and lengths can."""
    args = plain(q=torch.randn(2, 4, 8), cu_query_lens=None, seq_lens=torch.tensor([11, 3]), causal=False)
    args["block_table"] = torch.tensor([[1, 3, 0], [4, 5, 2]], dtype=torch.int32)
    whole = kvdock.ops.paged_attention(**args, return_lse=True)
    first = kvdock.ops.paged_attention(**{**args, "seq_lens": torch.tensor([6, 0])}, return_lse=True)
    rest = kvdock.ops.paged_attention(**args, starts=torch.tensor([6, 0]), return_lse=True)
    for got, expected in zip(kvdock.ops.merge_attention([first, rest]), whole, strict=True):
        assert_close(got, expected, torch.float32)
    nothing = (torch.full_like(first[0], torch.nan), torch.full_like(first[1], -torch.inf))
    for got, expected in zip(kvdock.ops.merge_attention([nothing, whole]), whole, strict=True):
        assert torch.equal(got, expected)
    out, lse = kvdock.ops.merge_attention([nothing])
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize(
    ("parts", "error", "text"),
    [
        ([], kvdock.ArgumentValueError, "parts: expected .* at least once, got none"),
        ([3], kvdock.ArgumentTypeError, r"parts\[0\]: expected two tensors"),
        (None, kvdock.ArgumentTypeError, r"parts\[0\]: expected two tensors, \(out, lse\), got NoneType"),
        (iter(()), kvdock.ArgumentTypeError, r"parts\[0\]: expected two tensors, \(out, lse\), got tuple_iterator"),
        ([(torch.zeros(2, 3, 4), torch.zeros(3, 2))], kvdock.ArgumentValueError, "parts: expected"),
        (
            [(torch.zeros(2, 3, 4), torch.zeros(2, 3)), (torch.zeros(2, 3, 5), torch.zeros(2, 3))],
            kvdock.ArgumentValueError,
            r"parts\[1\]: out: expected torch.float32 \[2, 3, 4\]",
        ),
        (
            [(torch.zeros(2, 3, 4), torch.zeros(2, 3)), (torch.zeros(2, 3, 4), torch.zeros(2, 3).double())],
            kvdock.ArgumentValueError,
            r"parts\[1\]: lse: expected torch.float32",
        ),
    ],
)
def test_parts_that_do_not_agree(parts: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"merge_attention: {text}"):
        kvdock.ops.merge_attention(parts)
