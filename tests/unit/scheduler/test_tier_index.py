"""Numbers by token ids: from when a unit is published until nobody has it any more, and nothing is behind it."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdock.errors import IntegrityError
from kvdock.scheduler.tier_index import TierIndex
from opskit import PROPERTY
from support_slow import examples

SIZE, UNITS, NUMBERS = 2, 64, 100


def int32(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


class Made:
    """An index over a pool of 64 units, and what a tier keeps: any numbers that it is told to."""

    def __init__(self, numbers: int = NUMBERS) -> None:
        self.kept, self.asked = np.zeros(numbers, dtype=np.bool_), list[int]()
        self.index = TierIndex(UNITS, numbers, SIZE, lambda at: self.kept[at], self.make_room)
        self.cached = set[int]()

    def make_room(self, count: int) -> None:
        """Let the tier have nothing any more."""
        self.asked.append(count)
        self.drop(*np.flatnonzero(self.kept).tolist())

    def drop(self, *numbers: int) -> None:
        """Let the tier have nothing of numbers."""
        self.kept[list(numbers)] = False
        self.index.drop(np.array(numbers, dtype=np.intp))

    def add(self, before: int | None, tokens: list[int], *units: int, namespace: Any = (), priority: int = 0) -> None:
        self.index.add(namespace, before, np.array(tokens), int32(*units), priority)
        self.cached |= set(units)

    def give_up(self, *units: int, keep: bool = True) -> list[list[int]]:
        """Let the pool give units up; return them as the tier sees them, each priority by itself."""
        parts = list(self.index.leaving(np.array(units)))
        for _, numbers, _ in parts:
            self.kept[numbers] |= keep
        self.index.forget(int32(*units))
        self.cached -= set(units)
        return [part.tolist() for part, _, _ in parts]

    def find(self, tokens: list[int], *cached: int, namespace: Any = ()) -> list[int]:
        found: list[int] = self.index.find(np.array(tokens, dtype=np.int64), namespace, int32(*cached)).tolist()
        return found

    def check(self) -> list[int]:
        return sorted(self.index.check_integrity(int32(*sorted(self.cached))).tolist())


def chain() -> Made:
    """Return a prefix of four units, and one that branches off behind its second."""
    made = Made()
    made.add(None, [1, 2, 3, 4, 5, 6, 7, 8], 10, 11, 12, 13, namespace=("a",))
    made.add(11, [50, 60, 70, 80], 4, 5, namespace=("a",))
    return made


def test_equal_tokens_behind_equal_tokens_have_one_number() -> None:
    made = chain()
    first = made.find([1, 2, 3, 4, 5, 6, 7, 8], namespace=("a",))
    other = made.find([1, 2, 3, 4, 50, 60, 70, 80, 9, 9], namespace=("a",))
    assert len(set(first)) == len(set(other)) == 4
    assert first[:2] == other[:2]
    assert not set(first[2:]) & set(other[2:])
    assert made.find([1, 2, 3, 9], namespace=("a",)) == first[:1]
    assert made.find([1, 2, 3], namespace=("a",)) == first[:1]
    assert made.find([50, 60], namespace=("a",)) == []
    assert made.check() == sorted({*first, *other})


def test_behind_what_the_pool_has_only_the_rest_is_looked_at() -> None:
    made = chain()
    assert made.find([9, 9, 9, 9, 50, 60, 70, 80], 10, 11) == made.find([1, 2, 3, 4, 50, 60, 70, 80], namespace=("a",))[2:]
    assert made.find([9, 9, 9, 9, 5, 6], 10, 11) == made.find([1, 2, 3, 4, 5, 6], namespace=("a",))[2:]
    assert made.find([9, 9], 10) == []


@pytest.mark.parametrize("other", [(), ("b",), ("a", ("a",)), (b"a",)])
def test_another_namespace_has_numbers_of_its_own(other: Any) -> None:
    made = chain()
    assert made.find([1, 2], namespace=other) == []
    made.add(None, [1, 2], 20, namespace=other)
    assert made.find([1, 2], namespace=other) != made.find([1, 2], namespace=("a",))
    made.give_up(20, keep=False)
    assert made.find([1, 2], namespace=other) == []
    made.check()


def test_what_nobody_has_is_free_again_with_what_is_before_it() -> None:
    made = chain()
    made.give_up(12, 13, 4, 5)
    assert len(made.check()) == 6
    made.give_up(10, 11, keep=False)
    assert len(made.check()) == 6, "before what a tier keeps"
    branch, other = (made.find(tokens, namespace=("a",)) for tokens in ([1, 2, 3, 4, 50, 60, 70, 80], [1, 2, 3, 4, 5, 6, 7, 8]))
    made.drop(*branch[3:])
    assert len(made.check()) == 5
    made.drop(*other[:3])
    assert len(made.check()) == 5, "before the end, which is kept"
    made.drop(*branch[2:])
    assert made.check() == sorted(other), "the other branch needs the beginning"
    made.drop(*other)
    assert made.check() == []
    assert made.index.num_free == NUMBERS


def test_a_sequence_that_grows_is_one_run_and_goes_on_where_it_was_cut() -> None:
    made = Made()
    for at in range(5):
        made.add(at - 1 if at else None, [at, at], at)
    assert len(made.index._runs._runs) == 1
    made.give_up(2, 3, 4, keep=False)
    made.add(1, [9, 9], 7)
    assert len(made.index._runs._runs) == 1
    assert len(made.find([0, 0, 1, 1, 9, 9, 2, 2])) == 3
    made.check()


def test_what_comes_again_has_its_number_still_and_what_is_behind_it_too() -> None:
    made = Made()
    made.add(None, [1, 2, 3, 4], 0, 1)
    numbers = made.find([1, 2, 3, 4])
    made.give_up(0, 1)
    made.add(None, [1, 2, 3, 4, 5, 6], 8, 9, 10)
    assert made.find([1, 2, 3, 4, 5, 6])[:2] == numbers
    made.index.forget(int32(10))
    made.cached.remove(10)
    assert made.find([1, 2, 3, 4, 5, 6]) == numbers
    made.check()


def test_units_that_came_back_are_noted_with_the_numbers_that_they_had() -> None:
    made = Made()
    made.add(None, [1, 2, 3, 4], 0, 1)
    numbers = np.array(made.find([1, 2, 3, 4]))
    made.give_up(0, 1)
    made.index.note(int32(5, 6), numbers, 0)
    made.cached = {5, 6}
    made.kept[:] = False
    assert made.give_up(5, 6) == [[5, 6]]
    assert made.kept[numbers].all()
    made.check()


def test_beginnings_come_first_and_what_went_last_before_the_rest() -> None:
    made = chain()
    assert made.give_up(12, 13, 4, 5, 10, 11) == [[10, 11, 4, 5, 12, 13]]


@pytest.mark.parametrize("turned", [False, True])
def test_in_whatever_order_a_prefix_cache_tells_units_beginnings_come_first(turned: bool) -> None:
    made = Made()
    made.add(None, [*range(80)], *range(40))
    made.add(19, [900, 901], 50)
    gone = [50, *range(39, 0, -2), *range(38, -1, -2)]
    assert made.give_up(*(gone[::-1] if turned else gone)) == [[*range(40), 50]]


def test_each_priority_is_given_up_by_itself_the_lowest_first() -> None:
    made = chain()
    made.add(13, [9, 9], 14, priority=3)
    made.index.raise_priority(int32(10, 11), 7)
    made.index.raise_priority(int32(11, 14), 1)
    assert [part for part in made.give_up(14, 12, 13, 4, 5, 10, 11) if part] == [[4, 5, 12, 13], [14], [10, 11]]
    made.add(None, [1, 2], 10, namespace=("a",))
    assert made.index._priority[10] == 0, "that of the unit before is forgotten"


@pytest.mark.parametrize("wide", [2**40, -(2**33)])
def test_ids_of_unlike_width_are_compared_as_numbers(wide: int) -> None:
    made = Made()
    made.index.add((), None, int32(1, 2, 3, 4), int32(0, 1), 0)
    made.index.add((), 1, np.array([wide, 5]), int32(2), 0)
    made.index.add((), 1, np.array([3, 5], dtype=np.int8), int32(3), 0)
    made.cached = {0, 1, 2, 3}
    assert len(made.find([1, 2, 3, 4, wide, 5])) == 3
    assert len(made.find([1, 2, 3, 4, wide + 1, 5])) == 2
    assert len(made.find([1, 2, 3, 4, 3, 5])) == 3
    made.check()


def test_what_is_kept_does_not_change_with_the_arrays_that_were_passed() -> None:
    made, ids = Made(), np.arange(8)
    made.index.add((), None, ids[:4], int32(0, 1), 0)
    made.index.add((), 1, ids[4:], int32(2, 3), 0)
    made.cached = {0, 1, 2, 3}
    ids[:] = 9
    assert len(made.find([*range(8)])) == 4


def test_tiers_make_room_where_numbers_run_out() -> None:
    made = Made(4)
    made.add(None, [1, 1, 2, 2], 0, 1)
    made.give_up(0, 1)
    made.add(None, [3, 3], 2)
    made.add(None, [1, 1, 7, 7, 8, 8], 3, 4, 5)
    assert made.asked == [1], "of three one had a number still, and one was free"
    assert len(made.find([1, 1, 7, 7, 8, 8])) == 3
    assert made.find([1, 1, 2, 2]) == made.find([1, 1]), "what stood there is gone"
    made.check()


def test_more_units_than_numbers_are_refused() -> None:
    made = Made(2)
    with pytest.raises(IntegrityError, match="TierRuns: expected 3 free numbers, got 2"):
        made.add(None, [1, 1, 2, 2, 3, 3], 0, 1, 2)
    assert made.asked == [1]


def test_clear_forgets_all() -> None:
    made = chain()
    made.give_up(12, 13)
    made.index.clear()
    made.cached.clear()
    assert made.check() == []
    assert made.find([1, 2], namespace=("a",)) == []
    made.add(None, [1, 2], 10)
    assert len(made.check()) == 1


def test_the_end_of_a_long_run_is_found_step_by_step() -> None:
    made = Made(1000)
    made.index = TierIndex(1000, 1000, SIZE, lambda at: made.kept[at], made.make_room)
    made.add(None, [*range(2000)], *range(1000))
    numbers = made.find([*range(2000)])
    made.give_up(*range(1000))
    made.drop(*numbers[:300], *numbers[400:])
    assert made.check() == sorted(numbers[:400])
    assert made.index._runs._runs[1].ids._room.size == 800, "no more than twice the room that it needs"


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda i: i._number.__setitem__(4, -1), "the units that are cached"),
        (lambda i: i._is_cached.__setitem__(90, True), "a number of its own for each"),
        (lambda i: setattr(i._runs, "num_free", i.num_free - 1), "each number free, or in one run"),
        (lambda i: i._runs.place.__setitem__(3, 9), "each where it is noted"),
        (lambda i: i._runs.run.__setitem__(3, 9), "each where it is noted"),
        (lambda i: setattr(i._runs._runs[1].ids, "size", 2), "token ids of each"),
    ],
)
def test_what_is_wrong_is_said(spoil: Any, text: str) -> None:
    made = chain()
    made.check()
    spoil(made.index)
    with pytest.raises(IntegrityError, match=text):
        made.check()


def test_a_number_of_no_use_is_noticed() -> None:
    made = chain()
    made.give_up(12, 13)
    made.kept[:] = False
    with pytest.raises(IntegrityError, match="TierRuns: expected nothing behind what is used"):
        made.check()


def test_ids_that_fit_take_half_the_memory_of_int64() -> None:
    made = Made()
    made.add(None, [1, 2, 2**31 - 1, -(2**31)], 0, 1)
    made.add(None, [2, 2, 2**31, 5], 2, 3)
    assert [run.ids.view.dtype.itemsize for run in made.index._runs._runs.values()] == [4, 8]
    assert len(made.find([2, 2, 2**31, 5])) == len(made.find([1, 2, 2**31 - 1, -(2**31)])) == 2


def followed(made: Made, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Note how many ids are looked at, each time that the runs are followed."""
    follow = made.index._runs.follow

    def noting(namespace: Any, before: Any, ids: npt.NDArray[Any]) -> Any:
        calls.append(ids.size)
        return follow(namespace, before, ids)

    monkeypatch.setattr(made.index._runs, "follow", noting)


def test_what_is_asked_again_is_looked_up_once_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    made, calls = chain(), list[int]()
    followed(made, calls, monkeypatch)
    ids = [1, 2, 3, 4, 5, 6, 9, 9]
    numbers = made.find(ids, namespace=("a",))
    assert [made.find(ids, namespace=("a",)) for _ in range(3)] == [numbers] * 3
    assert made.find([*ids, 7, 7], namespace=("a",)) == numbers, "it follows from what is behind the last number, and not from more"
    assert calls == [8]
    for change in (lambda: made.add(None, [70, 70], 30), lambda: made.give_up(30, keep=False), made.index.clear):
        assert made.find([7], namespace=("b",)) == []
        del calls[:]
        change()
        made.find([7], namespace=("b",))
        assert 1 in calls


@pytest.mark.parametrize(
    ("ids", "cached", "namespace", "count"),
    [
        ([1, 2, 3, 4, 5, 6], (), ("a",), 3),  # goes on where the first ended
        ([1, 2], (), ("a",), 1),  # ends before
        ([1, 2, 50, 60], (), ("a",), 1),
        ([9, 2, 3, 4], (), ("a",), 0),
        ([1, 2, 3, 4], (), ("b",), 0),
        ([1, 2, 3, 4], (), (), 0),
        ([9, 9, 1, 2], (10,), ("a",), 0),  # what would be found behind nothing
        ([9, 9, 3, 4], (10,), ("a",), 1),
    ],
)
def test_what_was_found_for_one_prompt_is_not_told_for_another(ids: list[int], cached: tuple[int, ...], namespace: Any, count: int) -> None:
    made = chain()
    for before in ([1, 2, 3, 4], [1, 2, 8, 8], [7]):
        made.find(before, namespace=("a",))
        assert len(made.find(ids, *cached, namespace=namespace)) == count
    assert made.find(ids, *cached, namespace=namespace) == chain().find(ids, *cached, namespace=namespace)


def test_an_array_that_was_written_to_is_another_prompt() -> None:
    made, ids = chain(), np.array([1, 2, 3, 4, 5, 6, 7, 8])
    assert made.index.find(ids, ("a",), int32()).size == 4
    ids[5] = 60
    assert made.index.find(ids, ("a",), int32()).size == 2
    ids[4:] = [50, 60, 70, 80]
    assert made.index.find(ids, ("a",), int32()).size == 4
    assert made.index.find(ids.astype(np.int32).view(np.int64), ("a",), int32()).size == 0, "the same bytes, of other ids"


def test_nothing_that_was_passed_is_kept_alive_by_what_was_found() -> None:
    made = Made(1000)
    made.index = TierIndex(1000, 1000, SIZE, lambda at: made.kept[at], made.make_room)
    made.add(None, [*range(20)], *range(10))
    ids = np.concatenate((np.arange(20), np.zeros(100_000, dtype=np.int64)))
    made.index.find(ids, (), int32())
    last = made.index._runs._last
    assert last is not None
    assert len(last.ids) == 8 * (20 + SIZE), "what it follows from, and no more"
    assert sys.getrefcount(ids) == 2


@settings(PROPERTY, max_examples=examples(20))
@given(seed=st.integers(0, 2**32))
def test_whatever_comes_between_what_is_found_is_what_the_runs_have(seed: int) -> None:
    rng, made = random.Random(seed), Made(40)  # noqa: S311 - nothing secret
    spaces: list[Any] = [(), ("a",)]
    asked = [(rng.choice(spaces), [rng.randrange(2) for _ in range(SIZE * rng.randrange(6))]) for _ in range(4)]
    held: dict[int, int | None] = {}  # by unit: the one before
    for _ in range(80):
        action, free = rng.random(), [unit for unit in range(UNITS) if unit not in held]
        leaves = [unit for unit in held if unit not in held.values()]
        if action < 0.3 and free:
            above, space = rng.choice([None, *held]), rng.choice(spaces)
            tokens = [rng.randrange(2) for _ in range(SIZE)]
            before = None if above is None else made.index._number[above]
            if not made.index._is_cached[made.index._runs.follow(space, before, np.array(tokens))[2]].any():
                made.add(above, tokens, free[0], namespace=space)
                held[free[0]] = above
        elif action < 0.5 and leaves:
            made.give_up(leaf := rng.choice(leaves), keep=rng.random() < 0.5)
            del held[leaf]
        elif action < 0.6 and made.kept.any():
            made.drop(int(rng.choice(np.flatnonzero(made.kept))))
        else:
            space, tokens = rng.choice(asked)
            expected = made.index._runs.follow(space, None, np.array(tokens, dtype=np.int64))[2].tolist()
            assert made.find(tokens, namespace=space) == expected
    made.check()


@settings(PROPERTY, max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_against_a_model_of_prefixes(seed: int) -> None:
    """Of each prefix there are numbers, as far as somebody has a unit of it or behind it: the same ones all the time."""
    rng, made = random.Random(seed), Made(400)  # noqa: S311 - nothing secret
    paths: dict[int, tuple[int, ...]] = {}  # by unit: all tokens up to its end
    numbers: dict[tuple[int, ...], int] = {}  # of each prefix that somebody has
    for _ in range(60):
        free = [each for each in range(UNITS) if each not in paths]
        action = rng.random()
        if action < 0.5 and len(free) > 4:
            above = rng.choice([None, *paths])
            new, path = rng.sample(free, rng.randint(1, 4)), paths[above] if above is not None else ()
            tokens = [rng.randrange(3) for _ in range(SIZE * len(new))]
            fresh = [(*path, *tokens[: SIZE * (at + 1)]) for at in range(len(new))]
            if not set(fresh) & set(paths.values()):  # one unit for equal tokens, as prefix caches have
                made.add(above, tokens, *new)
                paths.update(zip(new, fresh, strict=True))
        elif action < 0.8 and paths:
            root = paths[rng.choice(list(paths))]
            gone = [unit for unit, path in paths.items() if path[: len(root)] == root]
            (told,) = made.give_up(*rng.sample(gone, len(gone)), keep=rng.random() < 0.7)
            assert sorted(told) == sorted(gone)
            for unit in gone:
                del paths[unit]
        else:
            made.drop(*(number for number in rng.sample(range(400), 100) if made.kept[number]))
        known = made.check()
        numbers = {path: number for path, number in numbers.items() if number in known}
        for path in paths.values():
            found = made.find(list(path))
            assert len(found) * SIZE == len(path)
            for at, number in enumerate(found):
                assert numbers.setdefault(path[: SIZE * (at + 1)], number) == number
        assert len(set(numbers.values())) == len(numbers)
