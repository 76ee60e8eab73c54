"""A cache of latents: what it takes, where each place lies, and what attention over it means."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import kvdock
from kvdock_conformance import reference
from support_caches import (
    CPU,
    LAYOUT_NAMES,
    LAYOUTS,
    RUNTIMES,
    addresses,
    bits,
    counting_runtime,
    needs_backends,
    random_bits,
    read_slots,
    runtime_for,
    write_slots,
)

DEEPSEEK = kvdock.MLALayerSpec(512, 64)
UNLIKE = (kvdock.MLALayerSpec(16, 4), kvdock.MLALayerSpec(5, 3), kvdock.MLALayerSpec(16, 4), kvdock.MLALayerSpec(16, 4))
SCALE = 0.3


def make(
    layers: Any, ops: kvdock.OpDispatcher | None = None, rank: kvdock.RankInfo = CPU, dtype: Any = torch.float32, **how: Any
) -> kvdock.MLAKVCache:
    spec = kvdock.KVSpec(tuple(layers), 64, dtype)
    config = kvdock.PagedKVCacheConfig(**{"num_blocks": 6, "block_size": 4, **how})
    cache = kvdock.create_cache(spec, config, rank, ops=ops or runtime_for(RUNTIMES[0]).dispatcher)
    assert isinstance(cache, kvdock.MLAKVCache)
    return cache


def new(cache: kvdock.MLAKVCache, layer: int, lead: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return latents and rotary parts out of one projection."""
    of = cache.spec.layers[layer]
    assert isinstance(of, kvdock.MLALayerSpec)
    whole = random_bits((*lead, of.kv_lora_rank + of.rope_dim + 3), cache.dtype, seed)
    return whole[..., : of.kv_lora_rank], whole[..., of.kv_lora_rank : of.kv_lora_rank + of.rope_dim]


def test_a_token_takes_what_the_model_says_and_no_more() -> None:
    layers, blocks = 61, 3
    cache = make([DEEPSEEK] * layers, dtype=torch.bfloat16, num_blocks=blocks, block_size=64)
    assert cache.nbytes == layers * blocks * 64 * 576 * 2
    assert cache.kv_cache(60).shape == cache.k_cache(60).shape == (blocks, 64, 1, 576)
    assert cache.v_cache(60).shape == (blocks, 64, 1, 512)
    budget = make([DEEPSEEK] * 2, dtype=torch.bfloat16, num_blocks=None, block_size=16, max_kv_memory_bytes=2**20)
    assert budget.num_blocks == 2**20 // (2 * 16 * 576 * 2)


@pytest.mark.parametrize("rank", [kvdock.RankInfo("cpu", 8, 3), kvdock.RankInfo("cpu", 3, 2)], ids=["8", "3"])
def test_every_rank_holds_all_of_a_latent(rank: kvdock.RankInfo) -> None:
    assert make([DEEPSEEK], rank=rank).nbytes == make([DEEPSEEK]).nbytes


@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
def test_every_place_has_an_address_of_its_own_and_values_lie_in_keys(layout: tuple[Any, Any]) -> None:
    cache = make(UNLIKE, layout=layout[0], head_layout=layout[1])
    keys = [cache.kv_cache(i) for i in range(4)]
    found = torch.cat([addresses(view).flatten() for view in keys])
    assert len(found.unique()) == len(found) == cache.nbytes // 4
    for layer, view in enumerate(keys):
        rank = cache.v_cache(layer).shape[3]
        assert torch.equal(addresses(cache.v_cache(layer)), addresses(view)[..., :rank])
        assert cache.k_cache(layer) is view
    assert len({view.untyped_storage().data_ptr() for view in keys}) == 2, "one storage for each group of equal layers"


@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
def test_what_is_written_is_read_and_copied(layout: tuple[Any, Any], ops: kvdock.OpDispatcher) -> None:
    for layers in (UNLIKE, UNLIKE[:1], UNLIKE[:2]):
        cache = make(layers, ops, layout=layout[0], head_layout=layout[1])
        held = [bits(cache.kv_cache(i)).clone() for i in range(len(layers))]
        for seed, slots in enumerate((torch.tensor([[5, -1], [0, 23]]), torch.tensor([7]), torch.randperm(24), torch.tensor([1, -2]))):
            for layer in range(len(layers)):
                parts = new(cache, layer, tuple(slots.shape), seed)
                views = cache.update(layer, *parts, slots)
                assert views == (cache.k_cache(layer), cache.v_cache(layer))
                held[layer] = write_slots(held[layer], bits(torch.cat(parts, -1)).unsqueeze(-2), slots)
                got, out = cache.gather(layer, slots), [torch.full_like(part, 7) for part in parts]
                assert all(a is b for a, b in zip(cache.gather(layer, slots, tuple(out)), out, strict=True))
                for found in (got, out):
                    assert torch.equal(bits(torch.cat([*found], -1)), read_slots(held[layer], slots).squeeze(-2))
        cache.copy_blocks([(0, 3), (5, 1), (-1, 2)])
        for layer in range(len(layers)):
            held[layer][3], held[layer][1] = held[layer][0], held[layer][5]
            assert torch.equal(bits(cache.kv_cache(layer)), held[layer])
        cache.reset()
        assert not any(bits(cache.kv_cache(layer)).any() for layer in range(len(layers)))


def filled(cache: kvdock.MLAKVCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Write 6 and 3 tokens of two sequences over NaN; returns their table and lengths."""
    cache.kv_cache(layer).fill_(torch.nan)
    table, lens = torch.tensor([[5, 2], [4, 99]], dtype=torch.int32), torch.tensor([6, 3])
    slots = torch.tensor([20, 21, 22, 23, 8, 9, 16, 17, 18])
    rows = torch.randn(9, cache.kv_cache(layer).shape[3], generator=torch.Generator().manual_seed(layer)).to(cache.dtype)
    rank = cache.v_cache(layer).shape[3]
    cache.update(layer, rows[:, :rank], rows[:, rank:], slots)
    return table, lens


@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_in_the_absorbed_form(layout: tuple[Any, Any], heads: int, dtype: torch.dtype, ops: kvdock.OpDispatcher) -> None:
    cache = make([UNLIKE[0], DEEPSEEK], ops, dtype=dtype, layout=layout[0], head_layout=layout[1])
    bound = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for layer, of in enumerate((UNLIKE[0], DEEPSEEK)):
        table, lens = filled(cache, layer)
        for cu, count in ((None, 2), (torch.tensor([0, 3, 4]), 4)):
            q = (torch.randn(count, heads, of.kv_lora_rank + of.rope_dim) / of.kv_lora_rank**0.5).to(dtype)
            got = cache.attend(layer, q, table, lens, scale=SCALE, cu_query_lens=cu, max_query_len=3 if count > 2 else 1)
            expected = torch.empty(count, heads, of.kv_lora_rank, dtype=torch.float64)
            k, v = cache.k_cache(layer), cache.v_cache(layer)
            reference.paged_attention(q, k, v, table, lens, cu, None, None, count, SCALE, True, None, None, expected, None)
            torch.testing.assert_close(got.double(), expected, rtol=bound, atol=bound)


def test_it_is_attention_over_the_keys_and_values_that_latents_expand_to() -> None:
    """As a model without the absorption has it: 3 heads of 6 + 4 elements for keys, and of 5 for values."""
    heads, nope, rope, v_dim, rank = 3, 6, 4, 5, 16
    cache = make([kvdock.MLALayerSpec(rank, rope)], dtype=torch.float64)
    table, lens = filled(cache, 0)
    up_k, up_v = torch.randn(heads, nope, rank, dtype=torch.float64), torch.randn(heads, v_dim, rank, dtype=torch.float64)
    q_nope, q_rope = torch.randn(2, heads, nope, dtype=torch.float64), torch.randn(2, heads, rope, dtype=torch.float64)
    scale = (nope + rope) ** -0.5
    absorbed = torch.cat([torch.einsum("nhd,hdr->nhr", q_nope, up_k), q_rope], -1)
    got = torch.einsum("nhr,hdr->nhd", cache.attend(0, absorbed, table, lens, scale=scale), up_v)
    for row, slots in enumerate(([20, 21, 22, 23, 8, 9], [16, 17, 18])):
        kv_c, k_pe = cache.gather(0, torch.tensor(slots))
        keys = torch.cat([torch.einsum("tr,hdr->htd", kv_c, up_k), k_pe.expand(heads, -1, -1)], -1)
        scores = torch.einsum("hd,htd->ht", torch.cat([q_nope, q_rope], -1)[row], keys) * scale
        expected = torch.einsum("ht,htd->hd", scores.softmax(-1), torch.einsum("tr,hdr->htd", kv_c, up_v))
        torch.testing.assert_close(got[row], expected)


def test_a_scale_must_be_said() -> None:
    cache = make([UNLIKE[0]])
    table, lens = filled(cache, 0)
    with pytest.raises(
        kvdock.ArgumentValueError, match=r"attend: scale: expected a number, since rank \+ rope is no head's length, got None"
    ):
        cache.attend(0, torch.zeros(2, 4, 20), table, lens)


@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
def test_a_deep_copy_has_memory_of_its_own(layout: tuple[Any, Any], ops: kvdock.OpDispatcher) -> None:
    for layers in (UNLIKE, UNLIKE[:1]):
        cache = make(layers, ops, layout=layout[0], head_layout=layout[1])
        table, lens = filled(cache, 0)
        q = torch.randn(2, 4, 20)
        twin, before = copy.deepcopy(cache), cache.attend(0, q, table, lens, scale=SCALE)
        assert twin.nbytes == cache.nbytes
        assert twin.v_cache(0).data_ptr() == twin.k_cache(0).data_ptr() != cache.k_cache(0).data_ptr()
        assert twin.k_cache(0).stride() == cache.k_cache(0).stride()
        twin.update(0, torch.ones(1, 16), torch.ones(1, 4), torch.tensor([20]))
        twin.copy_blocks([(5, 0)])
        assert torch.equal(cache.attend(0, q, table, lens, scale=SCALE), before)
        assert bool((twin.gather(0, torch.tensor([0]))[0] == 1).all())
        assert not torch.equal(twin.attend(0, q, table, lens, scale=SCALE), before)
        shared = copy.copy(cache)
        shared.update(0, torch.ones(1, 16), torch.ones(1, 4), torch.tensor([20]))
        assert not torch.equal(cache.attend(0, q, table, lens, scale=SCALE), before)


def test_it_keeps_the_backend_that_it_was_made_with() -> None:
    runtime, calls = counting_runtime("usual", "other")
    with kvdock.use_backend("other"):
        cache = make([UNLIKE[0]], runtime.dispatcher)
    table, lens = filled(cache, 0)
    cache.gather(0, torch.tensor([20]))
    cache.attend(0, torch.zeros(2, 4, 20), table, lens, scale=SCALE)
    cache.copy_blocks([(0, 1)])
    assert {*calls} == {("other", op) for op in ("mla_caching_", "mla_gather", "paged_attention", "copy_blocks_")}


@pytest.mark.parametrize("layer", [-1, 4, True])
def test_a_layer_that_is_not_there(layer: Any) -> None:
    cache = make(UNLIKE)
    uses = (
        lambda: cache.update(layer, torch.ones(1, 16), torch.ones(1, 4), torch.tensor([0])),
        lambda: cache.gather(layer, torch.tensor([0])),
        lambda: cache.attend(layer, torch.ones(1, 1, 20), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1]), scale=1.0),
        lambda: cache.kv_cache(layer),
    )
    for use in uses:
        with pytest.raises(kvdock.KVDockError, match="MLAKVCache: layer: expected "):
            use()
    assert str(cache) == f"MLAKVCache(4 layers, 6 blocks of 4, torch.float32, {cache.nbytes} bytes on cpu)"


@needs_backends  # the ops are those of the process
@pytest.mark.parametrize("layers", [1, 3])
def test_a_compiled_step_writes_copies_and_attends(layers: int) -> None:
    cache = make([UNLIKE[0]] * layers)
    table, lens = filled(cache, layers - 1)
    slots, pairs = torch.tensor([10, 19]), torch.tensor([[5, 0]])
    lens = lens + 1
    rows, q = torch.randn(2, 20), torch.randn(2, 4, 20)

    def step(rows: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k_cache, v_cache = cache.update(layers - 1, rows[:, :16], rows[:, 16:], slots)
        found = kvdock.ops.paged_attention(q, k_cache, v_cache, table, lens, scale=SCALE)
        cache.copy_blocks(pairs)
        return cache.attend(layers - 1, q, table, lens, scale=SCALE), found, *cache.gather(layers - 1, slots)

    twin = copy.deepcopy(cache.kv_cache(layers - 1))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        rows, q = torch.randn(2, 20), torch.randn(2, 4, 20)
        got = compiled(rows, q)
        held = cache.kv_cache(layers - 1).clone()
        cache.kv_cache(layers - 1).copy_(twin)
        expected = step(rows, q)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert torch.equal(held.nan_to_num(7), cache.kv_cache(layers - 1).nan_to_num(7))
        assert torch.equal(torch.cat(got[2:], -1), rows)
