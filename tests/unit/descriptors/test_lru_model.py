"""`LRUDescriptorCache` against a slow model, step by step."""

from __future__ import annotations

from collections import Counter, OrderedDict

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvdock import LRUDescriptorCache
from support_descriptors import in_thread

KEYS = st.integers(0, 7).map(lambda n: (n % 2 - 2, n // 2))  # -1 and -2 have one hash


@attrs.define(eq=False)
class Item:
    """A descriptor."""

    key: tuple[int, int]
    pinned: bool = False
    running: bool = False
    fails: bool = False


class Model(RuleBasedStateMachine):
    """Does everything twice: in the cache, and in a dictionary whose order is that of use."""

    @initialize(capacity=st.integers(1, 4))
    def start(self, capacity: int) -> None:
        self.destroyed: Counter[int] = Counter()
        self.items: list[Item] = []
        self.expected: Counter[int] = Counter()
        self.waiting: list[Item] = []
        self.kept: list[Item] = []
        self.model: OrderedDict[tuple[int, int], Item] = OrderedDict()
        self.capacity = capacity
        self.hits = self.misses = self.evictions = self.failures = 0
        self.clear_requested = False
        self.lru: LRUDescriptorCache[Item] = LRUDescriptorCache(capacity, self.destroyer, in_use=lambda item, frame: item.running)

    def destroyer(self, item: Item) -> None:
        self.destroyed[id(item)] += 1
        if item.fails:
            raise ValueError("as the model says")

    # What the model does.

    def leave(self, item: Item) -> None:
        if item.running:
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
        waiting, self.waiting = self.waiting, []
        for item in waiting:
            self.leave(item)

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
        assert self.lru.get(key) is found

    @rule(key=KEYS, fails=st.booleans())
    def put(self, key: tuple[int, int], fails: bool) -> None:
        item = Item(key, fails=fails)
        self.items.append(item)
        self.settle()
        old = self.model.pop(key, None)
        self.model[key] = item
        if old is not None:
            self.leave(old)
        self.make_room()
        self.lru.put(key, item)

    @rule(key=KEYS)
    def put_the_same_again(self, key: tuple[int, int]) -> None:
        self.settle()
        if key in self.model:
            self.model.move_to_end(key)
            self.lru.put(key, self.model[key])
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

    @precondition(lambda self: self.items)
    @rule(data=st.data(), running=st.booleans())
    def run_or_end(self, data: st.DataObject, running: bool) -> None:
        held = [*self.model.values(), *self.waiting]
        if held:
            data.draw(st.sampled_from(held)).running = running

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(list(self.model.values()))).pinned = True

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
            self.kept += [item for item in (*self.model.values(), *self.waiting) if item.pinned or item.running]
            held = [item for item in (*self.model.values(), *self.waiting) if not item.pinned and not item.running]
            self.expected.update(id(item) for item in held)
            assert self.destroyed == self.expected
            for item in self.kept:  # until this process exits
                item.fails = False


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
