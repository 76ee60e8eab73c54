"""The layouts."""

from __future__ import annotations

import pickle

import pytest
import torch

import kvdock
from kvdock import layout
from support_caches import runtime_for


def test_the_names_are_settled() -> None:
    assert [member.name for member in kvdock.KVCacheLayout] == ["LAYER_FIRST", "PAGE_FIRST"]
    assert [member.name for member in kvdock.HeadLayout] == ["NHD", "HND"]
    assert layout.__all__ == ["HeadLayout", "KVCacheLayout"]


@pytest.mark.parametrize("member", [*kvdock.KVCacheLayout, *kvdock.HeadLayout])
def test_a_layout_can_be_written_down_and_read_back(member: kvdock.KVCacheLayout | kvdock.HeadLayout) -> None:
    assert type(member)(member.value) is member
    assert pickle.loads(pickle.dumps(member)) is member  # noqa: S301 - our own bytes
    assert member.value == member.name.lower()


def test_the_defaults_are_what_attention_kernels_read() -> None:
    config = kvdock.PagedKVCacheConfig(num_blocks=1)
    assert config.layout is None, "layers first where one pool by layers serves all"
    spec = kvdock.KVSpec.uniform(num_layers=2, num_kv_heads=1, head_dim=4, max_positions=8, dtype=torch.float32)
    cache = kvdock.create_cache(spec, config, kvdock.RankInfo("cpu"), ops=runtime_for("portable").dispatcher)
    assert cache.k_cache(1).data_ptr() - cache.k_cache(0).data_ptr() == cache.k_cache(0).nbytes
    assert config.head_layout is kvdock.HeadLayout.NHD
    assert config.block_size == 16
