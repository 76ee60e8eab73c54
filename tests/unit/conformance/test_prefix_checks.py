"""The checks of prefix caches that the seeded faults of the radix tree cannot show: caches that somebody else wrote."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import numpy as np
import pytest

from kvdock.prefix import PrefixCache, RadixPrefixCache
from kvdock.prefix.eviction import POLICIES
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.prefix_alike import another_world, answers_of, check_alike
from kvdock_conformance.checking.prefix_costs import check_leaves_nothing
from kvdock_conformance.checking.prefix_target import PrefixTarget
from kvdock_conformance.checking.prefix_whole import check_notices_damage, contradiction, damaged, filled, places_of, why_no_damage
from kvdock_conformance.requirement import Level
from kvdock_conformance.requirements import load
from kvdock_conformance.session import ConformancePlan, Session
from kvdock_conformance.verdict import Verdict
from support_chain import ChainCache, register
from support_conformance import TESTS

EVERY = load()
ALIKE = EVERY["KVD-PREFIX-015"].selected(Level.CORE)[0].data


class Making(PrefixTarget):
    """A target that makes caches of a class, which no plugin brings."""

    def __init__(self, kind: Any, **options: Any) -> None:
        self.cls, self.options = kind, options
        super().__init__(kind.__name__)

    def make(self, block_size: int) -> PrefixCache:
        made: PrefixCache = self.cls(block_size, **self.options)
        return made


@pytest.fixture(scope="module")
def chains() -> None:
    register()


@pytest.mark.slow
def test_a_cache_of_another_make_conforms_but_for_the_time_that_its_long_paths_take() -> None:
    path = {"PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"}
    with Session(ConformancePlan("chain", EVERY, kind="prefix", setup="support_chain:register", environ=path)) as session:
        found = {item.id: session.requirement(item, Level.CORE).verdict for item in EVERY.of_kind("prefix")}
    others = {name: verdict for name, verdict in found.items() if verdict is not Verdict.PASSED}
    assert others == {"KVD-PREFIX-022": Verdict.FAILED, "KVD-PREFIX-026": Verdict.UNSUPPORTED}, "it walks over all that is before"


# Two processes


@pytest.mark.slow
def test_a_cache_that_follows_salted_hashes_is_noticed_in_processes_of_its_own(chains: None) -> None:
    target = PrefixTarget("chain-salted", "support_chain:register")
    with pytest.raises(NonconformanceError, match=r"step \d+, \w+, of two caches that are fed alike in two processes"):
        check_alike(target, ALIKE)


def test_an_interpreter_that_cannot_make_the_cache_is_a_failure() -> None:
    target = PrefixTarget("radix", "no_such_module_of_ours:register")
    with pytest.raises(NonconformanceError, match="no_such_module_of_ours"):
        check_alike(target, ALIKE)


def test_what_is_asked_there_reaches_every_kind_of_answer() -> None:
    found = [answers_of(RadixPrefixCache(data["block_size"]), data) for data in ALIKE["played"]]
    with another_world(3, -1):
        assert found == [answers_of(RadixPrefixCache(data["block_size"]), data) for data in ALIKE["played"]]
    said = [(what.split(", ")[-1], answer, events) for sequence in found for what, answer, *events in sequence]
    for kind in ("match", "insert", "behind", "evict", "discard", "partial"):
        assert len([answer for what, answer, _ in said if what == kind and answer and not isinstance(answer, str)]) >= 5, kind
    assert {answer for _, answer, _ in said if str(answer).endswith("Error")} == {"OutOfBlocksError", "StaleHandleError"}
    assert sum(len(answer) > 1 for what, answer, _ in said if what == "evict" and isinstance(answer, list)) > 10, "whose order can differ"
    assert {event.partition("(")[0] for _, _, events in said for event in events} == {"Stored", "Removed"}


# Damage


class Careless(ChainCache):
    """Proves nothing."""

    def check_integrity(self) -> None:
        self._enter()


class Shelf(ChainCache):
    """Has a book that all of its kind share."""

    books: Any = {"all": [1, 2, 3]}

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.own_books = self.books


def test_a_cache_that_does_not_look_is_told_what_contradicts_what() -> None:
    with pytest.raises(NonconformanceError, match=r"check_integrity of a cache where size_info says 30 tokens, and .* 7 blocks of 5"):
        check_notices_damage(Making(Careless), {"block_size": 5})
    said = {text for text, _ in damaged(Making(Careless), 5)}
    assert said == {
        "size_info says 30 tokens, and stored_blocks 7 blocks of 5 (dict less one entry)",
        "size_info says 35 tokens, and stored_blocks 6 blocks of 5 (dict less one entry)",
        "num_locks is 0, and size_info SizeInfo(evictable_size=30, protected_size=5) (Entry 'held' plus 1)",
    }


@pytest.mark.parametrize("kind", [ChainCache, RadixPrefixCache])
@pytest.mark.parametrize("block_size", [5, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 3, 16))])
def test_a_cache_that_looks_passes_and_is_asked(kind: type[PrefixCache], block_size: int) -> None:
    target = Making(kind)
    assert why_no_damage(target, {"block_size": block_size}) == []
    check_notices_damage(target, {"block_size": block_size})


class Kept:
    """Has attributes of both kinds, a number that is the block size, and what two of it share."""

    __slots__ = ("__dict__", "slot")
    shared: Any = [1]

    def __init__(self) -> None:
        self.slot, self.number, self.size, self.flag, self.text = 1, 2, 5, True, "3"
        self.books = [{"a": 4, None: 3}, [6], deque([7]), {8}, (9, [10]), np.array([[11], [12]]), np.array([1.5]), np.array(13)]
        self.common, self.method = self.shared, self.__init__


def test_every_place_of_a_number_is_found_and_damaged() -> None:
    damages = []
    for number in range(len(places_of(Kept(), frozenset([id(Kept.shared)])))):
        kept = Kept()
        place = places_of(kept, frozenset([id(Kept.shared)]))[number]
        before = repr([kept.slot, vars(kept)])
        if place.damage(5):
            assert repr([kept.slot, vars(kept)]) != before
            damages.append(str(place))
    taken = [text for text in damages if text.endswith("less one entry")]
    numbers = ("Kept 'slot'", "Kept 'number'", "dict 'a'", "dict None", "list 0", "deque 0", "list 0", "ndarray 0")
    assert sorted(set(damages) - set(taken)) == sorted({f"{name} plus 1" for name in numbers})
    assert set(taken) == {f"{kind} less one entry" for kind in ("list", "dict", "deque", "set")}
    assert Kept.shared == [1]


def test_what_two_caches_share_is_left_alone_and_nothing_is_contradicted_before() -> None:
    target = Making(Shelf)
    assert contradiction(filled(target, 5)) == ""
    assert len(list(damaged(target, 5))) > 4
    assert Shelf.books == {"all": [1, 2, 3]}


def test_a_cache_without_books_is_not_asked() -> None:
    (reason,) = why_no_damage(PrefixTarget("naive"), {"block_size": 5})
    assert reason.startswith("naive keeps nothing in Python")


# Ages and memory


class Young(ChainCache):
    """Takes what goes for one use younger than it is."""

    def remove(self, entry: Any) -> int:
        entry.last_use += self.clock > entry.last_use
        return super().remove(entry)


@pytest.mark.parametrize("case", EVERY["KVD-PREFIX-030"].selected(Level.CORE), ids=lambda case: case.name)
def test_what_is_one_run_is_the_caches_affair_and_its_age_is_not(case: Any) -> None:
    item = EVERY["KVD-PREFIX-030"]
    item.check(Making(ChainCache), case.data)
    with pytest.raises(NonconformanceError, match=r"stats: age_max: expected"):
        item.check(Making(Young), case.data)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_size", [1, 16])
def test_no_policy_leaves_memory_behind(policy: str, block_size: int) -> None:
    check_leaves_nothing(Making(RadixPrefixCache, policy=policy), {"block_size": block_size, "times": 300})
