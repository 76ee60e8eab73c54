"""`Tiers` without a manager: what is given up, found, held and loaded, call by call, and against a plain model."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdock.errors import IntegrityError, KVDockWarning
from kvdock.scheduler.tiers import Found, Tiers
from opskit import PROPERTY
from support_slow import examples
from support_tiers import FailingTier, MemoryTier

SIZE, POOL = 2, 24


def int32(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


class Pool:
    """A pool of blocks, each with two columns if wished, whose contents are numbers, and tiers behind it."""

    def __init__(self, *sizes: int, columns: int = 1, fails: Any = None) -> None:
        self.memory = np.zeros((POOL * columns, 1), dtype=np.int64)
        self.columns = columns
        self.made = [MemoryTier(n, self.memory) if fails is None else FailingTier(n, self.memory, fails) for n in sizes]
        self.tiers = Tiers(self.made, POOL, per_unit=columns, columns=columns, block_size=SIZE)
        self.has: dict[int, list[int]] = {}  # by unit: all tokens up to its end
        self.absent: set[int] = set()  # blocks that a group has let go

    def blocks_of(self, units: Any) -> npt.NDArray[np.int32]:
        places = np.asarray(units)[:, None] * self.columns + np.arange(self.columns)
        return np.where(np.isin(places, list(self.absent)), -1, places).astype(np.int32)

    def content(self, tokens: list[int], column: int) -> int:
        return hash((tuple(tokens), column))

    def publish(self, before: int | None, tokens: list[int], units: list[int], priority: int = 0) -> None:
        self.tiers.index.add((), before, np.array(tokens), int32(*units), priority)
        path = [] if before is None else self.has[before]
        for at, unit in enumerate(units):
            path = [*path, *tokens[at * SIZE : (at + 1) * SIZE]]
            self.has[unit] = path
            for column in range(self.columns):
                self.memory[unit * self.columns + column] = self.content(path, column)

    def give_up(self, *units: int) -> None:
        self.tiers.give_up(int32(*units), self.blocks_of)
        self.tiers.index.forget(int32(*units))
        for unit in units:
            del self.has[unit]
            self.memory[unit * self.columns : (unit + 1) * self.columns] = 0  # handed out

    def find(self, tokens: list[int], *cached: int) -> Found | None:
        """Look for a prompt behind its units in the pool."""
        return self.tiers.find(np.array(tokens, dtype=np.int64), (), int32(*cached))

    def load(self, tokens: list[int], have: int, units: list[int]) -> npt.NDArray[np.bool_]:
        """Load what there is behind ``have`` units into units of the pool; look at every block that should be there."""
        found = self.find(tokens)
        assert found is not None
        found = Found(found.units[have:], found.there[have:])
        self.tiers.hold(found)
        count = min(found.units.size, len(units))
        done = self.tiers.load(found, np.where(found.there[:count], self.blocks_of(units[:count]), -1))
        self.tiers.release(found)
        for at in range(count):
            for column in range(self.columns):
                if done[at, column]:
                    path = tokens[: (have + at + 1) * SIZE]
                    assert self.memory[units[at] * self.columns + column] == self.content(path, column)
        self.check()
        return done

    def check(self) -> None:
        self.tiers.check_integrity(int32(*sorted(self.has)))


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def three(*sizes: int, **how: Any) -> Pool:
    """Return a pool that has given up a prefix of four units."""
    pool = Pool(*sizes, **how)
    pool.publish(None, PROMPT, [3, 1, 4, 2])
    pool.give_up(3, 1, 4, 2)
    pool.check()
    return pool


def test_what_was_given_up_is_found_and_loaded() -> None:
    pool = three(10)
    found = pool.find([*PROMPT, 9, 9])
    assert found is not None
    assert found.there.tolist() == [[True]] * 4
    assert pool.load(PROMPT, 0, [9, 8, 7, 6]).all()
    assert pool.load(PROMPT, 2, [5, 0]).all(), "the copies are there still"
    (usage,) = pool.tiers.usage()
    assert (usage.stored, usage.loaded, usage.used) == (4, 6, 4)


@pytest.mark.parametrize(("tokens", "have"), [([9, 9], 0), ([], 0), (PROMPT, 4), ([1, 2, 9, 9], 1), ([1, 2, 3], 1)])
def test_what_is_not_there_is_not_found(tokens: list[int], have: int) -> None:
    pool = three(10)
    pool.publish(None, PROMPT, [10, 11, 12, 13])
    assert pool.find(tokens, *[10, 11, 12, 13][:have]) is None


def test_of_what_is_in_the_pool_still_tiers_have_nothing() -> None:
    pool = Pool(10)
    pool.publish(None, PROMPT, [3, 1, 4, 2])
    pool.give_up(4, 2)
    assert pool.find(PROMPT[:4]) is None, "numbers, and nothing there"
    found = pool.find(PROMPT)
    assert found is not None
    assert found.there[:, 0].tolist() == [False, False, True, True]
    assert pool.load(PROMPT, 2, [10, 11]).all()


def test_a_branch_shares_the_numbers_of_its_beginning() -> None:
    pool = Pool(20)
    pool.publish(None, PROMPT, [3, 1, 4, 2])
    pool.publish(1, [50, 60, 70, 80], [8, 9])
    pool.give_up(8, 9)
    pool.give_up(4, 2)
    pool.give_up(3, 1)
    assert pool.load([1, 2, 3, 4, 50, 60, 70, 80], 0, [10, 11, 12, 13]).all()
    assert pool.load(PROMPT, 0, [14, 15, 16, 17]).all()
    assert pool.tiers.usage()[0].used == 6


def test_what_comes_again_is_not_copied_again() -> None:
    pool = three(10)
    pool.publish(None, PROMPT, [10, 11, 12, 13])
    calls = len(pool.made[0].calls)
    pool.give_up(10, 11, 12, 13)
    assert len(pool.made[0].calls) == calls
    pool.check()


def test_of_a_prefix_that_is_too_long_the_beginning_is_kept() -> None:
    pool = three(3)
    found = pool.find(PROMPT)
    assert found is not None
    assert found.there[:, 0].tolist() == [True, True, True]


def test_ends_of_prefixes_go_first_and_to_the_next() -> None:
    pool = three(4, 10)
    pool.publish(None, [50, 60], [10])
    pool.give_up(10)
    first, second = pool.tiers.usage()
    assert (first.used, second.used) == (4, 1)
    assert pool.made[1].calls == [("store", [[pool.made[0].calls[0][1][3][1], 0]])], "the last of the four"
    assert pool.load(PROMPT, 0, [3, 1, 4, 2]).all(), "three from the one, one from the other"
    assert pool.load([50, 60], 0, [11]).all()


def test_a_column_that_is_missing_is_not_there() -> None:
    pool = Pool(20, columns=2)
    pool.publish(None, PROMPT, [3, 1, 4, 2])
    pool.absent = {3 * 2 + 1, 4 * 2}
    pool.give_up(3, 1, 4, 2)
    pool.absent = set()
    found = pool.find(PROMPT)
    assert found is not None
    assert found.there.tolist() == [[True, False], [True, True], [False, True], [True, True]]
    assert pool.load(PROMPT, 0, [10, 11, 12, 13]).tolist() == found.there.tolist()


def test_a_column_that_comes_later_completes_a_unit() -> None:
    pool = Pool(20, columns=2)
    pool.publish(None, PROMPT, [3, 1, 4, 2])
    pool.absent = {7}
    pool.give_up(3, 1, 4, 2)
    pool.absent = set()
    pool.publish(None, PROMPT[:2], [5])
    pool.give_up(5)
    assert pool.load(PROMPT, 0, [10, 11, 12, 13]).all()
    assert pool.tiers.usage()[0].stored == 8


def test_what_is_held_does_not_go_and_is_said_to_be_held() -> None:
    pool = three(4)
    found = pool.find(PROMPT)
    assert found is not None
    pool.tiers.hold(found)
    pool.publish(None, [50, 60], [10])
    pool.give_up(10)
    assert pool.find([50, 60]) is None, "there was no room for it"
    with pytest.raises(IntegrityError):
        pool.check()
    pool.tiers.release(found)
    pool.check()
    assert pool.load(PROMPT, 0, [3, 1, 4, 2]).all()


def test_a_tier_is_told_what_will_be_loaded() -> None:
    pool = three(2, 10)
    pool.publish(None, PROMPT[:2], [10])
    found = pool.find(PROMPT, 10)
    assert found is not None
    pool.tiers.prefetch(found)
    assert [sum(map(len, tier.ahead)) for tier in pool.made] == [1, 0]


def test_a_load_that_fails_is_looked_for_no_more() -> None:
    failing = [True]
    pool = three(10, fails=lambda tier, what: what == "load" and failing[0])
    with pytest.warns(KVDockWarning, match="in load: the disk is gone"):
        assert not pool.load(PROMPT, 0, [3, 1, 4, 2]).any()
    assert pool.find(PROMPT) is None
    assert pool.tiers.usage()[0].lost == 4
    assert pool.tiers.usage()[0].used == 0


def test_priorities_are_remembered_where_units_have_blocks() -> None:
    pool = Pool(10)
    pool.publish(None, PROMPT[:4], [3, 1], priority=4)
    pool.give_up(3, 1)
    found = pool.find(PROMPT)
    assert found is not None
    assert pool.tiers.priorities(found.units).tolist() == [4, 4]


def test_clear_forgets_what_the_pool_has_published_too() -> None:
    pool = three(10)
    pool.publish(None, PROMPT, [3, 1, 4, 2])
    pool.tiers.clear()
    pool.has.clear()
    pool.check()
    assert pool.find(PROMPT) is None


@settings(PROPERTY, max_examples=examples(15))
@given(seed=st.integers(0, 2**32))
def test_against_a_model(seed: int) -> None:
    """With room for all, what was given up is found, each block; with less, what is found is right."""
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    has_room, fails = rng.random() < 0.5, rng.random() < 0.3
    sizes = [500] if has_room else rng.choice([[3], [9], [2, 5], [4, 4, 9]])
    pool = Pool(*sizes, columns=rng.choice([1, 2]), fails=(lambda *_: rng.random() < 0.2) if fails else None)
    given_up: set[tuple[int, ...]] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if fails else "error", KVDockWarning)
        for _ in range(40):
            free = [unit for unit in range(POOL) if unit not in pool.has]
            if len(free) > 6 and rng.random() < 0.6:
                before = rng.choice([None, None, *pool.has])
                path = [] if before is None else pool.has[before]
                tokens = [rng.randrange(2) for _ in range(SIZE * rng.randint(1, 3))]
                ends = [(*path, *tokens[:stop]) for stop in range(SIZE, len(tokens) + 1, SIZE)]
                if not {tuple(each) for each in pool.has.values()} & set(ends):  # one block for equal tokens, as prefix caches have
                    pool.publish(before, tokens, rng.sample(free, len(ends)), rng.choice([0, 0, 3]))
            elif pool.has:
                root = pool.has[rng.choice(list(pool.has))]
                gone = sorted((unit for unit, path in pool.has.items() if path[: len(root)] == root), key=lambda unit: -len(pool.has[unit]))
                given_up |= {tuple(pool.has[unit]) for unit in gone}
                pool.give_up(*gone)
            pool.check()
            sought = list(rng.choice(sorted(given_up))) if given_up else []
            found = pool.find(sought)
            if has_room and not fails and sought:
                assert found is not None
                assert found.there[-1].all(), "with room for all nothing is forgotten"
            free = [unit for unit in range(POOL) if unit not in pool.has]
            if found is not None and len(free) >= found.units.size:
                pool.load(sought, 0, free[: found.units.size])
