"""`paged_attention` under the interpreter against the loops in float64, in tiles so small that short sequences have many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kvdock
from kvdock.interface import HOST, Request
from kvdock.ops.attention import PAGED_ATTENTION
from kvdock.ops.validate import validate
from opskit import active, runtime_of
from opskit.attention import ORDERS, TOLERANCE, assert_close, batch, meant
from opskit.interpreted import AcmeBackend

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


class SmallTiles(AcmeBackend):
    """Tiles of as few rows and keys as there are, and splits of as few keys."""

    def tuning(self, device: torch.device) -> Any:
        from kvdock_triton.tuning import AttentionTile, Tuning

        return Tuning(decode=AttentionTile(16, 16, 1, 2, programs=4, least=16), prefill=AttentionTile(16, 16, 1, 2))


@pytest.fixture(autouse=True)
def backend(target: object) -> Iterator[SmallTiles]:
    """Serve `kvdock.ops` in such tiles. ``target`` skips where there is no interpreter."""
    made = SmallTiles()
    with active(runtime_of(made), "acme"):
        yield made


def check(args: dict[str, Any]) -> torch.Tensor:
    """Compare a call with what it means, into an output whose every number is overwritten."""
    dtype, (expected, sums) = args["q"].dtype, meant(args)
    into = torch.full(expected.shape, torch.nan, dtype=dtype)
    out, lse = kvdock.ops.paged_attention(**args, return_lse=True, out=into)
    assert_close(out, expected, dtype)
    assert_close(lse, sums, torch.float32)
    return out


@pytest.mark.parametrize("seed", range(12))
def test_any_batch(seed: int) -> None:
    args = batch(seed, DTYPES[seed % 3], [*ORDERS][seed % len(ORDERS)])
    if args["cu_query_lens"] is not None:
        args["max_query_len"] = int(args["cu_query_lens"].diff().max())
    check(args)


def one(length: int, queries: int = 1, heads: tuple[int, int] = (2, 1), dim: int = 16, **options: Any) -> dict[str, Any]:
    """Return one sequence in blocks of 4."""
    torch.manual_seed(length)
    width = -(-length // 4)
    k, v = (torch.randn(width + 2, 4, heads[1], dim) for _ in "kv")
    return {
        "q": torch.randn(queries, heads[0], dim),
        "k_cache": k,
        "v_cache": v,
        "block_table": torch.randperm(width + 2)[:width].view(1, -1).int(),
        "seq_lens": torch.tensor([length]),
        "cu_query_lens": None if queries == 1 else torch.tensor([0, queries]),
        **dict.fromkeys(("starts", "sinks", "scale", "window", "softcap")),
        "causal": True,
        **options,
    }


@pytest.mark.parametrize("keys", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("sink", [False, True])
def test_keys_at_the_ends_of_tiles_and_splits(keys: int, sink: bool) -> None:
    check(one(keys, sinks=torch.randn(2) if sink else None))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 7, 20])
def test_tiles_of_queries(causal: bool, window: int | None) -> None:
    check(one(45, 21, causal=causal, window=window))


@pytest.mark.parametrize("heads", [(17, 1), (70, 1), (10, 2)])
def test_groups_of_any_size(heads: tuple[int, int]) -> None:
    """Padded to a tile, or shared by several."""
    check(one(19, heads=heads))
    check(one(19, 3, heads=heads))


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_scales_that_turn_the_order_round(scale: float) -> None:
    check(one(20, scale=scale))


def test_queries_that_nobody_counts_get_zeros() -> None:
    args = one(20, 5, sinks=torch.tensor([0.5, -2.0]))
    args |= {"cu_query_lens": torch.tensor([0, 2]), "max_query_len": 2}
    for most in (2, 5, 100):  # one tile for each sequence, or as many as it needs
        out, lse = kvdock.ops.paged_attention(**{**args, "max_query_len": most}, return_lse=True, out=torch.full((5, 2, 16), torch.nan))
        assert bool((out[2:] == 0).all())
        assert_close(lse[2:], args["sinks"].expand(3, 2), torch.float32)
        assert bool((out[:2] != 0).all())


def test_more_queries_than_was_said_get_zeros() -> None:
    """An index value that no host has checked: what was said decides the grid, and nothing is left as it was."""
    out = kvdock.ops.paged_attention(**one(40, 30), max_query_len=1, out=torch.full((30, 2, 16), torch.nan))
    assert bool((out[:8] != 0).any())
    assert bool((out[8:] == 0).all())


def test_padding_gets_zeros() -> None:
    args = one(20, seq_lens=torch.tensor([0]), block_table=torch.tensor([[-1, 2**31 - 1]], dtype=torch.int32))
    out, lse = kvdock.ops.paged_attention(**args, return_lse=True)
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize("queries", [1, 12])
def test_a_table_without_columns_is_of_padding(queries: int) -> None:
    args = one(20, queries, seq_lens=torch.tensor([0]), block_table=torch.zeros(1, 0, dtype=torch.int32))
    out, lse = kvdock.ops.paged_attention(**args, return_lse=True, out=torch.full((queries, 2, 16), torch.nan))
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize("queries", [1, 12])
def test_blocks_that_are_not_in_the_pool_are_not_seen_and_counted(backend: SmallTiles, queries: int) -> None:
    args = one(39, queries)
    before, kept = backend.skipped_writes(HOST), args["block_table"].clone()
    check(args)
    assert backend.skipped_writes(HOST) == before
    args["block_table"][0, 2], args["block_table"][0, 5] = -3, 2**31 - 1
    got = kvdock.ops.paged_attention(**args)
    assert backend.skipped_writes(HOST) == before + 2
    # What is left is what keys elsewhere mean: a score of -inf, for which a key of another head room is far too low.
    seen = [key for key in range(39) if key // 4 not in (2, 5)]
    places = [(int(kept[0, key // 4]), key % 4) for key in seen]
    k, v = (torch.stack([args[name][place] for place in places]).double() for name in ("k_cache", "v_cache"))
    scores = torch.einsum("nhd,kd->hnk", args["q"].double(), k[:, 0]) / 4
    hidden = torch.tensor([[key > 39 - queries + query for key in seen] for query in range(queries)])
    expected = torch.einsum("hnk,kd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v[:, 0])
    assert_close(got, expected, torch.float32)


@pytest.mark.parametrize(("length", "counted"), [(10**12, 1), (-5, 1), (40, 0), (41, 1)])
def test_lengths_beyond_the_table_are_counted_and_nothing_behind_it_is_read(backend: SmallTiles, length: int, counted: int) -> None:
    args, before = one(40), backend.skipped_writes(HOST)
    out = kvdock.ops.paged_attention(**{**args, "seq_lens": torch.tensor([length])})
    assert backend.skipped_writes(HOST) == before + counted
    if length < 0:
        assert bool((out == 0).all())
    else:
        assert torch.equal(out, kvdock.ops.paged_attention(**args))


class FewPrograms(SmallTiles):
    """Fewer programs than rows and heads, or some more: 64 for each unit."""

    def __init__(self, processors: int, pieces: int = 1) -> None:
        super().__init__()
        self._processors, self.pieces = processors, pieces

    def processors(self, device: torch.device) -> int:
        return self._processors

    def tuning(self, device: torch.device) -> Any:
        from kvdock_triton.tuning import AttentionTile, Tuning

        return Tuning(decode=AttentionTile(16, 16, 1, 2, programs=1, least=16, pieces=self.pieces, long=1))


UNEVEN, EVEN, ONE, MANY = [300, 0, 17, 1], [200, 200], [0, 0, 300], [130, *[5] * 140]


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize(
    ("lengths", "processors", "options"),
    [
        *((UNEVEN, processors, {}) for processors in (1, 3, 8, 50)),
        (UNEVEN, 7, {"window": 40}),
        (UNEVEN, 12, {"softcap": 2.0}),
        (UNEVEN, 4, {"cu_query_lens": torch.tensor([0, 3, 3, 5, 6]), "max_query_len": 3}),
        (UNEVEN, 6, {"cu_query_lens": torch.tensor([0, 2, 3, 6, 6]), "max_query_len": 3, "window": 40}),
        *((EVEN, processors, {}) for processors in (2, 4, 13)),
        (ONE, 5, {"window": 40}),
        (MANY, 9, {}),
    ],
)
def test_keys_are_shared_out_however_long_rows_are(lengths: list[int], processors: int, options: dict[str, Any], pieces: int) -> None:
    """Among fewer programs than there are rows and heads, so that one has several, and more, so that several have one; and in pieces."""
    torch.manual_seed(3)
    batch, width, heads = len(lengths), 75, 1 if lengths is MANY else 2
    k, v = (torch.randn(90, 4, heads, 16) for _ in "kv")
    queries = 8 if "cu_query_lens" in options else batch  # of which some belong to no row
    args = {**one(8), "q": torch.randn(queries, 2 * heads, 16), "k_cache": k, "v_cache": v, "seq_lens": torch.tensor(lengths)}
    args |= {"block_table": torch.stack([torch.randperm(90)[:width] for _ in lengths]).int(), **options}
    args["sinks"] = torch.randn(2 * heads) if processors % 2 else None
    with active(runtime_of(FewPrograms(processors, pieces)), "acme"):
        check(args)


class ByMaps(SmallTiles):
    """Tiles of keys come by maps of the caches, where they may."""

    def tuning(self, device: torch.device) -> Any:
        from kvdock_triton.tuning import AttentionTile, Tuning

        return Tuning(decode=AttentionTile(16, 32, 1, 2, programs=4, least=16, mapped=4))


@pytest.mark.parametrize("order", [*ORDERS])
@pytest.mark.parametrize(("dtype", "tiles"), [(torch.float16, 2), (torch.bfloat16, 4)], ids=str)
def test_tiles_come_by_maps(monkeypatch: pytest.MonkeyPatch, order: str, dtype: torch.dtype, tiles: int) -> None:
    """In every order of memory, of heads of any length, with NaN and numbers behind sequences, and blocks that are not in the pool."""
    monkeypatch.setattr("kvdock_triton.tuning.MOST_TILES", tiles)
    from kvdock_triton import tensor_maps

    made, real = list[Any](), tensor_maps.interpreted_map
    monkeypatch.setattr("kvdock_triton.launch.interpreted_map", lambda *args: made.append(args[0]) or real(*args))
    with active(runtime_of(ByMaps()), "acme"):
        for seed in range(4):
            args = batch(seed, dtype, order, aligned=True)
            if args["cu_query_lens"] is not None:
                args["max_query_len"] = int(args["cu_query_lens"].diff().max())
            check(args)  # finds no number, and looks again by addresses
            for cache in (args["k_cache"], args["v_cache"]):
                cache.nan_to_num_(2.0)
            check(args)
            args["block_table"][0, 0] = (-7, 2**31 - 1)[seed % 2]
            assert bool(kvdock.ops.paged_attention(**args).isfinite().all())
    assert {kind.partition("[")[2] for kind in made} >= {"1,1,16,16]>", "1,1,16,32]>"}


def test_how_many_programs_there_are_and_whether_there_is_anything_to_join() -> None:
    from kvdock_triton.paged_attention import _Way

    way = _Way(None, None, queries=1, segments=8, rows=16, served=4, wanted=528, least=128, pieces=4, long=6144)  # type: ignore[arg-type] # launches nothing
    sizes = [(64, 6143), (64, 6144), (64, 64), (1, 4096), (1, 128), (1, 0), (0, 64), (500, 9), (500, 900), (4, 98_304), (4, 98_303)]
    expected = [(512, 1, 1), (512, 4, 1), (512, 1, 1), (256, 1, 32), (8, 1, 1), (1, 1, 0), (1, 1, 0)]
    expected += [(528, 1, 0), (528, 4, 0), (512, 4, 16), (512, 1, 16)]
    assert [way.chunks(batch, room) for batch, room in sizes] == expected
    assert way.has_parts(512, 64, 8192)
    assert not way.has_parts(512, 64, 64), "all are so short that nobody shares one"
    assert way.has_parts(256, 1, 4096)
    assert not way.has_parts(8, 1, 128)
    assert way.has_parts(528, 500, 9), "a program has several, and the last of them may be its neighbour's too"
    assert [way.splits(tiles, 16, 4096) for tiles in (1, 4, 100)] == [4, 4, 1]


def request(**changed: Any) -> Request:
    """Return the request of a call."""
    args = {**dict.fromkeys(PAGED_ATTENTION.arg_names), **one(8), "max_query_len": 1, **changed}
    args["out"] = torch.empty(*args["q"].shape[:2], args["v_cache"].shape[3], dtype=args["q"].dtype)
    return validate(PAGED_ATTENTION, tuple(args[name] for name in PAGED_ATTENTION.arg_names))


@pytest.mark.parametrize(
    ("dtype", "dim", "reason"),
    [
        (torch.float32, 16, None),
        (torch.float64, 16, "no float64"),
        (torch.float16, 577, "k_cache have 577 elements, more than 576"),
        (torch.float32, 257, "k_cache have 257 elements, more than 256"),
    ],
)
def test_what_is_refused_says_why(backend: SmallTiles, dtype: torch.dtype, dim: int, reason: str | None) -> None:
    args = {name: torch.zeros(3, 4, 1, dim, dtype=dtype) for name in ("k_cache", "v_cache")} | {"q": torch.zeros(1, 2, dim, dtype=dtype)}
    reasons = backend.kernels()["paged_attention"].supports(request(**args))
    assert bool(reasons) == bool(reason)
    assert not reason or reason in reasons[0]
    assert TOLERANCE.keys() >= {dtype}


def test_a_call_takes_no_more_memory_than_is_stated(backend: SmallTiles, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, real = list[int](), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: taken.append(size[0]) or real(*size, **options))
    descriptor = backend.kernels()["paged_attention"].prepare(request())
    args = {**dict.fromkeys(PAGED_ATTENTION.arg_names), **one(39), "max_query_len": 1, "out": torch.zeros(1, 2, 16)}
    descriptor(*(args[name] for name in PAGED_ATTENTION.arg_names))
    assert taken[-1] == 3 * 2 * 16 * 17 + 8  # of programs of 16 keys, two parts each with sums of all rows; and of one head, whose they are
    assert 0 < 4 * taken[-1] <= descriptor.workspace_bytes


@pytest.mark.parametrize("most", [1, 5])
def test_queries_of_no_sequence_get_zeros(backend: SmallTiles, most: int) -> None:
    """As on a device, where nobody sees before the launch that there is none."""
    nothing = {"block_table": torch.zeros(0, 3, dtype=torch.int32), "seq_lens": torch.zeros(0, dtype=torch.int64)}
    args = {**dict.fromkeys(PAGED_ATTENTION.arg_names), **one(20, 5), **nothing, "cu_query_lens": torch.zeros(1, dtype=torch.int64)}
    args |= {"max_query_len": most, "out": torch.full((5, 2, 16), torch.nan)}
    descriptor = backend.kernels()["paged_attention"].prepare(request(cu_query_lens=torch.tensor([0, 1])))
    descriptor(*(args[name] for name in PAGED_ATTENTION.arg_names))
    assert bool((args["out"] == 0).all())


def latents(seed: int, rank: int, rope: int, **changed: Any) -> dict[str, Any]:
    """Return a batch whose values are the first elements of its keys, with NaN wherever no query may look."""
    args = batch(seed, DTYPES[seed % 2], "NHD", sinks=None, **changed)
    wide = torch.randn(*args["k_cache"].shape[:2], 1, rank + rope).to(args["q"].dtype)
    wide[args["k_cache"][:, :, :1].isnan().any(-1)] = torch.nan
    heads = args["q"].shape[1]
    q = (torch.randn(args["q"].shape[0], heads, rank + rope) / 4).to(args["q"].dtype)
    return args | {"q": q, "k_cache": wide, "v_cache": wide[..., :rank]}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("apart", [False, True], ids=["within", "apart"])
def test_latents_are_keys_and_their_first_elements_values(monkeypatch: pytest.MonkeyPatch, seed: int, apart: bool) -> None:
    """Keys in two parts, and values read with the first of them; values of the same strides elsewhere are read by themselves."""
    monkeypatch.setattr("kvdock_triton.attention_caches.LONG", 16)
    args = latents(seed, *[(32, 16), (16, 5)][seed % 2])
    if apart:
        args["v_cache"] = torch.randn_like(args["k_cache"])[..., : args["v_cache"].shape[3]]
        args["v_cache"][args["k_cache"][..., :1].isnan().any(-1)] = torch.nan
    if args["cu_query_lens"] is not None:
        args["max_query_len"] = int(args["cu_query_lens"].diff().max())
    check(args)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("queries", [1, 3])
def test_latents_of_the_size_that_models_have(heads: int, queries: int) -> None:
    args = one(21, queries, (heads, 1), 576)
    wide = torch.randn_like(args["k_cache"]).bfloat16()
    args |= {"k_cache": wide, "v_cache": wide[..., :512], "q": args["q"].bfloat16()}
    check(args)


def test_who_reads_values_with_keys() -> None:
    from kvdock_triton.attention_caches import may_be_within

    pools = torch.zeros(2, 4, 1, 576), torch.zeros(2, 4, 1, 512)
    assert may_be_within(request(k_cache=pools[0], v_cache=pools[0][..., :512], q=torch.zeros(1, 2, 576)))
    assert not may_be_within(request(k_cache=pools[0], v_cache=pools[1], q=torch.zeros(1, 2, 576)))
    assert not may_be_within(request(k_cache=pools[0], v_cache=pools[0][..., :256], q=torch.zeros(1, 2, 576)))
    assert not may_be_within(request(k_cache=pools[1], v_cache=pools[1], q=torch.zeros(1, 2, 512))), "all of a key is its value"
