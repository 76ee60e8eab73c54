"""Attention kernels that others make, as backends from `examples/`: against the reference in float64, in every memory order of pools.

FlashInfer's tests are skipped with the reason where its backend is not usable, and so are those of torch's `varlen_attn`. FlashInfer
compiles kernels when they are first needed, which takes a minute each: ``attention_of_others.sh`` has four compiled side by side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import kvdock
from support_attention import ORDERS, assert_means, filled, sdpa, served_by, why_not_usable

pytestmark = pytest.mark.filterwarnings("default")  # what others warn of is no fault of kvdock's

LENS = (60, 16, 0, 33, 5)
COUNTS = {"decode": None, "prefill": (20, 1, 0, 33, 2)}
OTHERS = ("flashinfer", "varlen")
NHD = (kvdock.KVCacheLayout.LAYER_FIRST, kvdock.HeadLayout.NHD)


@pytest.fixture(params=["cuda", *OTHERS])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that is usable here, kvdock's own among them."""
    return usable(request.param)


@pytest.fixture
def flashinfer() -> Iterator[str]:
    """FlashInfer's backend, for a block of code."""
    with kvdock.use_backend(usable("flashinfer")):
        yield "flashinfer"


def usable(name: str) -> str:
    """Return the name of a backend, or skip the test with the reason."""
    reason = why_not_usable(name)
    if reason:
        pytest.skip(reason)
    return name


def step(counts: Sequence[int] | None, order: tuple[Any, Any] = NHD, **options: Any) -> list[dict[str, Any]]:
    """Return the arguments of two layers on the GPU."""
    settings: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "dim": 128, **options}
    return filled(*order, LENS, counts, **settings)


@pytest.mark.parametrize(("layout", "heads"), ORDERS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_every_memory_order_is_read(
    backend: str, counts: Sequence[int] | None, layout: kvdock.KVCacheLayout, heads: kvdock.HeadLayout
) -> None:
    for args in step(counts, (layout, heads)):
        assert served_by(args, backend) == backend
        with kvdock.use_backend(backend):
            assert_means(args, kvdock.ops.paged_attention(**args))
            out, lse = kvdock.ops.paged_attention(**args, return_lse=True)
        assert_means(args, out, lse)
        assert bool((out == 0).all(-1).any()) is (counts is None), "only a sequence without tokens gets zeros"


@pytest.mark.parametrize(("layout", "heads"), ORDERS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_torchs_own_attention_reads_what_indexing_gathers(
    counts: Sequence[int] | None, layout: kvdock.KVCacheLayout, heads: kvdock.HeadLayout
) -> None:
    for args in step(counts, (layout, heads)):
        assert_means(args, sdpa(args))


def test_pools_of_heads_before_tokens_are_read_by_flashinfers_own_layout(flashinfer: str) -> None:
    """The same numbers come out where FlashInfer is told that the pool is HND as where it is handed a view of that as NHD."""
    import flashinfer as library

    (args, _) = step(None, (kvdock.KVCacheLayout.LAYER_FIRST, kvdock.HeadLayout.HND))
    lens = args["seq_lens"].clamp(min=1).cpu()
    counts = (lens + 15) // 16
    table = args["block_table"].cpu()
    blocks = torch.cat([row[:count] for row, count in zip(table, counts.tolist(), strict=True)]).cuda()
    way = library.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(128 << 20, dtype=torch.uint8, device="cuda"), "HND", use_tensor_cores=True)
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    way.plan(ends, blocks, ((lens - 1) % 16 + 1).int(), 8, 2, 128, 16, q_data_type=torch.bfloat16)
    pools = [args[name].transpose(1, 2) for name in ("k_cache", "v_cache")]
    assert all(pool.is_contiguous() for pool in pools)
    out = way.run(args["q"], tuple(pools))
    is_seen = args["seq_lens"] > 0
    assert torch.equal(out[is_seen], kvdock.ops.paged_attention(**args)[is_seen])


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_windows_of_varlen_attn(counts: Sequence[int] | None) -> None:
    with kvdock.use_backend(usable("varlen")):
        for window in (1, 7, 40):
            (args, _) = step(counts)
            assert_means(args, *kvdock.ops.paged_attention(**args, window=window, return_lse=True), window=window)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_capped_scores_in_windows(flashinfer: str, counts: Sequence[int] | None) -> None:
    for window in (1, 7, 40):
        options = {"window": window, "softcap": 3.0, "scale": 0.3}
        (args, _) = step(counts, dtype=torch.float16, dim=64)
        assert served_by(args, **options) == "flashinfer"
        assert_means(args, kvdock.ops.paged_attention(**args, **options), bound=4e-3, **options)  # its tanh has three digits


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="FlashInfer's sums are exact on Hopper"
)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_sums_are_flashinfers_too(flashinfer: str, counts: Sequence[int] | None) -> None:
    (args, _) = step(counts)
    _, lse = kvdock.ops.paged_attention(**args, return_lse=True)
    assert served_by(args, lse=torch.empty_like(lse)) == "flashinfer"
    with kvdock.use_backend("portable"):
        _, expected = kvdock.ops.paged_attention(**args, return_lse=True)
    torch.testing.assert_close(lse, expected, rtol=1e-5, atol=1e-5)


def test_keys_behind_the_query_are_seen_without_causal(backend: str) -> None:
    (args, _) = step(COUNTS["prefill"])
    with kvdock.use_backend(backend):
        assert_means(args, *kvdock.ops.paged_attention(**args, causal=False, return_lse=True), causal=False)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_outputs_of_any_strides_and_queries_of_no_sequence(backend: str, counts: Sequence[int] | None) -> None:
    (args, _) = step(counts)
    expected, count = kvdock.ops.paged_attention(**args), len(args["q"])
    padded = args
    if counts is not None:
        padded = args | {"q": torch.cat([args["q"], torch.full_like(args["q"][:3], torch.nan)])}
    out = torch.full((len(padded["q"]), 8, 131), torch.nan, dtype=torch.bfloat16, device="cuda")[..., 1:129]
    with kvdock.use_backend(backend):
        found, lse = kvdock.ops.paged_attention(**padded, out=out, return_lse=True)
    assert found is out
    assert_means(args, out[:count], lse[:count])
    torch.testing.assert_close(out[:count].float(), expected.float(), rtol=2e-2, atol=2e-2)
    assert bool((out[count:] == 0).all())
    assert bool((lse[count:] == -torch.inf).all())


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[list[str]]:
    """Count the calls of a method of FlashInfer's descriptors; they run as ever."""
    from kvdock_flashinfer.paged_attention import PagedAttentionDescriptor

    calls: list[str] = []
    method: Callable[..., Any] = getattr(PagedAttentionDescriptor, name)

    def counting(*args: Any) -> Any:
        calls.append(name)
        return method(*args)

    with monkeypatch.context() as patch:
        patch.setattr(PagedAttentionDescriptor, name, counting)
        yield calls


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_the_layers_of_a_step_share_a_plan(flashinfer: str, counts: Sequence[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvdock_flashinfer

    layers = step(counts)
    tables = {name: layers[0][name] for name in ("block_table", "seq_lens", "cu_query_lens")}
    layers = [args | tables for args in layers]
    for args in layers:
        kvdock.ops.paged_attention(**args)  # prepares
    with counted(monkeypatch, "plan") as plans, counted(monkeypatch, "run") as runs:
        expected = [kvdock.ops.paged_attention(**args) for args in layers]
        assert (len(plans), len(runs)) == (2, 2)
        with kvdock_flashinfer.one_step():
            found = [kvdock.ops.paged_attention(**args) for args in layers]
        assert (len(plans), len(runs)) == (3, 4)
        with kvdock_flashinfer.one_step():
            kvdock.ops.paged_attention(**layers[0])
            layers[0]["seq_lens"].clamp_(max=40)  # the next step's, by an operation of torch
            shorter = kvdock.ops.paged_attention(**layers[0])
        assert (len(plans), len(runs)) == (5, 6)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert_means(layers[0], shorter)


def test_steps_on_two_streams_do_not_meet(flashinfer: str) -> None:
    layers = [args | {"q": args["q"] * (1 + number)} for number in range(4) for args in step(None)]
    expected = [kvdock.ops.paged_attention(**args) for args in layers]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found: list[Any] = []
    for number, args in enumerate(layers):
        with torch.cuda.stream(streams[number % 2]):
            found.append(kvdock.ops.paged_attention(**args))
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_captured_call_is_the_built_in_kernels(flashinfer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (args, _) = step(None)
    out = torch.empty_like(args["q"])
    kvdock.ops.paged_attention(**args, out=out)
    graph = torch.cuda.CUDAGraph()
    with counted(monkeypatch, "plan") as plans, torch.cuda.graph(graph):
        kvdock.ops.paged_attention(**args, out=out)
    assert plans == []
    args["seq_lens"].copy_(torch.tensor([17, 3, 0, 20, 1]))
    out.fill_(torch.nan)
    graph.replay()
    assert_means(args, out)


@pytest.mark.parametrize("name", OTHERS)
def test_blocks_outside_the_pool_are_never_read_and_counted(name: str) -> None:
    with kvdock.use_backend(usable(name)):
        (args, _) = step(None)
        good = kvdock.ops.paged_attention(**args)
        before = kvdock.runtime.default().skipped_writes("cuda")
        args["block_table"][0, 1] = 1 << 30
        found = kvdock.ops.paged_attention(**args)
        assert kvdock.runtime.default().skipped_writes("cuda") > before
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found[1:], good[1:], rtol=2e-2, atol=2e-2)


def test_what_was_made_in_inference_mode_works_outside(backend: str) -> None:
    def attend() -> None:
        with kvdock.use_backend(backend):
            for counts in COUNTS.values():
                (args, _) = step(counts)
                assert_means(args, *kvdock.ops.paged_attention(**args, return_lse=True))

    with torch.cuda.stream(torch.cuda.Stream()):  # where nothing was made before
        with torch.inference_mode():
            attend()
        attend()


def test_other_ops_are_the_built_in_kernels(flashinfer: str) -> None:
    pools = torch.zeros(2, 4, 16, 2, 64, device="cuda")
    dispatcher = kvdock.runtime.default().dispatcher
    found = dispatcher.explain("copy_blocks_", (*pools, torch.zeros(1, 2, dtype=torch.int64, device="cuda")), "flashinfer")
    assert (found.served_by, found.kernel) == ("flashinfer", "kvdock_triton.copy_blocks.CopyBlocks")


def test_what_flashinfer_refuses_is_served_by_the_built_in_kernel(flashinfer: str) -> None:
    (args, _) = step(None, dtype=torch.float32, dim=64)
    assert served_by(args) == "cuda"
    assert served_by(args, flashinfer) == "portable"
    assert_means(args, *kvdock.ops.paged_attention(**args, return_lse=True))
