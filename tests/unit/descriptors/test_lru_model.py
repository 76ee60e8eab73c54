"""`LRUDescriptorCache` against a slow model, step by step."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvdock import LRUDescriptorCache
from kvdock.descriptors.lifetimes import Held
from support_descriptors import in_thread
from support_slow import examples

KEYS = st.integers(0, 7).map(lambda n: (n % 2 - 2, n // 2))  # -1 and -2 have one hash


@attrs.define(eq=False)
class Item:
    """A descriptor."""

    key: tuple[int, int]
    pinned: bool = False
    fails: bool = False


class Model(RuleBasedStateMachine):
    """Does everything twice: in the cache, and in a dictionary whose order is that of use."""

    @initialize(capacity=st.integers(1, 4))
    def start(self, capacity: int) -> None:
        self.destroyed: Counter[int] = Counter()
        self.items: list[Item] = []
        self.expected: Counter[int] = Counter()
        self.running: dict[int, Held] = {}
        self.waiting: list[Item] = []
        self.kept: list[Item] = []
        self.model: OrderedDict[tuple[int, int], Item] = OrderedDict()
        self.capacity = capacity
        self.hits = self.misses = self.evictions = self.failures = 0
        self.clear_requested = False
        self.lru: LRUDescriptorCache[Any] = LRUDescriptorCache(capacity, self.destroyer)

    def destroyer(self, item: Item) -> None:
        self.destroyed[id(item)] += 1
        if item.fails:
            raise ValueError("as the model says")

    # What the model does.

    def leave(self, item: Item) -> None:
        if id(item) in self.running:
            self.waiting.append(item)
        elif item.pinned:
            self.kept.append(item)
        else:
            self.expected[id(item)] += 1
            self.failures += item.fails

    def settle(self) -> None:
        if self.clear_requested:
            self.clear_requested = False
            self.drop_all()

    def drop_all(self) -> None:
        for key in [key for key, item in self.model.items() if not item.pinned]:
            self.leave(self.model.pop(key))

    def make_room(self) -> None:
        free = [key for key, item in self.model.items() if not item.pinned]
        for key in free[: max(0, len(free) - self.capacity)]:
            self.evictions += 1
            self.leave(self.model.pop(key))

    # What both do.

    @rule(key=KEYS)
    def get(self, key: tuple[int, int]) -> None:
        self.settle()
        found = self.model.get(key)
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
            self.model.move_to_end(key)
        value = self.lru.get(key)
        assert (value.ending.value if isinstance(value, Held) else value) is found

    @rule(key=KEYS, fails=st.booleans(), way=st.sampled_from(["plain", "held", "held and running"]))
    def put(self, key: tuple[int, int], fails: bool, way: str) -> None:
        item = Item(key, fails=fails)
        self.items.append(item)
        self.settle()
        old = self.model.pop(key, None)
        self.model[key] = item
        if old is not None:
            self.leave(old)
        self.make_room()
        value = item if way == "plain" else Held(item, self.lru.owner)
        if way == "held and running":
            self.running[id(item)] = value
        self.lru.put(key, value)

    @rule(key=KEYS)
    def put_the_same_again(self, key: tuple[int, int]) -> None:
        self.settle()
        if key in self.model:
            self.model.move_to_end(key)
            self.lru.put(key, self.lru.entries[key].content)
            self.make_room()
        else:
            self.misses += 1
            assert self.lru.get(key) is None

    @rule(capacity=st.integers(1, 5))
    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self.settle()
        self.make_room()
        self.lru.resize(capacity)

    @rule()
    def clear(self) -> None:
        self.settle()
        self.drop_all()
        self.lru.clear()

    @rule()
    def clear_from_elsewhere(self) -> None:
        self.clear_requested = True
        in_thread(self.lru.clear)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end_a_run(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([*self.running]))
        del self.running[number]
        for item in [item for item in self.waiting if id(item) == number]:
            self.waiting.remove(item)
            self.leave(item)

    @precondition(lambda self: self.model or self.waiting)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([*self.model.values(), *self.waiting])).pinned = True

    @invariant()
    def same(self) -> None:
        stats = self.lru.stats
        assert self.destroyed == self.expected
        assert set(self.destroyed.values()) <= {1}
        assert set(self.lru.entries) == set(self.model)
        assert (stats.hits, stats.misses, stats.evictions) == (self.hits, self.misses, self.evictions)
        assert (stats.destroyed, stats.failures) == (self.expected.total(), self.failures)
        assert (stats.size, stats.capacity) == (len(self.model), self.capacity)
        assert len(self.items) == self.expected.total() + len(self.waiting) + len(self.kept) + len(self.model), "nothing is lost"

    def teardown(self) -> None:
        if hasattr(self, "lru"):
            self.lru.close()
            for item in self.model.values():
                self.leave(item)
            assert self.destroyed == self.expected
            self.running.clear()
            for item in self.waiting:
                self.leave(item)
            assert self.destroyed == self.expected
            for item in self.kept:  # until this process exits
                item.fails = False


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
