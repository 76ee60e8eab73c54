"""What `plan_blocks` says a sequence needs is what a manager gives it; well-known shapes, at the lengths that they are used at."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdock
from kvdock.errors import ArgumentValueError, StaleHandleError, UnsupportedError, WrongThreadError
from kvdock.layers import Buffer, ChunkedLayerSpec, LayerGroup, LayerSpec, StateLayerSpec
from kvdock.scheduler import CacheManager, CacheSequence
from opskit import PROPERTY
from support_slow import examples

BF16 = torch.bfloat16


def planned(layers: Sequence[Any], block_size: int = 16, max_positions: int = 131_072) -> Any:
    spec = kvdock.KVSpec(layers, max_positions, BF16)
    return kvdock.plan_blocks(spec, kvdock.PagedKVCacheConfig(num_blocks=1, block_size=block_size), kvdock.RankInfo("cpu"))


def run(manager: CacheManager, ids: Sequence[int], at_most: int) -> CacheSequence:
    seq = manager.begin(ids, at_most=at_most)
    while True:
        manager.commit(seq, [], computed=seq.num_tokens)
        if seq.num_tokens >= len(ids):
            return seq
        manager.extend(seq, min(at_most, len(ids) - seq.num_tokens))


def blocks_in_use(manager: CacheManager) -> int:
    """Blocks that sequences need: those that are used, without what is only cached."""
    units = manager._pool.units
    return int(units.blocks.num_used - units.num_idle - manager._pool.evictable * units.num_lasting)


LAYER = st.one_of(
    st.builds(
        lambda heads, window: LayerSpec(heads, heads, 32, 32, window=window), st.sampled_from([1, 2]), st.sampled_from([None, 5, 40])
    ),
    st.builds(lambda heads: LayerSpec(heads, heads, 32, 32, window=24, sinks=4), st.sampled_from([1, 2])),
    st.builds(lambda chunk: ChunkedLayerSpec(1, 1, 32, 32, chunk), st.sampled_from([32, 64])),
    st.just(StateLayerSpec([Buffer("conv", (16, 3), BF16), Buffer("recurrent", (2, 16, 16), torch.float32)])),
)


@settings(PROPERTY, max_examples=examples(30))
@given(layers=st.lists(LAYER, min_size=2, max_size=6), block_size=st.sampled_from([4, 16]), length=st.integers(1, 300))
def test_a_sequence_gets_what_the_plan_says(layers: list[Any], block_size: int, length: int) -> None:
    try:
        plan = planned(layers, block_size, 512)
    except ArgumentValueError:  # bytes that cannot agree
        return
    if len(plan.groups) == 1 and plan.groups[0].retention.keeps_all:
        return
    manager = CacheManager(4000, block_size if all(group.retention.is_state for group in plan.groups) else None, groups=plan.groups)
    seq = run(manager, range(length), 7)
    manager.check_integrity()
    # A state that has just become a checkpoint is that unit's, and the sequence's until it goes on.
    assert blocks_in_use(manager) * plan.bytes_per_block == plan.sequence_bytes(length)
    for number, group in enumerate(plan.groups):
        if not group.retention.is_state:
            slots = seq.slot_mapping(0, length, number)
            assert all(slots[position] >= 0 for span in group.retention.spans(length) for position in span)


SHAPES: dict[str, tuple[list[Any], int]] = {
    "Gemma 3 1B": ([LayerSpec(1, 1, 256, 256, window=None if at % 6 == 5 else 512) for at in range(26)], 32_768),
    "gpt-oss 20B": ([LayerSpec(8, 8, 64, 64, window=128 if at % 2 == 0 else None) for at in range(24)], 32_768),
    "Llama 4 Scout": ([ChunkedLayerSpec(8, 8, 128, 128, 8192) if at % 4 < 3 else LayerSpec(8, 8, 128, 128) for at in range(48)], 32_768),
    "Mistral 7B": ([LayerSpec(8, 8, 128, 128, window=4096)] * 32, 32_768),
}


def kept_by_transformers(layers: Sequence[Any], length: int) -> int:
    """Bytes that Transformers' own cache holds: of a window its last ``window - 1`` tokens, of a chunk as many."""
    total = 0
    for layer in layers:
        limit = getattr(layer, "window", None) or getattr(layer, "chunk", None)
        total += min(length, limit - 1 if limit else length) * (layer.num_k_heads * layer.k_dim + layer.num_v_heads * layer.v_dim) * 2
    return total


@pytest.mark.parametrize("name", SHAPES)
def test_long_sequences_take_what_transformers_own_cache_would(name: str) -> None:
    """With prefixes cached, in chunks of 256 tokens, and in decoding; in a pool that has hardly more."""
    layers, length = SHAPES[name]
    plan = planned(layers)
    needed = kept_by_transformers(layers, length)
    most = plan.sequence_bytes(length - 1) // plan.bytes_per_block  # at its end a chunk is let go
    # While a chunk is computed its tokens are there beside the window, in whole units.
    unit = max(group.block_size for group in plan.groups)
    chunk = sum((256 // unit + 2) * unit // group.block_size for group in plan.groups if not group.retention.keeps_all)
    manager = CacheManager(most + chunk, groups=plan.groups)
    seq = run(manager, np.arange(length - 64), 256)
    highest = 0
    for token in range(length - 64, length):
        manager.extend(seq, 1)
        manager.commit(seq, [token], computed=token + 1)
        highest = max(highest, blocks_in_use(manager))
    manager.check_integrity()
    assert highest * plan.bytes_per_block <= 1.1 * needed
    assert blocks_in_use(manager) * plan.bytes_per_block == plan.sequence_bytes(length)


def test_a_model_of_states_takes_the_same_at_any_length() -> None:
    state = StateLayerSpec([Buffer("recurrent", (4, 16, 16), torch.float32)])
    plan = planned([state] * 8)
    manager = CacheManager(64, groups=plan.groups, state_interval=10**6)
    used = []
    for length in (5, 50, 5000):
        seq = run(manager, range(length), 1000)
        used.append(blocks_in_use(manager))
        manager.abort(seq)
    assert len(set(used)) == 1


def two_groups(num_blocks: int = 64, **how: Any) -> CacheManager:
    groups: tuple[LayerGroup, ...] = planned([LayerSpec(1, 1, 32, 32), LayerSpec(1, 1, 32, 32, window=8)], 4).groups
    return CacheManager(num_blocks, groups=groups, **how)


def test_a_manager_of_groups_belongs_to_one_thread_and_can_be_handed_over() -> None:
    manager = two_groups()
    seq = run(manager, range(30), 8)
    said: list[BaseException | None] = []

    def extend() -> None:
        try:
            manager.extend(seq, 1)
            said.append(None)
        except WrongThreadError as error:
            said.append(error)

    for hand_over in (False, True):
        if hand_over:
            manager.hand_over()
        other = threading.Thread(target=extend)
        other.start()
        other.join()
    assert isinstance(said[0], WrongThreadError)
    assert said[1] is None


def test_a_sequence_of_groups_that_is_over_says_so() -> None:
    manager = two_groups()
    seq = run(manager, range(30), 8)
    manager.finish(seq)
    for call in (lambda: seq.block_table(1), lambda: seq.slot_mapping(0, 1, 1), lambda: seq.shortest, lambda: manager.extend(seq, 1)):
        with pytest.raises(StaleHandleError):
            call()


def test_a_manager_of_groups_cannot_be_copied() -> None:
    import copy
    import pickle

    manager = two_groups()
    for call in (lambda: copy.copy(manager), lambda: pickle.dumps(manager)):
        with pytest.raises(UnsupportedError):
            call()


def test_finalizers_release_what_groups_have() -> None:
    manager = two_groups()
    seqs = [run(manager, range(start, start + 20), 8) for start in (0, 100)]
    manager.abort_later(seqs)
    assert manager.num_sequences == 2
    assert manager.num_pins == 0  # a call
    assert manager.num_sequences == 0
    manager.check_integrity()


def test_a_reset_keeps_what_open_sequences_have_and_forgets_the_rest() -> None:
    manager = two_groups()
    seq = run(manager, range(40), 8)
    before = [seq.block_table(group).tolist() for group in range(2)]
    manager.reset(keep_open=True)
    manager.check_integrity()
    assert [seq.block_table(group).tolist() for group in range(2)] == before
    assert manager.plan([*range(40), 1]).cached_len == 0
    for token in range(40, 60):
        manager.extend(seq, 1)
        manager.commit(seq, [token], computed=token + 1)
        manager.check_integrity()
    manager.finish(seq)
    assert manager._pool.units.blocks.num_used == 0


def test_what_a_sequence_published_goes_with_it_where_it_is_asked_for() -> None:
    manager = two_groups()
    first = run(manager, range(20), 8)
    second = run(manager, [*range(20), *range(50, 70)], 8)
    manager.finish(second, keep=False)
    manager.check_integrity()
    assert manager.plan([*range(20), 50, 51, 52, 53, 54]).cached_len == 20
    manager.finish(first, keep=False)
    assert manager._pool.units.blocks.num_used == 0
    manager.check_integrity()


def test_namespaces_share_nothing() -> None:
    manager = two_groups()
    manager.finish(run(manager, range(20), 8))
    assert manager.plan([*range(20), 1], ("other",)).cached_len == 0
    assert manager.plan([*range(20), 1]).cached_len == 20


def test_priorities_decide_which_prefix_goes() -> None:
    manager = two_groups(40, policy="priority")
    for start, priority in ((0, 5), (100, 0)):
        seq = manager.begin(range(start, start + 24), priority=priority)
        manager.commit(seq, [], computed=24)
        manager.finish(seq)
    seq = manager.begin(range(200, 248))
    assert manager.plan([*range(24), 1]).cached_len >= manager.plan([*range(100, 124), 1]).cached_len
    manager.abort(seq)
    manager.check_integrity()


def test_a_reserve_is_there_whoever_else_asks() -> None:
    manager = two_groups(30)
    seq = manager.begin(range(8), reserve=16)
    manager.commit(seq, [], computed=8)
    others = []
    while manager.plan(range(1000, 1004)).fits:
        others.append(manager.begin(range(1000 + 10 * len(others), 1004 + 10 * len(others))))
    for token in range(8, 24):
        manager.extend(seq, 1)
        manager.commit(seq, [token], computed=token + 1)
        manager.check_integrity()
    assert seq.num_tokens == 24
    assert others


def test_a_fork_and_its_source_go_on_by_themselves() -> None:
    manager = two_groups()
    seq = run(manager, range(18), 8)
    fork = manager.fork(seq)
    pairs = manager.extend([seq, fork], 3)
    copied = {tuple(pair) for pair in pairs.tolist()}
    assert len(copied) == len(pairs) > 0
    for group in range(2):
        mine, its = (set(each.slot_mapping(18, 21, group).tolist()) for each in (seq, fork))
        assert not mine & its
    manager.commit([seq, fork], [[1, 2, 3], [4, 5, 6]], computed=[21, 21])
    manager.check_integrity()
    manager.finish(seq)
    manager.check_integrity()
    assert (fork.slot_mapping(14, 21, 1) >= 0).all()
