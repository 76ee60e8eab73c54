"""`paged_attention` on the CPU against the float64 reference, and what a call takes, leaves alone and refuses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import kvdock
from kvdock.errors import ArgumentValueError, IndexRangeError
from kvdock_conformance.reference import paged_attention as reference
from opskit import POOLS, Geometry, Memory, Target, active

pytest.importorskip("kvdock_cpu", reason="kvdock_cpu is not installed")

from kvdock_cpu import paged_attention
from kvdock_cpu.paged_attention import PagedAttentionDescriptor

NAN = float("nan")
BOUNDS = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
LENS, COUNTS = [37, 0, 5, 60, 1], [9, 2, 0, 33, 1]
ORDER = "q k_cache v_cache block_table seq_lens cu_query_lens starts sinks"


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with active(Target("cpu", "cpu", False).runtime):
        yield


def pools(name: str, g: Geometry) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pools in a memory order, full of NaN."""
    k, v = POOLS[name](Memory(), g)
    return k.fill_(NAN), v.fill_(NAN)


def case(
    pool: str = "nhd",
    *,
    dtype: torch.dtype = torch.float32,
    block: int = 4,
    heads: int = 2,
    group: int = 4,
    dims: tuple[int, int] = (8, 8),
    counts: list[int] | None = COUNTS,
    lens: list[int] = LENS,
    index: torch.dtype = torch.int64,
    in_runs: bool = False,
) -> dict[str, Any]:
    """Return arguments: what lies behind a sequence is NaN, and its entries of the table are no blocks."""
    torch.manual_seed(0)
    width = -(-max(lens) // block) + 1
    g = Geometry(num_blocks=len(lens) * width + 2, block=block, hk=heads, hv=heads, dk=dims[0], dv=dims[1], dtype=dtype)
    k, v = pools(pool, g)
    order = torch.randperm(g.num_blocks)
    table = (order.sort().values if in_runs else order)[: len(lens) * width].view(-1, width).int()
    for row, length in enumerate(lens):
        for key in range(length):
            place = table[row, key // block], key % block
            k[place], v[place] = torch.randn(heads, dims[0]).to(dtype), torch.randn(heads, dims[1]).to(dtype)
        table[row, -(-length // block) :] = torch.tensor([-7, 2**31 - 1] * width)[: width - -(-length // block)]
    q = torch.randn(len(lens) if counts is None else sum(counts), heads * group, dims[0]).to(dtype)
    cu = None if counts is None else torch.tensor([0, *itertools.accumulate(counts)], dtype=index)
    return {
        "q": q,
        "k_cache": k,
        "v_cache": v,
        "block_table": table,
        "seq_lens": torch.tensor(lens, dtype=index),
        "cu_query_lens": cu,
    }


def expected(args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results of the reference in float64."""
    size = args["q"].shape[:2]
    out = torch.empty(*size, args["v_cache"].shape[3], dtype=torch.float64)
    lse = torch.empty(size)
    static = [args.get("scale"), args.get("causal", True), args.get("window"), args.get("softcap")]
    reference(*(args.get(name) for name in ORDER.split()), 99, *static, out, lse)
    return out, lse


def check(args: dict[str, Any]) -> None:
    """Hold a call to the reference."""
    out, lse = kvdock.ops.paged_attention(**args, return_lse=True)
    wanted, wanted_lse = expected(args)
    bound = BOUNDS[args["q"].dtype]
    torch.testing.assert_close(out.double(), wanted, rtol=bound, atol=bound)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kvdock.ops.paged_attention(**args).double(), wanted, rtol=bound, atol=bound)  # without lse, in fewer passes


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not causal": {"causal": False},
    "a window": {"window": 5},
    "a window of 1": {"window": 1},
    "a window, not causal": {"window": 7, "causal": False},
    "a soft cap": {"softcap": 2.0},
    "a scale": {"scale": 0.7},
    "starts": {"starts": torch.tensor([3, 0, 5, 40, 0])},
    "sinks": {"sinks": torch.linspace(-2, 3, 8)},
    "all": {"window": 11, "softcap": 3.0, "starts": torch.tensor([3, 0, 1, 40, 1]), "sinks": torch.linspace(-2, 3, 8), "scale": 0.4},
}


@pytest.fixture(params=[False, True], ids=["tiles", "one tile"])
def tiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles of keys and parts of queries, whose edges then lie anywhere, or those that there are."""
    made = PagedAttentionDescriptor.__init__

    def small(self: PagedAttentionDescriptor, of: Any) -> None:
        made(self, of)
        self.tile, self.near, self.queries = 7, 7, 4

    if not request.param:
        monkeypatch.setattr(paged_attention, "_LONGEST", 20)
        monkeypatch.setattr(PagedAttentionDescriptor, "__init__", small)


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("counts", [COUNTS, None], ids=["many queries", "one query"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any], counts: list[int] | None) -> None:
    check({**case(counts=counts), **options})


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("counts", [COUNTS, None], ids=["many queries", "one query"])
def test_dtypes(dtype: torch.dtype, counts: list[int] | None) -> None:
    check(case(dtype=dtype, counts=counts, index=torch.int32))


@pytest.mark.parametrize("in_runs", [False, True], ids=["apart", "in runs"])
@pytest.mark.parametrize("block", [1, 16, 48, 272, 784])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_contexts_around_those_of_one_softmax(dtype: torch.dtype, block: int, in_runs: bool) -> None:
    lens, starts = [4095, 4096, 4097, 129, 8200], torch.tensor([0, 17, 4096, 128, 4095])
    args = case("hnd" if block == 16 else "nhd", dtype=dtype, block=block, heads=1, dims=(64, 64), counts=None, lens=lens, in_runs=in_runs)
    check(args)
    check({**args, "starts": starts})
    check({**args, "window": 4100, "softcap": 5.0})


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("pool", POOLS)
def test_every_memory_order(pool: str) -> None:
    check(case(pool))


@pytest.mark.parametrize(
    ("block", "heads", "group", "dims"), [(1, 1, 1, (8, 8)), (16, 1, 4, (5, 3)), (3, 3, 2, (4, 16)), (64, 2, 1, (8, 8))]
)
@pytest.mark.parametrize("pool", ["nhd", "hnd"])
def test_sizes(pool: str, block: int, heads: int, group: int, dims: tuple[int, int]) -> None:
    check(case(pool, block=block, heads=heads, group=group, dims=dims))


@pytest.mark.parametrize("counts", [COUNTS, None], ids=["many queries", "one query"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pool", POOLS)
def test_blocks_that_follow_one_another(pool: str, dtype: torch.dtype, counts: list[int] | None) -> None:
    """They are read in another way, and give the same bits."""
    run, scattered = (case(pool, dtype=dtype, counts=counts, in_runs=in_runs) for in_runs in (True, False))
    check(run)
    assert torch.equal(kvdock.ops.paged_attention(**run), kvdock.ops.paged_attention(**scattered))


@pytest.mark.parametrize("in_runs", [True, False], ids=["runs", "scattered"])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("pool", ["nhd", "hnd"])
def test_more_keys_than_a_tile_has(pool: str, heads: int, in_runs: bool) -> None:
    """In blocks that divide it and in blocks that do not, the first of which are not seen."""
    for block in (16, 48):
        args = case(pool, block=block, heads=heads, group=2, dims=(64, 64), counts=None, lens=[5000, 0, 130], in_runs=in_runs)
        check(args)
        check({**args, "starts": torch.tensor([77, 0, 129])})


def test_keys_of_which_none_weighs_anything() -> None:
    """They give what no keys give."""
    args = case(counts=None)
    args["q"][3], args["k_cache"][args["block_table"][3, :15].long()] = 1, -torch.inf
    out, lse = kvdock.ops.paged_attention(**args, return_lse=True)
    assert not out[3].any()
    assert bool((lse[3] == -torch.inf).all())
    assert torch.equal(kvdock.ops.paged_attention(**args)[3], out[3])


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_a_query_is_not_changed_by_what_it_does_not_see(name: str, value: float) -> None:
    """The last key of the fourth sequence is seen by its last query alone."""
    args = case()
    before = kvdock.ops.paged_attention(**args)
    args[name][args["block_table"][3, 59 // 4], 59 % 4] = value
    after = kvdock.ops.paged_attention(**args)
    is_last = torch.arange(len(before)) == sum(COUNTS[:4]) - 1
    torch.testing.assert_close(after[~is_last], before[~is_last])
    assert not torch.equal(after[is_last], before[is_last])


def test_padding_gets_zeros_and_the_sink() -> None:
    args = case(counts=None)
    out, lse = kvdock.ops.paged_attention(**args, return_lse=True)
    assert not out[1].any()
    assert torch.equal(lse[1], torch.full((8,), -torch.inf))
    sinks = torch.linspace(-2, 3, 8)
    out, lse = kvdock.ops.paged_attention(**args, sinks=sinks, return_lse=True)
    assert not out[1].any()
    torch.testing.assert_close(lse[1], sinks)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a length beyond the table": ({"seq_lens": torch.tensor([37, 0, 5, 65, 1])}, r"seq_lens\[3\]"),
    "fewer tokens than queries": ({"seq_lens": torch.tensor([8, 0, 5, 60, 1])}, r"seq_lens\[0\]"),
    "sums that end early": ({"cu_query_lens": torch.tensor([0, 9, 11, 11, 44, 44])}, r"cu_query_lens\[5\]"),
    "a start behind the end": ({"starts": torch.tensor([0, 0, 6, 0, 0])}, r"starts\[2\]"),
}


@pytest.mark.parametrize(("bad", "where"), BAD.values(), ids=BAD)
def test_bad_indices_raise_before_anything_is_written(bad: dict[str, Any], where: str) -> None:
    args = {**case(), **bad}
    out = torch.full_like(args["q"], 7)
    with pytest.raises(IndexRangeError, match=where):
        kvdock.ops.paged_attention(**args, out=out)
    assert bool((out == 7).all())


@pytest.mark.parametrize("block", [-1, 10**6])
def test_a_block_that_is_not_there_raises(block: int) -> None:
    args = case()
    args["block_table"][3, 14] = block
    out = torch.full_like(args["q"], 7)
    with pytest.raises(IndexRangeError, match=r"block_table\[3, 14\]"):
        kvdock.ops.paged_attention(**args, out=out)
    assert bool((out == 7).all())


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ArgumentValueError, match="window"):
        kvdock.ops.paged_attention(**case(), window=0)


def largest(args: dict[str, Any]) -> int:
    """Return the bytes of the largest piece that a call takes from torch's allocator."""
    kvdock.ops.paged_attention(**args)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kvdock.ops.paged_attention(**args)
    result = profiled.profiler.kineto_results  # type: ignore[union-attr]
    return max(event.nbytes() for event in result.events() if event.name() == "[memory]")


def test_no_call_copies_the_context() -> None:
    """A context of 16 MiB is read in pieces that do not grow with it."""
    k, v = (torch.randn(1024, 16, 2, 128) for _ in range(2))
    table, q = torch.randperm(1024).int()[None], torch.randn(1, 8, 128)
    found = [largest({"q": q, "k_cache": k, "v_cache": v, "block_table": table, "seq_lens": torch.tensor([n])}) for n in (4096, 16384)]
    assert found[0] == found[1] <= 2 << 20
