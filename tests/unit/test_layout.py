"""The layouts."""

from __future__ import annotations

import pickle

import pytest

import kvdock
from kvdock import layout


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
    assert config.layout is kvdock.KVCacheLayout.LAYER_FIRST
    assert config.head_layout is kvdock.HeadLayout.NHD
    assert config.block_size == 16
