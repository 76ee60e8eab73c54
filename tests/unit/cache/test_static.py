"""A cache of fixed rows, against plain loops."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import kvdock
from support_caches import CPU, SPECS, bits, contents, random_bits, same

ROWS, LENGTH = 3, 10


def make(spec: kvdock.KVSpec, ops: kvdock.OpDispatcher, rows: int = ROWS, length: int | None = LENGTH) -> kvdock.StaticKVCache:
    return kvdock.create_cache(spec, kvdock.StaticKVCacheConfig(max_batch_size=rows, max_cache_len=length), CPU, ops=ops)


def new(spec: kvdock.KVSpec, layer: int, rows: int, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Make keys and values ``[B, H, s, D]``."""
    of = spec.layers[layer]
    assert isinstance(of, kvdock.LayerSpec)
    k = random_bits((rows, of.num_k_heads, count, of.k_dim), spec.dtype, seed)
    return k, random_bits((rows, of.num_v_heads, count, of.v_dim), spec.dtype, seed + 1)


def written(pool: torch.Tensor, values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Write position after position of each row."""
    after = pool.clone()
    for row, position in itertools.product(range(values.shape[0]), range(values.shape[2])):
        after[row, :, lengths[row] + position] = values[row, :, position]
    return after


CALLS: dict[str, tuple[int | torch.Tensor | np.integer[object], int, int, list[int]]] = {
    # cache_lengths, rows, new positions, the length of each row as it is meant
    "empty": (0, 3, 4, [0, 0, 0]),
    "behind what is there": (4, 3, 2, [4, 4, 4]),
    "exactly full": (6, 3, 4, [6, 6, 6]),
    "one length per row": (torch.tensor([2, 9, 0]), 3, 1, [2, 9, 0]),
    "one length per row, int32": (torch.tensor([2, 7, 0], dtype=torch.int32), 3, 3, [2, 7, 0]),
    "a tensor without dims": (torch.tensor(5), 3, 2, [5, 5, 5]),
    "a tensor of one": (torch.tensor([5]), 3, 2, [5, 5, 5]),
    "a smaller batch": (3, 2, 2, [3, 3]),
    "a smaller batch, a length per row": (torch.tensor([1, 8]), 2, 2, [1, 8]),
    "one row, its length": (torch.tensor([8]), 1, 2, [8]),
    "no new positions": (7, 3, 0, [7, 7, 7]),
    "no new positions, full": (10, 3, 0, [10, 10, 10]),
    "no new positions, a length per row": (torch.tensor([2, 9, 0]), 3, 0, [2, 9, 0]),
    "no rows": (torch.zeros(0, dtype=torch.int64), 0, 2, []),
    "a numpy integer": (np.int32(4), 3, 2, [4, 4, 4]),
    "strided lengths": (torch.tensor([2, -1, 5, -1, 1, -1])[::2], 3, 1, [2, 5, 1]),
}


@pytest.mark.parametrize("name", SPECS)
def test_update_writes_behind_each_length_and_returns_views_to_the_longest(name: str, ops: kvdock.OpDispatcher) -> None:
    spec = SPECS[name]
    cache = make(spec, ops)
    expected = contents(cache)
    for seed, ((lengths, rows, count, meant), layer) in enumerate(itertools.product(CALLS.values(), range(cache.num_layers))):
        k, v = new(spec, layer, rows, count, seed)
        kept = [tensor.clone() for tensor in (bits(k), bits(v))]
        k_all, v_all = cache.update(layer, k, v, lengths)  # type: ignore[arg-type]
        pair = expected[layer]
        expected[layer] = (written(pair[0], bits(k), meant), written(pair[1], bits(v), meant))
        assert same(contents(cache), expected)
        longest = max(meant, default=0) + count
        for whole, view in ((cache.k_cache(layer), k_all), (cache.v_cache(layer), v_all)):
            assert view.shape == (rows, whole.shape[1], longest, whole.shape[3])
            assert view.stride() == whole.stride()
            assert rows == 0 or view.data_ptr() == whole.data_ptr(), "a view, not a copy"
        assert same([(bits(k), bits(v))], [kept]), "inputs are not changed"


def test_views_show_what_later_writes_do(ops: kvdock.OpDispatcher) -> None:
    cache = make(SPECS["uniform"], ops)
    k_all, _ = cache.update(0, *new(SPECS["uniform"], 0, 3, 4), 0)
    k, v = new(SPECS["uniform"], 0, 3, 1, seed=7)
    cache.update(0, k, v, 2)
    assert torch.equal(bits(k_all[:, :, 2]), bits(k[:, :, 0]))


BAD_LENGTHS = {
    "negative": (-1, 2, "cache_lengths: expected between 0 and 8.*got -1. Fix: count positions from 0"),
    "one past full": (9, 2, "cache_lengths: expected between 0 and 8: 2 new positions must fit into 10, got 9"),
    "far past full": (2**40, 2, "got 1099511627776"),
    "more than a row in one call": (0, 11, "11 new positions must fit into 10"),
    "one row past full": (torch.tensor([0, 9, 3]), 2, r"cache_lengths\[1\].*got 9"),
    "one row negative": (torch.tensor([0, 3, -2]), 2, r"cache_lengths\[2\].*got -2"),
    "a tensor past full": (torch.tensor(9), 2, "got 9"),
    "a tensor of one, negative": (torch.tensor([-1]), 2, "got -1"),
    "nothing new, negative": (-1, 0, "got -1"),
    "nothing new, past full": (11, 0, "got 11"),
    "nothing new, one row negative": (torch.tensor([3, -1, 3]), 0, r"cache_lengths\[1\].*got -1"),
    "nothing new, one row past full": (torch.tensor([3, 3, 11]), 0, r"cache_lengths\[2\].*got 11"),
}


@pytest.mark.parametrize("case", BAD_LENGTHS)
def test_lengths_that_do_not_fit_raise_and_leave_the_state(case: str, ops: kvdock.OpDispatcher) -> None:
    spec = SPECS["layers differ"]
    cache = make(spec, ops)
    for layer in range(cache.num_layers):
        cache.update(layer, *new(spec, layer, 3, 10, seed=layer), 0)
    before = contents(cache)
    lengths, count, text = BAD_LENGTHS[case]
    with pytest.raises(kvdock.IndexRangeError, match=text):
        cache.update(1, *new(spec, 1, 3, count, seed=99), lengths)
    assert same(contents(cache), before)
    cache.update(1, *new(spec, 1, 3, 2, seed=99), 8)  # the cache goes on
    assert not same(contents(cache), before)


@pytest.mark.parametrize(
    ("lengths", "error", "text"),
    [
        (1.0, kvdock.ArgumentTypeError, "cache_lengths: expected an int or a torch.Tensor, got float 1.0"),
        (True, kvdock.ArgumentTypeError, "got bool True"),
        ("3", kvdock.ArgumentTypeError, "got str '3'"),
        (None, kvdock.ArgumentTypeError, "got NoneType"),
        ([0, 1, 2], kvdock.ArgumentTypeError, "got list"),
        (torch.tensor([0.0]), kvdock.ArgumentTypeError, "cache_lengths: expected one of torch.int32, torch.int64"),
        (torch.tensor([0, 1]), kvdock.ArgumentValueError, "cache_lengths: expected one length for all rows or one for each of the 3 rows"),
        (torch.tensor([[0]]), kvdock.ArgumentValueError, "cache_lengths: expected shape"),
        (torch.zeros(1, dtype=torch.int64, device="meta"), kvdock.ArgumentValueError, "cache_lengths: expected a tensor on cpu"),
    ],
)
def test_lengths_of_another_kind_are_refused(lengths: object, error: type[Exception], text: str, ops: kvdock.OpDispatcher) -> None:
    cache = make(SPECS["uniform"], ops)
    before = contents(cache)
    with pytest.raises(error, match=text):
        cache.update(0, *new(SPECS["uniform"], 0, 3, 2), lengths)  # type: ignore[arg-type]
    assert same(contents(cache), before)


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        ("more rows", kvdock.ArgumentValueError, "k: expected at most the 3 rows of k_cache.*max_batch_size"),
        ("rows disagree", kvdock.ArgumentValueError, "v: expected shape"),
        ("positions disagree", kvdock.ArgumentValueError, "v: expected shape"),
        ("heads", kvdock.ArgumentValueError, r"k: expected shape \[b, Hk=2"),
        ("dims", kvdock.ArgumentValueError, "v: expected shape"),
        ("dtype", kvdock.ArgumentTypeError, "k: expected torch.float32"),
        ("rank", kvdock.ArgumentValueError, "k: expected shape"),
        ("no tensor", kvdock.ArgumentTypeError, "k: expected a torch.Tensor"),
        ("inside", kvdock.ArgumentValueError, "k: expected memory outside k_cache"),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_is_written(case: str, error: type[Exception], text: str, ops: kvdock.OpDispatcher) -> None:
    spec = SPECS["uniform"]
    cache = make(spec, ops)
    cache.update(0, *new(spec, 0, 3, 4), 0)
    before = contents(cache)
    k, v = new(spec, 0, 3, 2, seed=9)
    arguments = {
        "more rows": new(spec, 0, 4, 2),
        "rows disagree": (k, v[:2]),
        "positions disagree": (k, v[:, :, :1]),
        "heads": (k.repeat(1, 2, 1, 1), v),
        "dims": (k, v[..., :3]),
        "dtype": (k.double(), v),
        "rank": (k[0], v[0]),
        "no tensor": (k.tolist(), v),
        "inside": (cache.k_cache(0)[:, :, 4:6], v),
    }[case]
    with pytest.raises(error, match=text):
        cache.update(0, *arguments, 2)  # type: ignore[arg-type]
    assert same(contents(cache), before)


@pytest.mark.parametrize(("asked", "positions"), [(None, 64), (0, 64), (1, 1), (63, 63), (64, 64), (65, 64), (10**9, 64)])
def test_max_cache_len_is_at_most_what_the_model_supports(asked: int | None, positions: int, ops: kvdock.OpDispatcher) -> None:
    spec = SPECS["uniform"]
    assert spec.max_positions == 64
    cache = make(spec, ops, rows=1, length=asked)
    assert cache.max_cache_len == positions
    assert cache.k_cache(0).shape == (1, 2, positions, 8)
    cache.update(0, *new(spec, 0, 1, positions), 0)
    with pytest.raises(kvdock.IndexRangeError, match=f"got {positions}"):
        cache.update(0, *new(spec, 0, 1, 1), positions)


@pytest.mark.parametrize("name", SPECS)
def test_memory(name: str, ops: kvdock.OpDispatcher) -> None:
    spec = SPECS[name]
    cache = make(spec, ops)
    views = [view(layer) for layer in range(cache.num_layers) for view in (cache.k_cache, cache.v_cache)]
    assert len({view.untyped_storage().data_ptr() for view in views}) == len(views), "separate storages"
    assert cache.nbytes == sum(view.untyped_storage().nbytes() for view in views)
    assert not any(bits(view).any() for view in views)
    for layer in range(cache.num_layers):
        cache.update(layer, *new(spec, layer, 3, 10), 0)
    assert all(bits(view).any() for view in views)
    cache.reset()
    assert not any(bits(view).any() for view in views), "views handed out before remain valid"
    assert all(cache.k_cache(i) is views[2 * i] and cache.v_cache(i) is views[2 * i + 1] for i in range(cache.num_layers))


@pytest.mark.parametrize(("tp_size", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_a_rank_holds_its_share_of_the_heads(tp_size: int, heads: int, ops: kvdock.OpDispatcher) -> None:
    spec = kvdock.KVSpec((kvdock.LayerSpec(4, 4, 8, 6),), 16, torch.float32)
    for rank in range(tp_size):
        cache = kvdock.create_cache(spec, kvdock.StaticKVCacheConfig(), kvdock.RankInfo("cpu", tp_size, rank), ops=ops)
        assert cache.k_cache(0).shape == (1, heads, 16, 8)
        assert cache.v_cache(0).shape == (1, heads, 16, 6)


def test_the_cache_says_what_it_is(ops: kvdock.OpDispatcher) -> None:
    cache = make(SPECS["layers differ"], ops)
    assert (cache.num_layers, cache.max_batch_size, cache.max_cache_len) == (5, 3, 10)
    assert cache.device == torch.device("cpu")
    assert cache.dtype == cache.v_cache(4).dtype == torch.float16
    assert isinstance(cache, kvdock.Cache)
    assert repr(cache) == f"StaticKVCache(5 layers, 3 rows of 10, torch.float16, {cache.nbytes} bytes on cpu)"
