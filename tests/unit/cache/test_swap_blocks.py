"""Swapping blocks of every layer between two caches."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch

import kvdock
from kvdock.layers import Buffer, OpaqueLayerSpec, StateLayerSpec
from support_caches import CPU, LAYOUTS, SPECS, counting_runtime, random_bits

pytestmark = pytest.mark.backend

F32, BF16 = torch.float32, torch.bfloat16
FULL, WINDOW = kvdock.LayerSpec(2, 2, 16, 16), kvdock.LayerSpec(2, 2, 16, 16, window=8)
STATE = StateLayerSpec([Buffer("conv", (24, 4), BF16), Buffer("recurrent", (4, 16, 16), F32), Buffer("steps", (3,), torch.uint8)])
MORE = {
    "latents": kvdock.KVSpec((kvdock.MLALayerSpec(32, 8),) * 3, 64, BF16),
    "one layer of latents": kvdock.KVSpec((kvdock.MLALayerSpec(32, 8),), 64, BF16),
    "mixed": kvdock.KVSpec((WINDOW, FULL, STATE, kvdock.MLALayerSpec(32, 8), OpaqueLayerSpec(40)), 4096, F32),
}
EVERY = {**SPECS, **MORE}
PAIRS = [(0, 8), (5, 0), (-1, 3), (0, 1)]


def make(spec: kvdock.KVSpec, ops: kvdock.OpDispatcher | None, blocks: int = 6, seed: int = 0, **options: Any) -> kvdock.PagedKVCache:
    """Return a cache full of bits."""
    cache = kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(num_blocks=blocks, **{"block_size": 4, **options}), CPU, ops=ops)
    for pool in cache._store.pools:
        memory = pool.memory.view(torch.uint8) if pool.memory.dim() else pool.memory
        memory.copy_(random_bits(memory.shape, torch.uint8, seed))
    return cache


def kept(cache: kvdock.PagedKVCache, group: int | None = None) -> dict[tuple[int, str], torch.Tensor]:
    """Return a copy of the bytes of each buffer, ``[num_blocks, bytes]``."""
    found = {(layer, name): view for layer in range(cache.num_layers) for name, view in cache.buffers(layer).items()}
    return {
        key: view.reshape(len(view), -1).view(torch.uint8).clone()
        for key, view in found.items()
        if group is None or cache.group_of(*key) == group
    }


def expected(src: kvdock.PagedKVCache, dst: kvdock.PagedKVCache, pairs: Any) -> dict[tuple[int, str], torch.Tensor]:
    after, source = kept(dst), kept(src)
    for a, b in pairs:
        for key in after:
            if a >= 0:
                after[key][b] = source[key][a]
    return after


def same(one: dict[tuple[int, str], torch.Tensor], other: dict[tuple[int, str], torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", EVERY)
def test_every_layer_between_any_layouts(name: str, ops: kvdock.OpDispatcher) -> None:
    orders: Any = LAYOUTS if name != "mixed" else [(None, heads) for heads in kvdock.HeadLayout]
    for (number, one), other in itertools.product(enumerate(orders), orders):
        if name == "mixed" and one is not other:
            continue  # a block belongs to one group: see the next test
        src, dst = (
            make(EVERY[name], ops, blocks, seed, layout=layout, head_layout=heads, alignment=1 if number % 2 else 64)
            for (layout, heads), blocks, seed in ((one, 6, 1), (other, 9, 2))
        )
        after, before = expected(src, dst, PAIRS), kept(src)
        src.swap_blocks(dst, PAIRS)
        assert same(kept(dst), after), (one, other)
        assert same(kept(src), before), "sources stay"
        dst.swap_blocks(src, [(8, 3)])
        assert same(kept(src), expected(dst, src, [(8, 3)])), (one, other)


def test_with_another_order_of_heads_only_the_group_is_swapped(ops: kvdock.OpDispatcher) -> None:
    src, dst = make(MORE["mixed"], ops), make(MORE["mixed"], ops, seed=3, head_layout=kvdock.HeadLayout.HND)
    group = src.group_of(1)
    after, before = expected(src, dst, [(2, 4)]), kept(dst)
    src.swap_blocks(dst, [(2, 4)], group=group)
    own = kept(dst, group)
    assert own
    assert same(own, {key: after[key] for key in own})
    assert not same(own, {key: before[key] for key in own})


@pytest.mark.parametrize(
    ("name", "layouts", "alignment", "calls"),
    [
        ("uniform", (0, 2), 1, 2),
        ("uniform", (0, 0), 1, 2),
        ("uniform", (0, 1), 1, 2),
        ("uniform", (2, 1), 64, 2),
        ("latents", (2, 3), 1024, 3),  # 3 times 320 bytes and a gap of 64: a block is no whole number of those of a layer
        ("layers differ", (0, 2), 1, 6),
        ("layers differ", (0, 3), 1, 6),  # each of its layers is another
        ("latents", (0, 2), 1, 2),
        ("latents", (0, 3), 1, 1),
    ],
)
def test_as_few_calls_as_layouts_allow(name: str, layouts: tuple[int, int], alignment: int, calls: int) -> None:
    """Keys and values of all equal layers at once, also where heads are in another order; else each buffer."""
    runtime, count = counting_runtime("counting")
    options = [{"layout": layout, "head_layout": heads, "alignment": alignment} for layout, heads in LAYOUTS]
    src, dst = (make(EVERY[name], runtime.dispatcher, **options[at]) for at in layouts)
    for _ in range(2):
        count.clear()
        src.swap_blocks(dst, [(0, 1), (2, 3)])
        assert dict(count) == {("counting", "swap_blocks_"): calls}


ORDERS = {"head_layout": kvdock.HeadLayout.NHD}, {"head_layout": kvdock.HeadLayout.HND}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_blocks_of_all_layers_have_numbers_of_their_own_and_errors_name_what_was_passed(
    dtype: torch.dtype, ops: kvdock.OpDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block 6 of a layer would be block 0 of the next, and padding a block of the one before. Nothing but blocks is written."""
    for layout in kvdock.KVCacheLayout:
        src, dst = (make(SPECS["uniform"], ops, seed=seed, layout=layout, **order) for seed, order in enumerate(ORDERS))
        good = torch.tensor([[5, 0], [-1, 3], [2, -7], [0, 5], [-(2**31), -(2**31)]], dtype=dtype)
        after = expected(src, dst, [(5, 0), (0, 5)])
        src.swap_blocks(dst, good)
        assert same(kept(dst), after)
        src.swap_blocks(dst, good[:0])
        src.swap_blocks(dst, good[1:3])
        for bad, error, text in (
            ([[1, 1], [6, 0]], kvdock.IndexRangeError, r"block_pairs\[1, 0\]: expected a block id below 6, .*, got 6"),
            ([[1, 6], [0, 0]], kvdock.IndexRangeError, r"block_pairs\[0, 1\]: expected a block id below 6, .*, got 6"),
            ([[1, 2], [0, 2]], kvdock.errors.ArgumentValueError, r"block_pairs\[1\]: .* got destination 2 twice"),
        ):
            pairs = torch.tensor(bad, dtype=dtype)
            with pytest.raises(error, match=rf"^swap_blocks_: {text}"):
                src.swap_blocks(dst, pairs)
            monkeypatch.setattr("kvdock.cache.routes.HOST", torch.device("meta"))  # as for pairs on a device
            with kvdock.debug(), pytest.raises(error, match=rf"^swap_blocks_: {text}"):
                src.swap_blocks(dst, pairs)
            monkeypatch.undo()
        assert same(kept(dst), after)


def test_pairs_of_which_the_op_makes_errors_are_not_taken_for_numbers(ops: kvdock.OpDispatcher) -> None:
    src, dst = (make(SPECS["uniform"], ops, seed=seed, **order) for seed, order in enumerate(ORDERS))
    src.swap_blocks(dst, [(0, 0)])
    after = kept(dst)
    apart = torch.tensor([[1, 3], [2, 4]]).t()
    for pairs in (apart, torch.tensor([[1.0, 2.0]]), torch.tensor([1, 2]), torch.zeros((2, 2), dtype=torch.int64, device="meta")):
        with pytest.raises(kvdock.KVDockError, match="block_pairs"):
            src.swap_blocks(dst, pairs)
    assert same(kept(dst), after)


def test_a_backend_named_when_the_cache_was_made_serves_it() -> None:
    runtime, count = counting_runtime("first", "second")
    with kvdock.use_backend("second"):
        src = make(SPECS["uniform"], runtime.dispatcher)
    assert src.backend_name == "second"
    dst = make(SPECS["uniform"], runtime.dispatcher)
    assert dst.backend_name is None
    dst.swap_blocks(src, [(0, 1)])
    assert {name for name, _ in count} == {"second"}, "of two in host memory, that of the destination"


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "itself": (lambda src: (src, {}), kvdock.ArgumentValueError, r"dst: expected another cache, got the cache itself. Fix: .*copy_blocks"),
    "no cache": (lambda src: (3, {}), kvdock.ArgumentTypeError, "dst: expected another cache in blocks, got 3"),
    "blocks of another size": (
        lambda src: (make(SPECS["uniform"], None, block_size=8), {}),
        kvdock.ArgumentValueError,
        r"dst: expected what this one keeps: blocks of \[4, 2, 8\] float32 in group 0 as 'k' of layer 0, got blocks of \[8, 2, 8\] float32",
    ),
    "other layers": (lambda src: (make(SPECS["layers differ"], None), {}), kvdock.ArgumentValueError, "Fix: make both of one KVSpec"),
    "more layers": (
        lambda src: (
            make(kvdock.KVSpec.uniform(num_layers=4, num_kv_heads=2, head_dim=8, max_positions=64, dtype=F32), None), {}
        ),
        kvdock.ArgumentValueError,
        "expected what this one keeps: nothing as 'k' of layer 3, got blocks",
    ),
    "no such group": (lambda src: (make(SPECS["uniform"], None), {"group": 1}), kvdock.IndexRangeError, "group: expected 0 to 0, got 1"),
    "a group that is no number": (lambda src: (make(SPECS["uniform"], None), {"group": "k"}), kvdock.ArgumentTypeError, "group: "),
    "a block beyond": (
        lambda src: (make(SPECS["uniform"], None), {"block_pairs": [(0, 1), (1, 6)]}),
        kvdock.IndexRangeError,
        r"swap_blocks_: block_pairs\[1, 1\]: .*dst_cache",
    ),
    "no pairs": (lambda src: (make(SPECS["uniform"], None), {"block_pairs": [0, 1]}), kvdock.ArgumentValueError, "block_pairs: "),
}  # fmt: skip


@pytest.mark.parametrize(("change", "error", "text"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused_and_nothing_is_written(change: Any, error: type[Exception], text: str) -> None:
    src = make(SPECS["uniform"], None)
    dst, options = change(src)
    before = kept(dst) if isinstance(dst, kvdock.PagedKVCache) else {}
    for _ in range(2):
        with pytest.raises(error, match=text):
            src.swap_blocks(dst, **{"block_pairs": [(0, 1)], **options})
    assert not before or same(kept(dst), before)


def test_a_deep_copy_swaps_its_own_memory(ops: kvdock.OpDispatcher) -> None:
    src, dst = make(SPECS["uniform"], ops), make(SPECS["uniform"], ops, seed=5)
    src.swap_blocks(dst, [(0, 1)])
    twin, shallow = copy.deepcopy(src), copy.copy(src)
    src.reset()
    after = expected(twin, dst, [(3, 4)])
    twin.swap_blocks(dst, [(3, 4)])
    assert same(kept(dst), after)
    shallow.swap_blocks(dst, [(3, 4)])
    assert all(not buffer[4].any() for buffer in kept(dst).values()), "a shallow copy shares the memory"


def test_a_destination_is_not_kept(ops: kvdock.OpDispatcher) -> None:
    src, dst = make(SPECS["uniform"], ops), make(SPECS["uniform"], ops)
    src.swap_blocks(dst, [(0, 1)])
    gone = weakref.ref(dst)
    del dst
    gc.collect()
    assert gone() is None


def test_an_engines_memory_is_swapped_with_a_pool_of_its_own(ops: kvdock.OpDispatcher) -> None:
    spec, config = SPECS["uniform"], kvdock.PagedKVCacheConfig(num_blocks=6, block_size=4)
    tensors = [(torch.zeros(6, 4, 2, 8), torch.zeros(6, 4, 2, 8)) for _ in range(3)]
    given = kvdock.PagedKVCache.from_tensors(spec, config, CPU, tensors, ops=ops)
    src = make(spec, ops, layout=kvdock.KVCacheLayout.PAGE_FIRST)
    after = expected(src, given, [(1, 2)])
    src.swap_blocks(given, [(1, 2)])
    assert same(kept(given), after)
