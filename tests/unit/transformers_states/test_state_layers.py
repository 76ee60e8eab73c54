"""Layers with states, method by method: rows, copies, what can be taken back, and the texts of what is refused.

Layers with keys and values as well, and the slots and tables of several layer groups, are tried on a small pool on the host.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

import kvdock
from kvdock import ArgumentValueError, UnsupportedError
from kvdock.integrations.transformers.compat import DUMMY_LAYER
from kvdock.integrations.transformers.layer import PagedLayer
from kvdock.integrations.transformers.measure import Measurement
from kvdock.integrations.transformers.reading import Reader
from kvdock.integrations.transformers.slots import SlotTensor
from kvdock.integrations.transformers.state import PagedState
from kvdock.integrations.transformers.state_layer import PagedStateLayer, layers_of
from kvdock.integrations.transformers.states import BOTH, STATES, StateLayer, StateLayers, held
from kvdock.integrations.transformers.tables import StepTables
from kvdock.scheduler import CacheManager, SequenceBatch
from support_slow import examples

CPU = torch.device("cpu")


def filled(rows: int = 3, number: int = 1, first: float = 0.0) -> StateLayer:
    """Make a layer whose row i has ``first + 10 * i + which`` everywhere: 2 channels of 3 columns, and 4 numbers, of each state."""
    layer = StateLayer(number)
    base = first + 10 * torch.arange(rows, dtype=torch.float32)
    for which in range(number):
        layer.update_conv_state((base + which)[:, None, None].expand(rows, 2, 3).clone(), state_idx=which)
        layer.update_recurrent_state((base + which)[:, None].expand(rows, 4).clone(), state_idx=which)
    return layer


def firsts(layer: StateLayer, which: int = 0) -> list[float]:
    """Return what each row has, which is the same in both states and everywhere in them."""
    conv, recurrent = layer.conv_states[which], layer.recurrent_states[which]
    assert conv is not None
    assert recurrent is not None
    assert (conv == recurrent[:, :1, None]).all()
    assert (recurrent == recurrent[:, :1]).all()
    found: list[float] = recurrent[:, 0].tolist()
    return found


def recording(columns: int, kernel: int = 3, rows: int = 1) -> StateLayer:
    """Make a layer with a convolution only, which has recorded the inputs 1, 2, ... up to ``columns``."""
    layer = StateLayer()
    layer.activate_past_recording()
    layer.update_conv_state(torch.arange(1.0, columns + 1).expand(rows, 2, columns).clone(), conv_kernel_size=kernel)
    return layer


def addresses(layer: StateLayer) -> set[int]:
    return {of[key].data_ptr() for of, key in held(layer)}


def test_the_kinds_of_layers_with_states_are_all_three_of_transformers() -> None:
    assert (LinearAttentionLayer, *BOTH) == STATES
    assert LinearAttentionAndFullAttentionLayer in BOTH
    assert len(set(STATES)) == 3


def test_held_names_each_state_that_is_there_and_none_that_is_not() -> None:
    layer = StateLayer(3)
    assert list(held(layer)) == []
    layer.update_conv_state(torch.ones(1, 2, 3), state_idx=1)
    layer.update_recurrent_state(torch.ones(1, 4), state_idx=2)
    assert [(of is layer.conv_states, of is layer.recurrent_states, key) for of, key in held(layer)] == [(True, False, 1), (False, True, 2)]
    assert list(held(object())) == []


@pytest.mark.parametrize("number", [1, 2])
def test_a_new_layer_has_room_for_as_many_states_as_it_was_told(number: int) -> None:
    layer = StateLayer(number)
    none, no = dict.fromkeys(range(number)), dict.fromkeys(range(number), False)
    assert (layer.conv_states, layer.recurrent_states) == (none, none)
    assert (layer.has_previous_state, layer.record_past, layer.number_of_states) == (no, False, number)


def test_states_made_in_inference_mode_can_be_changed_outside_of_it() -> None:
    with torch.inference_mode():
        layer = filled()
        layer.select(torch.tensor([2, 0]))
        copied, joined = StateLayer(), StateLayer()
        copied.become(layer)
        joined.join([layer.row(0), layer.row(1)])
    for each in (layer, copied, joined):
        assert [of[key].is_inference() for of, key in held(each)] == [False, False]
        each.update_recurrent_state(torch.full((2, 4), 5.0))
        assert each.recurrent_states[0].tolist() == [[5.0] * 4] * 2


def test_clear_forgets_states_their_rows_and_what_was_recorded() -> None:
    layer = filled(number=2)
    layer.activate_past_recording()
    layer.clear()
    assert list(held(layer)) == []
    assert (layer.number_of_states, layer.record_past, layer.device, layer.dtype) == (2, False, None, None)
    assert layer.has_previous_state == {0: False, 1: False}
    assert layer.is_conv_states_initialized == layer.is_recurrent_states_initialized == {0: False, 1: False}
    assert layer.conv_kernel_size == {0: None, 1: None}
    layer.update_recurrent_state(torch.ones(5, 4))  # another number of rows than before
    assert layer.recurrent_states[0].shape == (5, 4)


@pytest.mark.parametrize("rows", [[0], [2, 1, 0], [1, 1, 0, 2, 2], [0, 1, 2]])
def test_select_takes_repeats_and_reorders_rows_of_every_state(rows: list[int]) -> None:
    layer = filled(rows=3, number=2)
    before = addresses(layer)
    layer.select(torch.tensor(rows))
    assert firsts(layer, 0) == [10.0 * row for row in rows]
    assert firsts(layer, 1) == [10.0 * row + 1 for row in rows]
    assert not before & addresses(layer)


def test_select_in_a_layer_without_states_does_nothing() -> None:
    layer = StateLayer()
    layer.select(torch.tensor([4, 4]))
    assert list(held(layer)) == []


def test_select_keeps_no_gradient() -> None:
    layer = filled(rows=1)
    layer.recurrent_states[0] = torch.ones(1, 4, requires_grad=True) * 2
    layer.select(torch.tensor([0, 0]))
    assert not layer.recurrent_states[0].requires_grad
    assert layer.recurrent_states[0].tolist() == [[2.0] * 4] * 2


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_row_is_a_copy_in_memory_of_its_own(row: int) -> None:
    layer = filled(number=2)
    taken = layer.row(row)
    assert [firsts(taken, which) for which in (0, 1)] == [[10.0 * row], [10.0 * row + 1]]
    assert not addresses(layer) & addresses(taken)
    for of, key in held(layer):
        of[key].fill_(-1)
    assert [firsts(taken, which) for which in (0, 1)] == [[10.0 * row], [10.0 * row + 1]]
    for of, key in held(taken):
        of[key].fill_(-2)
    assert firsts(layer) == [-1.0] * 3


def test_a_row_of_a_layer_without_states_has_none() -> None:
    taken = StateLayer(2).row(1)
    assert list(held(taken)) == []
    assert taken.number_of_states == 2


@pytest.mark.parametrize(
    ("columns", "kernel", "expected"),
    [(1, 3, [0, 0, 1]), (3, 3, [1, 2, 3]), (7, 3, [5, 6, 7]), (2, 1, [2]), (1, 1, [1]), (2, 4, [0, 0, 1, 2])],
)
def test_a_row_has_the_columns_that_its_convolution_reads_next(columns: int, kernel: int, expected: list[float]) -> None:
    taken = recording(columns, kernel, rows=2).row(1)
    assert taken.conv_states[0].tolist() == [[expected, expected]]
    assert taken.conv_states[0].is_contiguous()
    assert not taken.record_past


def test_join_puts_rows_one_behind_the_other_in_memory_of_its_own() -> None:
    parts = [filled(1, 2, first) for first in (3.0, 1.0, 2.0)]
    layer = filled(rows=5, number=2)
    layer.join(parts)
    assert firsts(layer, 0) == [3.0, 1.0, 2.0]
    assert firsts(layer, 1) == [4.0, 2.0, 3.0]
    assert not addresses(layer) & set().union(*map(addresses, parts))
    parts[0].recurrent_states[0].zero_()
    assert firsts(layer, 0) == [3.0, 1.0, 2.0]


def test_one_row_joined_is_still_a_copy() -> None:
    part, layer = filled(1, first=6.0), StateLayer()
    layer.join([part])
    layer.recurrent_states[0].zero_()
    assert firsts(part) == [6.0]


def test_rows_taken_apart_and_joined_go_on_as_the_batch_did() -> None:
    layer = filled(rows=3)
    layer.conv_states[0] = torch.arange(18.0).reshape(3, 2, 3)
    again = StateLayer()
    again.join([layer.row(row) for row in range(3)])
    new = torch.full((3, 2, 1), 100.0)
    expected = [[[6 * r + 3 * c + 1, 6 * r + 3 * c + 2, 100.0] for c in range(2)] for r in range(3)]
    for each in (layer, again):
        each.update_conv_state(new)
        assert each.conv_states[0].tolist() == expected


def test_become_copies_states_and_what_is_known_of_them() -> None:
    source, layer = recording(5, kernel=3), filled(rows=4, number=2)
    layer.become(source)
    assert layer.conv_states[0].tolist() == [[[1, 2, 3, 4, 5]] * 2]
    assert (layer.recurrent_states, layer.record_past, layer.conv_kernel_size) == ({0: None}, True, {0: 3})
    source.conv_states[0].zero_()
    source.clear()
    assert layer.conv_states[0].tolist() == [[[1, 2, 3, 4, 5]] * 2]
    assert layer.has_previous_state == {0: True}
    layer.has_previous_state[0] = False
    assert source.conv_kernel_size == {0: None}


@pytest.mark.parametrize(
    ("columns", "tokens", "can"), [(5, 0, True), (5, 1, True), (5, 2, True), (5, 3, False), (3, 0, True), (3, 1, False)]
)
def test_tokens_can_be_taken_back_while_the_columns_before_them_are_there(columns: int, tokens: int, can: bool) -> None:
    assert recording(columns, kernel=3).can_cut(tokens) is can


@pytest.mark.parametrize(("tokens", "expected"), [(0, [5, 6, 7]), (1, [4, 5, 6]), (2, [3, 4, 5]), (4, [1, 2, 3])])
def test_cut_leaves_the_columns_before_what_was_taken_back(tokens: int, expected: list[float]) -> None:
    layer = recording(7, kernel=3)
    layer.cut(tokens)
    assert layer.conv_states[0].tolist() == [[expected, expected]]


def test_without_a_record_nothing_can_be_taken_back_and_cut_changes_nothing() -> None:
    layer = recording(7, kernel=3)
    layer.record_past = False
    assert not layer.can_cut(1)
    layer.cut(2)
    assert layer.conv_states[0].tolist() == [[[1, 2, 3, 4, 5, 6, 7]] * 2]


def test_a_recurrent_state_cannot_be_taken_back() -> None:
    layer = recording(7, kernel=3)
    layer.update_recurrent_state(torch.ones(1, 4))
    assert not layer.can_cut(1)


ROW = 4 * (2 * 3 + 4)
"""Bytes of a row of `filled`, of each of its states."""


def test_all_layers_count_their_rows_and_bytes_together() -> None:
    layers = StateLayers([filled(rows=3), filled(rows=2, number=2), StateLayer()])
    assert (len(layers), layers.nbytes) == (3, (3 + 2 * 2) * ROW)
    assert (len(StateLayers()), StateLayers().nbytes) == (0, 0)


def test_all_layers_select_take_rows_and_join_alike() -> None:
    parts = [filled(), filled(first=5.0)]
    layers = StateLayers(parts)
    layers.select([2, 2, 0])
    assert [firsts(part) for part in parts] == [[20.0, 20.0, 0.0], [25.0, 25.0, 5.0]]
    rows = [layers.row(index) for index in (2, 0)]
    assert [row.nbytes for row in rows] == [2 * ROW] * 2
    layers.join(rows)
    assert [firsts(part) for part in parts] == [[0.0, 20.0], [5.0, 25.0]]
    layers.join([])
    assert layers.nbytes == 0


def test_all_layers_become_those_of_another_torn_or_not() -> None:
    mine, theirs = filled(rows=1), filled(rows=2, first=7.0)
    layers, other = StateLayers([mine]), StateLayers([theirs])
    other.tear(1)
    layers.become(other)
    assert (layers.is_torn, firsts(mine)) == (True, [7.0, 17.0])
    assert not addresses(mine) & addresses(theirs)
    layers.become(StateLayers([StateLayer()]))
    assert (layers.is_torn, layers.nbytes, other.is_torn, firsts(theirs)) == (False, 0, True, [7.0, 17.0])
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        layers.become(StateLayers())


def test_a_pass_that_failed_behind_tokens_tears_states_until_they_are_forgotten() -> None:
    layers = StateLayers([filled()])
    layers.check("truncate")
    layers.tear(4)
    assert (layers.is_torn, layers.nbytes) == (True, 3 * ROW)
    with pytest.raises(ArgumentValueError) as caught:
        layers.check("truncate")
    assert str(caught.value) == (
        "PagedCacheForTransformers: truncate: expected states of all tokens, in all layers, got those that a forward pass which failed "
        "has left, and states cannot be taken back. Fix: reset() the cache, and compute the tokens anew"
    )
    layers.clear()
    layers.check("truncate")
    assert (layers.is_torn, layers.nbytes) == (False, 0)


def test_a_first_pass_that_failed_leaves_no_states() -> None:
    layers = StateLayers([filled()])
    layers.tear(4)
    layers.tear(0)
    assert (layers.is_torn, layers.nbytes) == (False, 0)


def test_without_layers_nothing_is_ever_torn() -> None:
    layers = StateLayers()
    layers.tear(4)
    assert not layers.is_torn
    layers.check_cut(3)


@pytest.mark.parametrize(
    ("layer", "got"),
    [
        (filled(), "a recurrent state"),
        (recording(4, kernel=3), "a convolution of which no inputs before the last 2 are recorded"),
    ],
)
def test_the_first_layer_that_cannot_take_tokens_back_is_the_reason(layer: StateLayer, got: str) -> None:
    layers = StateLayers([recording(9, kernel=3), layer])
    layers.check_cut(0)
    with pytest.raises(UnsupportedError) as caught:
        layers.check_cut(2)
    assert str(caught.value) == (
        f"PagedCacheForTransformers.truncate: expected layers that can take tokens back, got {got}. "
        "Fix: reset() the cache, or copy.deepcopy() it before the tokens that are to be taken back"
    )


def test_all_layers_are_cut_alike() -> None:
    parts = [recording(6, kernel=3), recording(5, kernel=2)]
    layers = StateLayers(parts)
    layers.check_cut(2)
    layers.cut(2)
    assert [part.conv_states[0][0, 0].tolist() for part in parts] == [[2, 3, 4], [2, 3]]


MODEL = torch.nn.Identity()


def paged(num_blocks: int = 32, block_size: int = 2) -> PagedState:
    """Make a pool of two layers, one of them with a window of 4 tokens and in a group of its own."""
    spec = kvdock.KVSpec([kvdock.LayerSpec(1, 1, 2, 2), kvdock.LayerSpec(1, 1, 2, 2, 4)], 4096, torch.float32)
    pool: Any = kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(num_blocks=num_blocks, block_size=block_size), kvdock.RankInfo(CPU))
    return PagedState(pool, CacheManager(pool.num_blocks, groups=pool.groups), Reader(weakref.ref(MODEL), why="a test"))


def test_a_model_gets_a_layer_of_the_right_kind_for_each_of_its_own() -> None:
    state = paged()
    found = Measurement(state.pool.spec, (None, 4), (False, True, False, True), (2, 0, 0, 1), 0, CPU)
    layers = list(layers_of(state, found))
    assert [type(layer) for layer in layers] == [StateLayer, PagedLayer, DUMMY_LAYER, PagedStateLayer]
    assert (layers[0].number_of_states, layers[3].number_of_states) == (2, 1)
    assert [(layers[at].index, layers[at].window, layers[at].state is state) for at in (1, 3)] == [(0, None, True), (1, 4, True)]


def test_a_layer_with_both_keeps_keys_on_pages_and_states_beside_them() -> None:
    state = paged()
    both, plain = PagedStateLayer(state, 0, None, 1), PagedLayer(state, 1, 4)
    assert (both.is_initialized, both.keys, both.device, both.is_compileable) == (False, None, None, False)
    both.lazy_initialization(torch.ones(1), torch.ones(1))  # keys and values, for which there is room
    assert list(held(both)) == []
    keys, values = torch.arange(12.0).reshape(2, 1, 3, 2), torch.arange(12.0).reshape(2, 1, 3, 2) + 50
    for layer in (both, plain):
        layer.update(keys, values)
    both.update_recurrent_state(torch.tensor([[1.0], [2.0]]))
    both.update_conv_state(torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]))
    assert (both.get_seq_length(), both.get_max_length(), both.is_initialized, both.device) == (3, -1, True, CPU)
    assert torch.equal(both.keys, keys)
    assert torch.equal(both.values, values)
    assert repr(both) == "PagedLayer(index=0, window=None, length=3)"
    state.states = StateLayers([both])
    state.select([1, 1, 0])
    assert both.recurrent_states[0].tolist() == [[2.0], [2.0], [1.0]]
    assert both.conv_states[0].tolist() == [[[3.0, 4.0]], [[3.0, 4.0]], [[1.0, 2.0]]]
    assert torch.equal(both.keys, keys[[1, 1, 0]])
    assert torch.equal(plain.values, values[[1, 1, 0]])
    state.truncate(0)
    assert (both.get_seq_length(), both.keys, list(held(both))) == (0, None, [])


@pytest.mark.parametrize(
    ("method", "args"), [("reset", ()), ("crop", (-1,)), ("reorder_cache", (torch.tensor([0]),)), ("offload", ()), ("prefetch", ())]
)
def test_what_changes_one_layer_alone_is_refused_with_states_too(method: str, args: tuple[Any, ...]) -> None:
    layer = PagedStateLayer(paged(), 1, 4, 1)
    layer.update_recurrent_state(torch.ones(1, 4))
    with pytest.raises(UnsupportedError) as caught:
        getattr(layer, method)(*args)
    assert str(caught.value) == (
        f"PagedLayer.{method}: expected a call on the whole cache, got one on layer 1. Fix: call cache.{method}: all layers share one table"
    )
    assert layer.recurrent_states[0].tolist() == [[1.0] * 4]


def slots_by_blocks(batch: SequenceBatch, start: int, stop: int, group: int, size: int = 2) -> list[list[int]]:
    table, pads = batch.block_table(group), batch.pads.tolist()
    return [
        [-1 if at < pad else int(table[row, (at - pad) // size]) * size + (at - pad) % size for at in range(start, stop)]
        for row, pad in enumerate(pads)
    ]


@pytest.mark.parametrize("group", [0, 1])
def test_slots_of_a_group_are_extended_and_worked_out_anew_where_they_were_forgotten(group: int) -> None:
    state = paged()
    sequences = [state.manager.open_empty(()) for _ in range(2)]
    batch = SequenceBatch(state.manager, sequences, pads=[0, 1])
    slots = SlotTensor(CPU, group)
    for tokens, length in ((3, 3), (1, 4), (6, 10)):
        batch.grow(tokens)
        assert slots.upto(batch, length).tolist() == slots_by_blocks(batch, 0, length, group)
    batch.select([1, 0])
    slots.forget(0)
    assert slots.upto(batch, 10).tolist() == slots_by_blocks(batch, 0, 10, group)
    batch.select([0, 0, 1])  # another number of rows: a buffer of its own
    slots.forget(0)
    assert slots.upto(batch, 5).tolist() == slots_by_blocks(batch, 0, 5, group)


def test_tables_of_a_step_show_each_group_its_own_blocks() -> None:
    state = paged()
    batch = SequenceBatch(state.manager, [state.manager.open_empty(()) for _ in range(2)], pads=[2, 0])
    tables = StepTables(CPU, [group.block_size for group in state.pool.groups])
    batch.grow(5)
    tables.begin(batch, 0, 5, attends=True)
    assert [slots.tolist() for slots in tables.slots] == [slots_by_blocks(batch, 0, 5, group) for group in (0, 1)]
    assert tables.slots[0].tolist() != tables.slots[1].tolist()
    assert (tables.lens.tolist(), tables.count) == ([3, 5], 5)
    assert tables.cu_query_lens is not None
    assert tables.cu_query_lens.tolist() == [0, 5, 10]
    before = tables.block_tables
    assert all(np.array_equal(before[group].numpy(), batch.block_table(group)) for group in (0, 1))
    batch.grow(1)
    tables.begin(batch, 5, 6, attends=True)
    assert (tables.lens.tolist(), tables.cu_query_lens, tables.count) == ([4, 6], None, 1)
    assert [slots.tolist() for slots in tables.slots] == [slots_by_blocks(batch, 5, 6, group) for group in (0, 1)]
    tables.forget()
    assert (tables.start, tables.stop, tables.count) == (0, 0, 0)


ONE_MORE = st.just(("grow", 1))
ODD_STEPS = st.sampled_from([("swap", 0), ("twice", 0), ("fails", 0), ("gathers", 0), ("reserve", 6)])
STEPS = st.lists(
    st.one_of(ONE_MORE, ONE_MORE, ONE_MORE, st.tuples(st.sampled_from(["grow", "cut"]), st.integers(1, 5)), ODD_STEPS), max_size=30
)


@example([("reserve", 6), *[("grow", 1)] * 7])
@settings(max_examples=examples(40))
@given(STEPS)
def test_tables_of_any_steps_show_what_the_batch_has(steps: list[tuple[str, int]]) -> None:
    """Where each row only writes the next place of a block, the tables are counted on and not made: that must not show."""
    state = paged(num_blocks=400, block_size=4)
    batch = SequenceBatch(state.manager, [state.manager.open_empty(()) for _ in range(2)], pads=[2, 0])
    tables = StepTables(CPU, [group.block_size for group in state.pool.groups])
    for what, count in [("grow", 3), *steps]:
        before = batch.length
        if what in ("swap", "twice"):  # a fork shares what was reserved
            batch.truncate(before)
        if what == "swap":
            batch.select([1, 0])
        elif what == "twice":
            batch.select([0, 0])
        elif what == "reserve":
            batch.reserve(count)
        elif what == "cut":
            batch.truncate(max(batch.length - count, 3))
        else:
            batch.grow(count or 1)
            tables.begin(batch, before, batch.length, attends=what != "gathers")
            assert [slots.tolist() for slots in tables.slots] == [
                slots_by_blocks(batch, before, batch.length, group, 4) for group in (0, 1)
            ]
            if what != "gathers":
                assert tables.lens.tolist() == [batch.length - pad for pad in batch.pads]
                shown = [tables.block_tables[group][:, : batch.block_table(group).shape[1]].tolist() for group in (0, 1)]
                assert shown == [batch.block_table(group).tolist() for group in (0, 1)]
            if what == "fails":
                batch.truncate(before)
            tables.forget()
