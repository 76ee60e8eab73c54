"""Checkpoints of states, call by call: what is found, what makes room in which order, how many bytes are counted, and where they are kept.

A slow model of the same promises, a list of keys in the order of their use, is run beside them on random calls.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvdock.integrations.transformers.checkpoints import Checkpoints
from kvdock.integrations.transformers.prompts import Prompts
from kvdock.integrations.transformers.states import StateLayer, StateLayers
from support_states import FOUND

Ids = npt.NDArray[np.int64]

NO_STOPS = np.array([], dtype=np.int64)


def of_bytes(nbytes: int, mark: int = 0) -> StateLayers:
    """Make states of so many bytes, all of which are ``mark``."""
    layer = StateLayer()
    layer.update_recurrent_state(torch.full((1, nbytes), mark, dtype=torch.uint8))
    return StateLayers([layer])


def mark_of(states: StateLayers) -> int:
    found = states._layers[0].recurrent_states[0]
    assert found is not None
    assert (found == found[0, 0]).all()
    return int(found[0, 0])


def batch(rows: Sequence[Sequence[int]], pads: Sequence[int] | None = None, namespace: tuple[Hashable, ...] = ()) -> Prompts:
    return Prompts(np.array(rows, dtype=np.int64), np.array(pads or [0] * len(rows), dtype=np.int64), namespace, NO_STOPS)


def ids_of(*tokens: int) -> Ids:
    return np.array(tokens, dtype=np.int64)


def keep(kept: Checkpoints, tokens: Sequence[int], states: StateLayers, namespace: tuple[Hashable, ...] = ()) -> None:
    """Store states behind all of some tokens."""
    kept.store(batch([tokens], namespace=namespace), {(0, len(tokens)): states})


def is_there(kept: Checkpoints, tokens: Sequence[int], namespace: tuple[Hashable, ...] = ()) -> bool:
    return len(tokens) in set(kept.lengths(ids_of(*tokens), namespace))


def test_nothing_is_there_at_first() -> None:
    kept = Checkpoints(4, 100, FOUND)
    assert (len(kept), kept.nbytes) == (0, 0)
    assert list(kept.lengths(ids_of(1, 2, 3), ())) == []
    with pytest.raises(KeyError):
        kept.find(ids_of(1, 2, 3), ())


def test_what_is_found_are_the_very_states_that_were_stored() -> None:
    kept, states = Checkpoints(4, 100, FOUND), of_bytes(7, 3)
    keep(kept, [1, 2], states)
    assert kept.find(ids_of(1, 2), ()) is states
    assert (len(kept), kept.nbytes) == (1, 7)


def test_only_whole_prefixes_of_the_sequence_have_a_length() -> None:
    kept = Checkpoints(2, 100, FOUND)
    for tokens in ([1], [1, 2], [1, 2, 3, 4], [1, 9], [2, 1, 3], [1, 2, 3, 4, 5, 6]):
        keep(kept, tokens, of_bytes(1))
    assert sorted(kept.lengths(ids_of(1, 2, 3, 4, 5), ())) == [1, 2, 4]
    assert sorted(kept.lengths(ids_of(1, 2, 3, 4, 5, 6), ())) == [1, 2, 4, 6]
    assert sorted(kept.lengths(ids_of(1, 9, 3), ())) == [1, 2]
    assert sorted(kept.lengths(ids_of(2, 1, 3), ())) == [3]
    assert sorted(kept.lengths(ids_of(2), ())) == []
    assert sorted(kept.lengths(ids_of(), ())) == []


def test_a_prefix_may_be_a_slice_of_a_longer_array_or_one_with_strides() -> None:
    kept = Checkpoints(2, 100, FOUND)
    keep(kept, [1, 2, 3], of_bytes(1, 5))
    strided = ids_of(1, 0, 2, 0, 3, 0, 4, 0)[::2]
    assert list(kept.lengths(strided, ())) == [3]
    assert mark_of(kept.find(strided[:3], ())) == 5


@pytest.mark.parametrize("other", [(), ("tenant", "b"), ("tenant",), ("a", "tenant"), ("tenant", b"a"), ("tenant", "a", 1)])
def test_no_namespace_sees_the_states_of_another(other: tuple[Hashable, ...]) -> None:
    kept, own = Checkpoints(4, 100, FOUND), ("tenant", "a")
    keep(kept, [1, 2], of_bytes(1, 1), own)
    assert is_there(kept, [1, 2], own)
    assert not is_there(kept, [1, 2], other)
    with pytest.raises(KeyError):
        kept.find(ids_of(1, 2), other)
    keep(kept, [1, 2], of_bytes(1, 2), other)
    assert [mark_of(kept.find(ids_of(1, 2), namespace)) for namespace in (own, other)] == [1, 2]
    assert (len(kept), kept.nbytes) == (2, 2)


def test_large_token_ids_that_differ_in_their_upper_bytes_only_are_different() -> None:
    kept = Checkpoints(4, 100, FOUND)
    keep(kept, [1, 2**40 + 1], of_bytes(1, 1))
    assert is_there(kept, [1, 2**40 + 1])
    assert not is_there(kept, [1, 1])
    assert not is_there(kept, [1, 2**41 + 1])


def test_each_row_of_a_batch_is_stored_without_its_own_padding() -> None:
    kept = Checkpoints(2, 100, FOUND)
    prompts = batch([[7, 7, 1, 2, 3], [7, 4, 5, 6, 7]], pads=[2, 1])
    kept.store(prompts, {(0, 4): of_bytes(1, 1), (1, 4): of_bytes(1, 2), (1, 5): of_bytes(1, 3)})
    assert [mark_of(kept.find(ids_of(*tokens), ())) for tokens in ([1, 2], [4, 5, 6], [4, 5, 6, 7])] == [1, 2, 3]
    assert not is_there(kept, [7, 7, 1, 2])
    assert len(kept) == 3


def test_rows_that_begin_alike_are_stored_once_and_the_first_stays() -> None:
    kept = Checkpoints(2, 100, FOUND)
    kept.store(batch([[1, 2, 3], [1, 2, 4]]), {(0, 2): of_bytes(5, 1), (1, 2): of_bytes(9, 2)})
    assert (len(kept), kept.nbytes) == (1, 5)
    assert mark_of(kept.find(ids_of(1, 2), ())) == 1


@pytest.mark.parametrize(("most", "stays"), [(0, False), (9, False), (10, True), (11, True)])
def test_states_are_stored_if_they_alone_fit(most: int, stays: bool) -> None:
    kept = Checkpoints(4, most, FOUND)
    keep(kept, [1, 2], of_bytes(10))
    assert is_there(kept, [1, 2]) is stays
    assert (len(kept), kept.nbytes) == ((1, 10) if stays else (0, 0))


def test_states_too_large_make_no_others_go() -> None:
    kept = Checkpoints(4, 10, FOUND)
    keep(kept, [1], of_bytes(4))
    keep(kept, [2], of_bytes(6))
    keep(kept, [3], of_bytes(11))
    assert [is_there(kept, [token]) for token in (1, 2, 3)] == [True, True, False]
    assert kept.nbytes == 10


def test_as_many_go_as_are_needed_and_no_more() -> None:
    kept = Checkpoints(4, 10, FOUND)
    for token, nbytes in ((1, 2), (2, 3), (3, 4)):
        keep(kept, [token], of_bytes(nbytes))
    keep(kept, [4], of_bytes(1))  # 10 bytes: just as many as there may be
    assert [is_there(kept, [token]) for token in (1, 2, 3, 4)] == [True] * 4
    keep(kept, [5], of_bytes(4))  # 14: without the first it is 12, without the second 9
    assert [is_there(kept, [token]) for token in (1, 2, 3, 4, 5)] == [False, False, True, True, True]
    assert (len(kept), kept.nbytes) == (3, 9)


def test_those_of_the_whole_room_make_all_others_go() -> None:
    kept = Checkpoints(4, 10, FOUND)
    for token in range(5):
        keep(kept, [token, 1], of_bytes(2))
    keep(kept, [9], of_bytes(10, 9))
    assert (len(kept), kept.nbytes) == (1, 10)
    assert mark_of(kept.find(ids_of(9), ())) == 9
    assert list(kept.lengths(ids_of(0, 1), ())) == []


def test_finding_is_a_use_and_asking_for_lengths_is_none() -> None:
    kept = Checkpoints(4, 3, FOUND)
    for token in (1, 2, 3):
        keep(kept, [token], of_bytes(1))
    kept.find(ids_of(1), ())
    assert is_there(kept, [2])  # asked for, yet the next to go
    gone = []
    for new in (4, 5, 6):
        before = [token for token in range(1, 7) if is_there(kept, [token])]
        keep(kept, [new], of_bytes(1))
        gone += [token for token in before if not is_there(kept, [token])]
    assert gone == [2, 3, 1]


def test_within_one_call_later_states_make_earlier_ones_go() -> None:
    kept = Checkpoints(1, 2, FOUND)
    kept.store(batch([[1, 2, 3]]), {(0, 1): of_bytes(1), (0, 2): of_bytes(1), (0, 3): of_bytes(1)})
    assert sorted(kept.lengths(ids_of(1, 2, 3), ())) == [2, 3]


def test_a_length_is_yielded_as_long_as_any_states_of_it_are_there() -> None:
    kept = Checkpoints(4, 2, FOUND)
    keep(kept, [1, 2], of_bytes(1))
    keep(kept, [3, 4], of_bytes(1))
    keep(kept, [5, 6, 7], of_bytes(1))  # [1, 2] goes
    assert (is_there(kept, [1, 2]), is_there(kept, [3, 4])) == (False, True)
    assert kept._lengths == {2: 1, 3: 1}
    keep(kept, [8, 9, 10], of_bytes(1))  # and [3, 4], the last of two tokens
    assert kept._lengths == {3: 2}


def test_states_of_no_bytes_are_counted_and_go_with_the_others() -> None:
    kept = Checkpoints(4, 1, FOUND)
    keep(kept, [1], StateLayers())
    assert (len(kept), kept.nbytes) == (1, 0)
    keep(kept, [2], of_bytes(1))
    keep(kept, [3], of_bytes(1))
    assert [is_there(kept, [token]) for token in (1, 2, 3)] == [False, False, True]


def test_what_was_forgotten_can_be_stored_again() -> None:
    kept = Checkpoints(4, 10, FOUND)
    keep(kept, [1, 2], of_bytes(10, 1))
    kept.clear()
    assert (len(kept), kept.nbytes, kept._lengths) == (0, 0, {})
    keep(kept, [1, 2], of_bytes(10, 2))
    assert mark_of(kept.find(ids_of(1, 2), ())) == 2
    assert (len(kept), kept.nbytes) == (1, 10)


@pytest.mark.parametrize("seed", range(6))
def test_random_calls_leave_what_a_list_in_the_order_of_use_leaves(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - calls of a test
    most = rng.randint(5, 40)
    kept = Checkpoints(2, most, FOUND)
    model: list[tuple[tuple[Hashable, ...], tuple[int, ...], int, int]] = []  # namespace, tokens, bytes, mark; the next to go first
    texts = [tuple(rng.randrange(2) for _ in range(rng.randint(1, 5))) for _ in range(12)]
    for step in range(250):
        namespace: tuple[Hashable, ...] = rng.choice([(), ("a",)])
        tokens = rng.choice(texts)
        at = next((i for i, (space, text, _, _) in enumerate(model) if (space, text) == (namespace, tokens)), None)
        act = rng.random()
        if act < 0.55:
            nbytes = rng.randint(1, 12)
            keep(kept, tokens, of_bytes(nbytes, step), namespace)
            if at is None and nbytes <= most:
                model.append((namespace, tokens, nbytes, step))
                while sum(each[2] for each in model) > most:
                    del model[0]
        elif act < 0.98 and at is not None:
            model.append(model.pop(at))
            assert mark_of(kept.find(ids_of(*tokens), namespace)) == model[-1][3]
        elif act >= 0.98:
            kept.clear()
            model.clear()
        assert (len(kept), kept.nbytes) == (len(model), sum(each[2] for each in model))
        longer = (*tokens, 0, 1)
        expected = sorted(len(text) for space, text, _, _ in model if space == namespace and longer[: len(text)] == text)
        assert sorted(kept.lengths(ids_of(*longer), namespace)) == expected


def test_places_ascend_and_name_each_prompt_once() -> None:
    prompts = batch([list(range(13))] * 3, pads=[0, 3, 1])
    # Last whole blocks: 12 of 12, 8 of 9 and 8 of 11 tokens, behind 0, 3 and 1 of padding; found: 4, 8, 4.
    made = Checkpoints(4, 0, FOUND).places(prompts, [4, 8, 4], 0)
    assert list(made.items()) == [(4, [0]), (5, [2]), (9, [2]), (11, [1]), (12, [0])]


@pytest.mark.parametrize(("past", "expected"), [(0, [4, 8]), (3, [4, 8]), (4, [8]), (7, [8]), (8, []), (9, [])])
def test_no_place_is_where_the_batch_goes_on_or_before(past: int, expected: list[int]) -> None:
    assert list(Checkpoints(4, 0, FOUND).places(batch([list(range(10))]), [4], past)) == expected


@pytest.mark.parametrize(("length", "expected"), [(1, []), (4, []), (5, [4]), (8, [4]), (9, [8])])
def test_a_token_is_left_behind_the_last_whole_block(length: int, expected: list[int]) -> None:
    assert list(Checkpoints(4, 0, FOUND).places(batch([list(range(length))]), [0], 0)) == expected


def test_what_was_found_need_not_be_whole_blocks() -> None:
    assert Checkpoints(4, 0, FOUND).places(batch([list(range(10))]), [3], 0) == {3: [0], 8: [0]}
