"""The checks of prefix caches that the seeded faults of the radix tree cannot show: caches that somebody else wrote."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from kvdock.errors import IntegrityError
from kvdock.prefix import PrefixCache, RadixPrefixCache, SizeInfo
from kvdock.prefix.eviction import POLICIES
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.prefix_alike import another_world, answers_of, check_alike
from kvdock_conformance.checking.prefix_costs import check_leaves_nothing
from kvdock_conformance.checking.prefix_target import PrefixTarget
from kvdock_conformance.checking.prefix_whole import check_notices_damage, contradiction, damaged, filled, places_of, why_no_damage
from kvdock_conformance.requirement import Level
from kvdock_conformance.requirements import load

EVERY = load()
ALIKE = EVERY["KVD-PREFIX-015"].selected(Level.CORE)[0].data


class Making(PrefixTarget):
    """A target that makes caches of a class, which no plugin brings."""

    def __init__(self, kind: type[RadixPrefixCache], **options: Any) -> None:
        self.cls, self.options = kind, options
        super().__init__(kind.__name__)

    def make(self, block_size: int) -> PrefixCache:
        return self.cls(block_size, **self.options)


# Two processes

PLUGIN = """
import sys
from kvdock import runtime
from kvdock.plugin import EvictionPolicy, hookimpl
from kvdock.prefix import RadixPrefixCache

KVDOCK_API = (1, 0)

class Odd(EvictionPolicy):
    name = "odd"

    def key(self, usage):
        return KEY

class Tree(RadixPrefixCache):
    def __init__(self, block_size=16):
        super().__init__(block_size, Odd())

@hookimpl
def kvdock_prefix_caches():
    return {"odd": Tree}

def register():
    runtime.default().registry.register(sys.modules[__name__], "odd")
"""


@pytest.mark.parametrize(
    ("key", "is_alike"),
    [
        ("hash(str(usage.created))", False),
        pytest.param("usage.created % 7", True, marks=pytest.mark.slow),
        pytest.param("hash(usage.created)", True, marks=pytest.mark.slow),  # of an int it has no seed
    ],
)
def test_a_plugin_is_asked_in_processes_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, is_alike: bool) -> None:
    module = f"odd_prefix_{key.count('(')}"
    (tmp_path / f"{module}.py").write_text(PLUGIN.replace("KEY", key), encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(PrefixTarget, "make", lambda self, block_size: RadixPrefixCache(block_size))  # here nobody brings it
    target = PrefixTarget("odd", f"{module}:register")
    if is_alike:
        check_alike(target, ALIKE)
        return
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


class Ledger(RadixPrefixCache):
    """Counts tokens of its own, in a dict; whether it checks them is another matter."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.ledger: dict[int, int] = {}
        self.subscribe(lambda event: self.write(event))

    def write(self, event: Any) -> None:
        blocks = event.blocks.tolist()
        self.ledger = {block: 1 for block in {*self.ledger, *blocks} if hasattr(event, "tokens") or block not in blocks}

    @property
    def size_info(self) -> SizeInfo:
        return SizeInfo(sum(self.ledger.values()) * self.block_size, 0)


class HonestLedger(Ledger):
    def check_integrity(self) -> None:
        if list(self.ledger.items()) != [(block, 1) for block in self.stored_blocks().tolist()]:
            raise IntegrityError("ledger", expected="each block once", got=self.ledger)


def test_a_cache_that_does_not_look_at_a_book_of_its_own_is_told_which() -> None:
    with pytest.raises(NonconformanceError, match=r"check_integrity of a cache where .* \(dict (0 plus 1|less one entry)\)"):
        check_notices_damage(Making(Ledger), {"block_size": 5})
    said = [text for text, _ in damaged(Making(Ledger), 5)]
    assert "size_info says 40 tokens, and stored_blocks 7 blocks of 5 (dict 0 plus 1)" in said
    assert "size_info says 30 tokens, and stored_blocks 7 blocks of 5 (dict less one entry)" in said


@pytest.mark.parametrize("kind", [HonestLedger, RadixPrefixCache])
@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 16])
def test_a_cache_that_looks_passes_and_is_asked(kind: type[RadixPrefixCache], block_size: int) -> None:
    target = Making(kind)
    assert why_no_damage(target, {"block_size": block_size}) == []
    check_notices_damage(target, {"block_size": block_size})


class Kept:
    """Has attributes of both kinds, a number that is the block size, and what two of it share."""

    __slots__ = ("__dict__", "slot")
    shared: Any = [1]

    def __init__(self) -> None:
        self.slot, self.number, self.size, self.flag, self.text = 1, 2, 5, True, "3"
        self.books = [{"a": 4}, [6], deque([7]), {8}, (9, [10]), np.array([11, 12]), np.array([1.5])]
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
    numbers = ("Kept 'slot'", "Kept 'number'", "dict 'a'", "list 0", "deque 0", "list 0", "ndarray 0", "ndarray 1")
    assert sorted(set(damages) - set(taken)) == sorted({f"{name} plus 1" for name in numbers})
    assert set(taken) == {f"{kind} less one entry" for kind in ("list", "dict", "deque", "set")}
    assert Kept.shared == [1]


class Shelf(HonestLedger):
    """Has a book that all of its kind share."""

    books: Any = {"all": [1, 2, 3]}

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.own_books = self.books


def test_what_two_caches_share_is_left_alone_and_nothing_is_contradicted_before() -> None:
    target = Making(Shelf)
    assert contradiction(filled(target, 5)) == ""
    assert len(list(damaged(target, 5))) > 4
    assert Shelf.books == {"all": [1, 2, 3]}


def test_a_cache_without_books_is_not_asked() -> None:
    (reason,) = why_no_damage(PrefixTarget("naive"), {"block_size": 5})
    assert reason.startswith("naive keeps nothing in Python")


# Ages and memory


class BlockByBlock(RadixPrefixCache):
    """Evicts each block as a run of its own."""

    def evict(self, num_blocks: int) -> Any:
        if num_blocks * self.block_size > self.size_info.evictable_size or not num_blocks > 1:
            return super().evict(num_blocks)
        return np.concatenate([super(BlockByBlock, self).evict(1) for _ in range(num_blocks)])


class Young(BlockByBlock):
    """Counts the ages from the use before the last call."""

    @property
    def stats(self) -> Any:
        stats = super().stats
        return attrs.evolve(stats, age_sum=stats.age_sum + stats.evictions)


@pytest.mark.parametrize("case", EVERY["KVD-PREFIX-030"].selected(Level.CORE), ids=lambda case: case.name)
def test_what_is_one_run_is_the_caches_affair_and_its_age_is_not(case: Any) -> None:
    item = EVERY["KVD-PREFIX-030"]
    item.check(Making(BlockByBlock), case.data)
    with pytest.raises(NonconformanceError, match=r"stats: age_sum, \d+ to \d+ of this step"):
        item.check(Making(Young), case.data)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_size", [1, 16])
def test_no_policy_leaves_memory_behind(policy: str, block_size: int) -> None:
    check_leaves_nothing(Making(RadixPrefixCache, policy=policy), {"block_size": block_size, "times": 300})
