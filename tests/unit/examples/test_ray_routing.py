"""Which replica the router of examples/ray_serve chooses: with real publishers, and without Ray."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgpack")

import kvdock
from kvdock.integrations.kv_events import KVEventPublisher
from support_docs import ROOT
from support_kv_events import inproc, store

sys.path.insert(0, str(ROOT / "examples" / "ray_serve"))

from kvdock_ray.routing import Prefixes

LONG, OTHER = list(range(200)), list(range(1000, 1200))
IDLE = {"a": 0, "b": 0}


class Replica:
    """What a replica is to a router: a manager, and where its events come from."""

    def __init__(self, num_blocks: int = 256) -> None:
        self.manager = kvdock.CacheManager(num_blocks, 4)
        self.publisher = KVEventPublisher(self.manager, endpoint=inproc(), replay_endpoint=inproc())
        self.addresses = self.publisher.endpoint, self.publisher.replay_endpoint


@pytest.fixture
def replicas() -> Iterator[dict[str, Replica]]:
    made = {name: Replica() for name in "ab"}
    yield made
    for replica in made.values():
        replica.publisher.close()


@pytest.fixture
def prefixes(replicas: dict[str, Replica]) -> Iterator[Prefixes]:
    made = Prefixes(waiting_costs=64, most_ahead=3)
    made.follow({name: replica.addresses for name, replica in replicas.items()})
    yield made
    made.close()


def knows(prefixes: Prefixes, name: str, tokens: list[int], count: int) -> None:
    """Wait until events have come."""
    end = time.monotonic() + 10
    while prefixes.cached_len(name, tokens) != count:
        assert time.monotonic() < end, f"{prefixes.readers}: {prefixes.cached_len(name, tokens)} of {count} tokens"
        time.sleep(0.001)


def test_a_prompt_goes_where_most_of_it_is_cached(replicas: dict[str, Replica], prefixes: Prefixes) -> None:
    store(replicas["a"].manager, LONG[:40])
    store(replicas["b"].manager, LONG)
    store(replicas["a"].manager, OTHER)
    knows(prefixes, "a", LONG, 40)
    knows(prefixes, "b", LONG, 200)
    knows(prefixes, "a", OTHER, 200)
    for _ in range(3):  # whoever had the one before
        assert prefixes.ranked([*LONG, 7], IDLE) == ["b", "a"]
        assert prefixes.ranked([*OTHER, 7], IDLE) == ["a", "b"]


def test_who_is_equal_takes_turns(prefixes: Prefixes) -> None:
    assert [prefixes.ranked([1, 2, 3], IDLE)[0] for _ in range(4)] == ["a", "b", "a", "b"]


def test_a_request_that_waits_costs_as_much_as_some_tokens(replicas: dict[str, Replica], prefixes: Prefixes) -> None:
    store(replicas["a"].manager, LONG)
    knows(prefixes, "a", LONG, 200)
    for tokens, waiting, best in ((200, 2, "a"), (140, 2, "a"), (120, 2, "b"), (60, 1, "b"), (68, 1, "a")):
        assert prefixes.ranked(LONG[:tokens], {"a": waiting, "b": 0})[0] == best, (tokens, waiting)


def test_a_replica_too_far_ahead_comes_last_whatever_it_has(replicas: dict[str, Replica], prefixes: Prefixes) -> None:
    prefixes.waiting_costs = 0
    store(replicas["a"].manager, LONG)
    knows(prefixes, "a", LONG, 200)
    assert prefixes.ranked(LONG, {"a": 7, "b": 5}) == ["a", "b"]
    assert prefixes.ranked(LONG, {"a": 8, "b": 5}) == ["b", "a"], "three more than the idlest"


def test_what_is_evicted_draws_nothing(replicas: dict[str, Replica], prefixes: Prefixes) -> None:
    store(replicas["a"].manager, LONG)
    knows(prefixes, "a", LONG, 200)
    for start in range(2000, 3200, 200):
        store(replicas["a"].manager, range(start, start + 200))
    knows(prefixes, "a", LONG, 0)


def test_a_replica_that_is_gone_is_forgotten_and_its_successor_followed(replicas: dict[str, Replica], prefixes: Prefixes) -> None:
    store(replicas["a"].manager, LONG)
    knows(prefixes, "a", LONG, 200)
    died = prefixes.readers["a"]
    prefixes.drop("a")
    prefixes.drop("a")  # Serve says so twice: when the actor died, and when the replicas are told again
    assert prefixes.cached_len("a", LONG) == 0
    with pytest.raises(kvdock.ArgumentValueError, match="closed"):
        died.poll()
    replicas["c"] = Replica()
    prefixes.follow({name: replicas[name].addresses for name in "bc"})
    assert prefixes.readers.keys() == {"b", "c"}
    store(replicas["c"].manager, LONG)
    knows(prefixes, "c", LONG, 200)
    assert prefixes.ranked(LONG, {"b": 0, "c": 0}) == ["c", "b"]


def test_replicas_that_are_told_again_stay_as_they_are_and_others_go(replicas: dict[str, Replica], prefixes: Prefixes) -> None:
    before = dict(prefixes.readers)
    prefixes.follow({name: replica.addresses for name, replica in replicas.items()})
    assert prefixes.readers == before
    prefixes.follow({"b": replicas["b"].addresses})
    assert prefixes.readers == {"b": before["b"]}
    with pytest.raises(kvdock.ArgumentValueError, match="closed"):
        before["a"].poll()


def test_a_late_router_learns_what_was_stored_before(replicas: dict[str, Replica], prefixes: Prefixes) -> None:
    store(replicas["b"].manager, LONG)
    knows(prefixes, "b", LONG, 200)
    late = Prefixes()
    late.follow({"b": replicas["b"].addresses})
    store(replicas["b"].manager, OTHER)  # any event will do, and the publisher sends one when it is quiet
    knows(late, "b", LONG, 200)
    late.close()


def test_events_that_were_lost_draw_nothing(replicas: dict[str, Replica], prefixes: Prefixes) -> None:
    store(replicas["a"].manager, LONG)
    knows(prefixes, "a", LONG, 200)
    prefixes.readers["a"].index.doubt()
    assert prefixes.cached_len("a", LONG) == 0
    replicas["a"].publisher.resend()
    knows(prefixes, "a", LONG, 200)


@pytest.mark.parametrize("tokens", ["text", None, [1.5], [[1, 2]], {}, ()])
def test_what_are_no_ids_is_routed_all_the_same(replicas: dict[str, Replica], prefixes: Prefixes, tokens: Any) -> None:
    store(replicas["a"].manager, LONG)
    knows(prefixes, "a", LONG, 200)
    assert sorted(prefixes.ranked(tokens, IDLE)) == ["a", "b"]


def test_no_replica_is_no_choice(prefixes: Prefixes) -> None:
    assert prefixes.ranked(LONG, {}) == []


def test_an_unknown_replica_is_one_with_nothing_cached(replicas: dict[str, Replica], prefixes: Prefixes) -> None:
    store(replicas["a"].manager, LONG)
    knows(prefixes, "a", LONG, 200)
    assert prefixes.ranked(LONG, {"new": 0, "a": 0}) == ["a", "new"]
    assert prefixes.ranked(LONG, {"new": 0, "a": 3}) == ["new", "a"]


def test_conversations_stay_where_they_began(replicas: dict[str, Replica], prefixes: Prefixes) -> None:
    """Five conversations of four turns, in turn: all that can be found is found. Taking turns would find less."""
    said = {number: list(range(5000 * number, 5000 * number + 60)) for number in range(1, 6)}
    found, findable = 0, 0
    for turn, number in itertools.product(range(4), said):
        name = str(prefixes.ranked(said[number], IDLE)[0])
        manager = replicas[name].manager
        found += manager.plan(said[number]).cached_len
        findable += 0 if not turn else (len(said[number]) - 12) // 4 * 4
        store(manager, said[number])
        knows(prefixes, name, said[number], len(said[number]) // 4 * 4)
        said[number] += range(9000 + 100 * number + 12 * turn, 9000 + 100 * number + 12 * turn + 12)
    assert findable > 0
    assert found >= findable
