"""Which states are kept behind prefixes, and where: without a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvdock
from kvdock.integrations.transformers.checkpoints import Checkpoints
from kvdock.integrations.transformers.prompts import Prompts
from kvdock.integrations.transformers.states import StateLayer, StateLayers
from support_states import FOUND

ONE = 4 * (2 * 3 + 5)
"""Bytes of the states of a row."""


def states(value: float, rows: int = 1) -> StateLayers:
    """Make the states of one layer: three columns of a convolution, and five numbers."""
    layer = StateLayer()
    layer.update_conv_state(torch.full((rows, 2, 3), float(value)) + torch.arange(rows)[:, None, None])
    layer.update_recurrent_state(torch.full((rows, 5), float(value)) + torch.arange(rows)[:, None])
    return StateLayers([layer])


def value_of(kept: StateLayers) -> float:
    layer = kept._layers[0]
    assert (layer.conv_states[0] == layer.recurrent_states[0][0, 0]).all()
    return float(layer.recurrent_states[0][0, 0])


def prompts(*rows: list[int], pads: tuple[int, ...] = (), namespace: tuple[str, ...] = ()) -> Prompts:
    ids = np.array(rows, dtype=np.int64)
    return Prompts(ids, np.array(pads or [0] * len(rows)), namespace, np.array([], dtype=np.int64))


TEN = list(range(10, 20))


def test_states_are_found_by_the_tokens_before_them() -> None:
    kept = Checkpoints(4, 100 * ONE, FOUND)
    one, other = prompts(TEN), prompts(TEN, namespace=("a",))
    kept.store(one, {(0, 4): states(1), (0, 8): states(2)})
    kept.store(other, {(0, 4): states(3)})
    assert sorted(kept.lengths(one.row(0), ())) == [4, 8]
    assert sorted(kept.lengths(one.row(0)[:7], ())) == [4]
    assert list(kept.lengths(one.row(0), ("a",))) == [4]
    assert list(kept.lengths(np.array([10, 11, 12, 99, 14], dtype=np.int64), ())) == []
    assert value_of(kept.find(one.row(0)[:8], ())) == 2
    assert value_of(kept.find(one.row(0)[:4], ("a",))) == 3
    assert (len(kept), kept.nbytes) == (3, 3 * ONE)
    kept.clear()
    assert (len(kept), kept.nbytes, list(kept.lengths(one.row(0), ()))) == (0, 0, [])


def test_padding_is_no_part_of_a_prefix() -> None:
    kept = Checkpoints(4, 100 * ONE, FOUND)
    kept.store(prompts([0, 0, *TEN], pads=(2,)), {(0, 6): states(1)})
    assert list(kept.lengths(np.array(TEN, dtype=np.int64), ())) == [4]


def test_those_that_were_used_longest_ago_make_room() -> None:
    kept = Checkpoints(4, 2 * ONE, FOUND)
    rows = [prompts([first, *TEN[1:]]) for first in range(3)]
    for value, of in enumerate(rows[:2]):
        kept.store(of, {(0, 4): states(value)})
    kept.find(rows[0].row(0)[:4], ())
    kept.store(rows[2], {(0, 4): states(2)})
    assert [list(kept.lengths(of.row(0), ())) for of in rows] == [[4], [], [4]]
    assert kept.nbytes == 2 * ONE


def test_what_is_there_is_not_stored_again_and_what_is_too_large_not_at_all() -> None:
    kept = Checkpoints(4, ONE, FOUND)
    kept.store(prompts(TEN), {(0, 4): states(1)})
    kept.store(prompts(TEN), {(0, 4): states(2), (0, 8): states(3, rows=2)})
    assert (len(kept), kept.nbytes) == (1, ONE)
    assert value_of(kept.find(prompts(TEN).row(0)[:4], ())) == 1


@pytest.mark.parametrize(
    ("pads", "found", "past", "expected"),
    [
        ((0,), (0,), 0, {8: [0]}),  # its last whole block: at least one token is left to compute
        ((0,), (4,), 0, {4: [0], 8: [0]}),  # and what others may begin with, too
        ((0,), (8,), 8, {}),  # it went on from there
        ((0, 0), (0, 0), 0, {8: [0, 1]}),
        ((0, 1), (0, 0), 0, {8: [0], 9: [1]}),
        ((0, 6), (4, 0), 0, {8: [0]}),  # never within the padding of another row; and row 1 has no whole block
        ((2, 8), (0, 0), 0, {}),  # 8 of 10 places are padding of row 1
    ],
)
def test_states_are_kept_where_two_things_end(
    pads: tuple[int, ...], found: tuple[int, ...], past: int, expected: dict[int, list[int]]
) -> None:
    """Of rows of ten places, in blocks of four tokens."""
    assert Checkpoints(4, ONE, FOUND).places(prompts(*[TEN] * len(pads), pads=pads), found, past) == expected


def test_rows_are_taken_out_and_put_together() -> None:
    """As copies: what a model changes in place changes no checkpoint."""
    batch = states(1, rows=3)
    first, last = batch.row(0), batch.row(2)
    joined = states(7)
    joined.join([last, first, last])
    assert joined._layers[0].recurrent_states[0][:, 0].tolist() == [3, 1, 3]
    assert joined._layers[0].has_previous_state == {0: True}
    joined._layers[0].recurrent_states[0].zero_()
    assert (value_of(first), value_of(last), batch.nbytes, joined.nbytes) == (1, 3, 3 * ONE, 3 * ONE)
    joined.join([])
    assert joined.nbytes == 0
    assert joined._layers[0].has_previous_state == {0: False}


@pytest.mark.parametrize("columns", [2, 9])
def test_a_row_has_as_many_columns_as_its_convolution_reads(columns: int) -> None:
    """While inputs are recorded there are more, and at the beginning fewer."""
    layer = StateLayer()
    layer.activate_past_recording()
    layer.update_conv_state(torch.arange(1.0, columns + 1).expand(1, 2, columns), conv_kernel_size=4)
    row = layer.row(0)
    assert row.conv_states[0][0, 0].tolist() == ([0, 0, 1, 2] if columns == 2 else [6, 7, 8, 9])
    assert not row.record_past
    assert layer.record_past


def test_what_comes_out_of_a_file_is_what_was_kept() -> None:
    one, other = Checkpoints(4, 2 * ONE, FOUND), Checkpoints(4, 2 * ONE, FOUND)
    ids = prompts(TEN).row(0)[:8]
    one.store(prompts(TEN), {(0, 8): states(2).row(0)})
    found = {name: state.clone() for name, state in one.get(ids, ()).items()}
    assert {name: tuple(state.shape) for name, state in found.items()} == {"layers.0.conv.0": (2, 3), "layers.0.recurrent.0": (5,)}
    other.put(ids, (), found)
    (mine,), (theirs,) = one.find(ids, ())._layers, other.find(ids, ())._layers
    assert {name: repr(value) for name, value in vars(mine).items()} == {name: repr(value) for name, value in vars(theirs).items()}
    assert (other.nbytes, other.unused, one.group.nbytes) == (ONE, ONE, ONE)
    found["layers.0.conv.0"].zero_()
    assert value_of(other.find(ids, ())) == 2, "a copy"


def test_states_of_another_shape_than_was_measured_are_not_saved() -> None:
    kept, layer = Checkpoints(4, 2 * ONE, FOUND), StateLayer()
    layer.update_conv_state(torch.zeros(1, 2, 3))
    layer.update_recurrent_state(torch.zeros(1, 4))
    kept.store(prompts(TEN), {(0, 8): StateLayers([layer])})
    with pytest.raises(kvdock.UnsupportedError, match=r"save: states: expected those of one token.*got.*\(1, 4\)"):
        kept.get(prompts(TEN).row(0)[:8], ())
