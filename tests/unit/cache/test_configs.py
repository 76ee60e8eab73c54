"""What a user may choose about a cache: values that are frozen, checked, and interchangeable when equal."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

import kvdock
from kvdock.cache.interface import OpSource
from support_caches import CPU, SPECS

CONFIGS: dict[str, kvdock.CacheConfig] = {
    "static": kvdock.StaticKVCacheConfig(),
    "static, chosen": kvdock.StaticKVCacheConfig(max_batch_size=3, max_cache_len=20),
    "paged": kvdock.PagedKVCacheConfig(num_blocks=4),
    "paged, chosen": kvdock.PagedKVCacheConfig(
        max_kv_memory_bytes=2**20,
        block_size=8,
        num_blocks=2,
        cache_dtype=torch.float32,
        layout=kvdock.KVCacheLayout.PAGE_FIRST,
        head_layout=kvdock.HeadLayout.HND,
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_unique_copy_is_equal_and_distinct(config: kvdock.CacheConfig) -> None:
    copy = config.unique_copy()
    assert copy is not config
    assert type(copy) is type(config)
    assert copy == config
    assert hash(copy) == hash(config)
    assert {config: "found"}[copy] == "found"


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_config_is_frozen(config: kvdock.CacheConfig) -> None:
    for field in attrs.fields(type(config)):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(config, field.name, getattr(config, field.name))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_evolving_a_config_checks_it_again(config: Any) -> None:
    field = attrs.fields(type(config))[0].name
    assert attrs.evolve(config, **{field: 2**20}) != CONFIGS["static"]
    with pytest.raises(kvdock.ArgumentValueError, match=f"{type(config).__name__}: {field}"):
        attrs.evolve(config, **{field: -1})


def test_different_configs_are_different() -> None:
    assert len(set(CONFIGS.values())) == len(CONFIGS)
    assert CONFIGS["static"] != CONFIGS["paged"]


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"max_batch_size": 0}, kvdock.ArgumentValueError, "StaticKVCacheConfig: max_batch_size: expected at least 1, got 0"),
        ({"max_batch_size": -4}, kvdock.ArgumentValueError, "max_batch_size.*got -4"),
        ({"max_batch_size": 1.0}, kvdock.ArgumentTypeError, "max_batch_size: expected an int.*got 1.0"),
        ({"max_batch_size": True}, kvdock.ArgumentTypeError, "max_batch_size: expected an int.*got True"),
        ({"max_batch_size": None}, kvdock.ArgumentTypeError, "max_batch_size: expected an int.*got None"),
        ({"max_cache_len": -1}, kvdock.ArgumentValueError, "StaticKVCacheConfig: max_cache_len: expected at least 0, got -1"),
        ({"max_cache_len": "8"}, kvdock.ArgumentTypeError, "max_cache_len: expected an int.*got '8'"),
    ],
)
def test_wrong_settings_of_a_static_cache(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        kvdock.StaticKVCacheConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({}, kvdock.ArgumentValueError, "expected max_kv_memory_bytes or num_blocks, got neither. Fix: say how large"),
        ({"block_size": 16}, kvdock.ArgumentValueError, "got neither"),
        ({"num_blocks": 0}, kvdock.ArgumentValueError, "PagedKVCacheConfig: num_blocks: expected at least 1, got 0"),
        ({"num_blocks": 2.0}, kvdock.ArgumentTypeError, "num_blocks: expected an int.*got 2.0"),
        ({"max_kv_memory_bytes": 0}, kvdock.ArgumentValueError, "max_kv_memory_bytes: expected at least 1, got 0"),
        ({"max_kv_memory_bytes": 1e9}, kvdock.ArgumentTypeError, "max_kv_memory_bytes: expected an int.*got 1000000000.0"),
        ({"num_blocks": 1, "block_size": 0}, kvdock.ArgumentValueError, "block_size: expected at least 1, got 0"),
        ({"num_blocks": 1, "block_size": None}, kvdock.ArgumentTypeError, "block_size: expected an int.*got None"),
        ({"num_blocks": 1, "layout": "layer_first"}, kvdock.ArgumentTypeError, "layout: expected one of.*LAYER_FIRST.*got 'layer_first'"),
        ({"num_blocks": 1, "head_layout": kvdock.KVCacheLayout.PAGE_FIRST}, kvdock.ArgumentTypeError, "head_layout: expected one of.*HND"),
        ({"num_blocks": 1, "cache_dtype": "bfloat16"}, kvdock.ArgumentTypeError, "cache_dtype: expected one of torch.float16"),
        ({"num_blocks": 1, "cache_dtype": torch.int64}, kvdock.ArgumentTypeError, "cache_dtype: expected one of.*got torch.int64"),
        ({"num_blocks": 1, "cache_dtype": torch.bool}, kvdock.ArgumentTypeError, "cache_dtype: expected one of.*got torch.bool"),
    ],
)
def test_wrong_settings_of_a_paged_cache(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        kvdock.PagedKVCacheConfig(**settings)


@pytest.mark.parametrize("dtype", kvdock.plugin.QUANTISED_DTYPES, ids=str)
def test_a_quantised_cache_is_not_there_yet(dtype: torch.dtype) -> None:
    with pytest.raises(kvdock.UnsupportedError, match=r"cache_dtype:.*quantised caches are not there yet. Fix: store the model's own"):
        kvdock.PagedKVCacheConfig(num_blocks=1, cache_dtype=dtype)


@pytest.mark.parametrize("dtype", kvdock.plugin.COPY_DTYPES, ids=str)
def test_only_the_models_own_dtype_is_stored(dtype: torch.dtype, ops: kvdock.OpDispatcher) -> None:
    spec = SPECS["uniform"]
    config = kvdock.PagedKVCacheConfig(num_blocks=1, cache_dtype=dtype)
    if dtype == spec.dtype:
        assert kvdock.create_cache(spec, config, CPU, ops=ops).dtype == dtype
        return
    with pytest.raises(
        kvdock.UnsupportedError, match=rf"cache_dtype: expected torch.float32, the model's own, got {dtype}.*Fix: leave cache_dtype out"
    ):
        kvdock.create_cache(spec, config, CPU, ops=ops)


@pytest.mark.parametrize(
    ("config", "kind"),
    [(kvdock.PagedKVCacheConfig(num_blocks=1), kvdock.PagedKVCache), (kvdock.StaticKVCacheConfig(), kvdock.StaticKVCache)],
)
def test_the_class_follows_from_the_config(config: kvdock.CacheConfig, kind: type[kvdock.Cache], ops: kvdock.OpDispatcher) -> None:
    assert type(kvdock.create_cache(SPECS["uniform"], config, CPU, ops=ops)) is kind


def test_a_config_of_ones_own_makes_its_own_cache(ops: kvdock.OpDispatcher) -> None:
    made: list[object] = []

    @attrs.frozen
    class Doubled(kvdock.CacheConfig):
        """Makes a static cache with twice the rows."""

        rows: int

        def unique_copy(self) -> Doubled:
            return attrs.evolve(self)

        def build(self, spec: kvdock.KVSpec, rank: kvdock.RankInfo, ops: OpSource) -> kvdock.Cache:
            made.append(ops)
            return kvdock.StaticKVCacheConfig(max_batch_size=2 * self.rows).build(spec, rank, ops)

    cache = kvdock.create_cache(SPECS["uniform"], Doubled(3), CPU, ops=ops)
    assert cache.k_cache(0).shape[0] == 6
    assert made == [ops]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (({"layers": 2}, CONFIGS["paged"], CPU), "create_cache: spec: expected a KVSpec, got {'layers': 2}"),
        ((SPECS["uniform"], "paged", CPU), "create_cache: config: expected a CacheConfig, got 'paged'"),
        ((SPECS["uniform"], kvdock.PagedKVCacheConfig, CPU), "create_cache: config: expected a CacheConfig"),
        ((SPECS["uniform"], CONFIGS["paged"], "cpu"), "create_cache: rank: expected a RankInfo, got 'cpu'"),
        ((SPECS["uniform"], CONFIGS["paged"], torch.device("cpu")), "create_cache: rank: expected a RankInfo"),
    ],
)
def test_create_cache_names_an_argument_of_another_type(arguments: tuple[Any, Any, Any], text: str) -> None:
    with pytest.raises(kvdock.ArgumentTypeError, match=text):
        kvdock.create_cache(*arguments)


def test_the_contract_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        kvdock.Cache()  # type: ignore[abstract]
    with pytest.raises(TypeError, match="abstract"):
        kvdock.CacheConfig()  # type: ignore[abstract]
    assert kvdock.Cache.__doc__ is not None
    assert "Threads" in kvdock.Cache.__doc__
