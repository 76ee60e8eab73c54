"""Kinds of layers: what each keeps, and numbers that cannot be meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

import kvdock
from kvdock import KVSpec, LayerSpec, MLALayerSpec, RankInfo
from kvdock.layers import (
    Buffer,
    ChunkedLayerSpec,
    HybridLayerSpec,
    KeepAll,
    KeepChunk,
    KeepState,
    KeepWindow,
    LayerKind,
    OpaqueLayerSpec,
    Part,
    SharedLayerSpec,
    StateLayerSpec,
)

BF16, F32 = torch.bfloat16, torch.float32
STATE = StateLayerSpec([Buffer("conv", [6, 4], BF16), Buffer("recurrent", (2, 3, 5), F32)])

PARTS: dict[str, tuple[LayerKind, list[Part]]] = {
    "full": (LayerSpec(8, 4, 16, 12), [Part((Buffer("k", (4, 16), BF16), Buffer("v", (2, 12), BF16)), KeepAll())]),
    "window": (LayerSpec(2, 2, 8, 8, 64), [Part((Buffer("k", (1, 8), BF16), Buffer("v", (1, 8), BF16)), KeepWindow(64))]),
    "sinks": (LayerSpec(2, 2, 8, 8, 64, sinks=4), [Part((Buffer("k", (1, 8), BF16), Buffer("v", (1, 8), BF16)), KeepWindow(64, 4))]),
    "chunks": (ChunkedLayerSpec(2, 2, 8, 8, 64), [Part((Buffer("k", (1, 8), BF16), Buffer("v", (1, 8), BF16)), KeepChunk(64))]),
    "latent": (MLALayerSpec(512, 64), [Part((Buffer("kv", (576,), BF16, values=512),), KeepAll())]),
    "state": (STATE, [Part((Buffer("conv", (6, 4), BF16), Buffer("recurrent", (2, 3, 5), F32)), KeepState())]),
    "shared": (SharedLayerSpec(0), []),
    "opaque": (OpaqueLayerSpec(328), [Part((Buffer("bytes", (328,), torch.uint8),), KeepAll())]),
}


@pytest.mark.parametrize("name", PARTS)
def test_what_a_rank_of_two_keeps(name: str) -> None:
    layer, expected = PARTS[name]
    assert list(layer.parts(RankInfo("cpu", 2, 1).head_range, BF16)) == expected
    assert hash(layer) == hash(attrs.evolve(layer))


def test_a_hybrid_layer_keeps_what_its_kinds_do() -> None:
    layer = HybridLayerSpec([LayerSpec(2, 2, 8, 8), STATE])
    split = RankInfo("cpu").head_range
    assert layer.parts(split, BF16) == (*LayerSpec(2, 2, 8, 8).parts(split, BF16), *STATE.parts(split, BF16))


def test_bytes() -> None:
    assert Buffer("conv", (6, 4), BF16).nbytes == 48
    assert STATE.parts(RankInfo("cpu").head_range, BF16)[0].nbytes == 48 + 120


@attrs.frozen
class EveryOther(LayerKind):
    """A kind of somebody else's."""

    def parts(self, split: Any, dtype: torch.dtype) -> tuple[Part, ...]:
        return (Part((Buffer("x", (3,), dtype),), KeepAll()),)


def test_a_kind_of_your_own_is_one_class() -> None:
    spec = KVSpec([EveryOther()] * 2, 100, BF16)
    plan = kvdock.plan_blocks(spec, kvdock.PagedKVCacheConfig(num_blocks=3, block_size=4), RankInfo("cpu"))
    assert plan.nbytes == 3 * 2 * 32, "4 tokens of 6 bytes take 24, and each layer's place begins at a multiple of 16"


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "sinks without a window": (lambda: LayerSpec(1, 1, 8, 8, sinks=4), kvdock.ArgumentValueError, "sinks: expected 0 without a window"),
    "a window of 0": (lambda: LayerSpec(1, 1, 8, 8, 0), kvdock.ArgumentValueError, "window: expected at least 1, got 0"),
    "a chunk of 0": (lambda: ChunkedLayerSpec(1, 1, 8, 8, 0), kvdock.ArgumentValueError, "chunk: expected at least 1, got 0"),
    "chunks without heads": (lambda: ChunkedLayerSpec(0, 1, 8, 8, 4), kvdock.ArgumentValueError, "ChunkedLayerSpec: num_k_heads"),
    "a state without buffers": (lambda: StateLayerSpec(()), kvdock.ArgumentTypeError, r"at least one kvdock.layers.Buffer, got \(\)"),
    "a state of numbers": (lambda: StateLayerSpec(3), kvdock.ArgumentTypeError, "at least one kvdock.layers.Buffer, got 3"),
    "a state without a shape": (
        lambda: Buffer("conv", (), BF16),
        kvdock.ArgumentValueError,
        r"'conv': shape: expected a tuple .* \(\)",
    ),
    "a dimension of 0": (lambda: Buffer("conv", (4, 0), BF16), kvdock.ArgumentValueError, r"'conv': shape\[1\]: expected at least 1"),
    "a dtype that nobody stores": (lambda: Buffer("conv", (4,), torch.int64), kvdock.ArgumentTypeError, "Buffer 'conv': dtype"),
    "a buffer without a name": (lambda: Buffer("", (4,), BF16), kvdock.ArgumentTypeError, "Buffer: name"),
    "more values than elements": (lambda: Buffer("kv", (4,), BF16, 5), kvdock.ArgumentValueError, r"values: .* got 5 of \(4,\)"),
    "values of several rows": (lambda: Buffer("kv", (4, 2), BF16, 1), kvdock.ArgumentValueError, "elements of a row of one dimension"),
    "two of one name": (lambda: StateLayerSpec([Buffer("a", (1,), BF16)] * 2), kvdock.ArgumentValueError, "a name of its own .* a, a"),
    "no bytes": (lambda: OpaqueLayerSpec(0), kvdock.ArgumentValueError, "bytes_per_token: expected at least 1"),
    "one kind": (lambda: HybridLayerSpec([STATE]), kvdock.ArgumentValueError, "at least two kinds, got 1"),
    "a hybrid of hybrids": (
        lambda: HybridLayerSpec([STATE, HybridLayerSpec([STATE, LayerSpec(1, 1, 8, 8)])]),
        kvdock.ArgumentTypeError,
        "kinds that keep something each",
    ),
    "shared with a later one": (
        lambda: KVSpec([SharedLayerSpec(1), LayerSpec(1, 1, 8, 8)], 8, BF16),
        kvdock.ArgumentValueError,
        r"layers\[0\]: expected a layer that keeps something, got SharedLayerSpec\(of=1\)",
    ),
    "shared with itself": (
        lambda: KVSpec([LayerSpec(1, 1, 8, 8), SharedLayerSpec(1)], 8, BF16),
        kvdock.ArgumentValueError,
        r"layers\[1\]: expected an earlier layer, 0 to 0, that keeps something of its own",
    ),
    "shared with one that shares": (
        lambda: KVSpec([LayerSpec(1, 1, 8, 8), SharedLayerSpec(0), SharedLayerSpec(1)], 8, BF16),
        kvdock.ArgumentValueError,
        r"layers\[2\]: expected an earlier layer, 0 to 1, that keeps something of its own",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_meant_is_refused_with_its_name(name: str) -> None:
    make, error, text = BAD[name]
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize("layer", [STATE, OpaqueLayerSpec(8), HybridLayerSpec([LayerSpec(1, 1, 8, 8), STATE])], ids=str)
def test_a_static_cache_says_which_layer_it_does_not_hold(layer: LayerKind) -> None:
    spec = KVSpec([LayerSpec(1, 1, 8, 8), layer], 8, BF16)
    with pytest.raises(kvdock.UnsupportedError, match=r"layers\[1\]: .*which keeps .*Fix: make .*, with a PagedKVCacheConfig"):
        kvdock.create_cache(spec, kvdock.StaticKVCacheConfig(), RankInfo("cpu"))


@pytest.mark.parametrize(
    "config", [kvdock.PagedKVCacheConfig(num_blocks=2, keep_all=True), kvdock.StaticKVCacheConfig()], ids=["paged", "static"]
)
def test_a_layer_that_shares_has_the_same_memory(config: kvdock.CacheConfig) -> None:
    layers = [LayerSpec(1, 1, 8, 8), ChunkedLayerSpec(2, 2, 4, 4, 16), SharedLayerSpec(1), SharedLayerSpec(0)]
    cache, own = (kvdock.create_cache(KVSpec(of, 8, F32), config, RankInfo("cpu")) for of in (layers, layers[:2]))
    assert cache.num_layers == 4
    assert cache.nbytes == own.nbytes
    cache.k_cache(2).fill_(3)
    cache.v_cache(3).fill_(4)
    assert (cache.k_cache(1) == 3).all()
    assert (cache.v_cache(0) == 4).all()
    assert not cache.k_cache(0).any()
    assert not cache.v_cache(1).any()
