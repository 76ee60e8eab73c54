"""Digests: the same for managers that are fed alike, another from the first call that differs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import kvdock
from kvdock.distributed import check_alike
from kvdock.layers import KeepAll, KeepState, KeepWindow
from kvdock_conformance.checking.group_engine import group_of
from support_kv_events import busy

GROUPS = [group_of(KeepAll(), 4), group_of(KeepWindow(8), 2), group_of(KeepState(), 1)]


def managers(count: int = 2, **how: Any) -> list[kvdock.CacheManager]:
    found = [kvdock.CacheManager(40, **how) for _ in range(count)]
    for manager in found:
        manager.keep_digest()
    return found


@pytest.mark.parametrize(
    "how",
    [{"block_size": 4}, {"block_size": 2, "policy": "lfu"}, {"groups": GROUPS}, {"prefix": "naive"}],
    ids=["lru", "lfu", "groups", "naive"],
)
def test_managers_that_are_fed_alike_have_one_digest(how: dict[str, Any]) -> None:
    one, other = managers(**how)
    seen = set()
    for seed in range(5):
        busy(one, 30, seed)
        assert one.digest() != other.digest()
        busy(other, 30, seed)
        assert one.digest() == other.digest()
        assert len(one.digest()) == 32
        seen.add(one.digest())
    assert len(seen) == 5
    busy(one, 5, 7)
    busy(other, 5, 8)
    busy(one, 30, 9)
    busy(other, 30, 9)
    assert one.digest() != other.digest(), "what differed once is not forgotten"


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "another token": (lambda m, s: m.commit(s, [5], computed=9), lambda m, s: m.commit(s, [6], computed=9)),
    "another prompt": (lambda m, s: m.begin([1, 2, 3]), lambda m, s: m.begin([1, 2, 4])),
    "room for another number": (lambda m, s: m.extend(s, 3), lambda m, s: m.extend(s, 7)),
    "one more fork": (lambda m, s: m.extend([s, m.fork(s)], [1, 1]), lambda m, s: m.extend([s], [1])),
    "another end": (lambda m, s: m.finish(s), lambda m, s: m.finish(s, keep=False)),
    "cut elsewhere": (lambda m, s: m.truncate(s, 5), lambda m, s: m.truncate(s, 6)),
    "another order": (
        lambda m, s: [m.begin([1] * 5), m.begin([2] * 6)],
        lambda m, s: [m.begin([2] * 6), m.begin([1] * 5)],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_differs_shows(name: str) -> None:
    digests = []
    for call in (*CALLS[name], CALLS[name][0]):
        (manager,) = managers(1, block_size=4)
        seq = manager.begin(range(8))
        manager.commit(seq, [], computed=8)
        manager.extend(seq, 1)
        call(manager, seq)
        digests.append(manager.digest())
    assert digests[0] != digests[1]
    assert digests[0] == digests[2]


def test_kinds_of_integers_count_alike() -> None:
    digests = set()
    for kind in (list, np.array, torch.tensor, lambda ids: np.array(ids, np.int16)):
        (manager,) = managers(1, block_size=4)
        seq = manager.begin(kind([1, 2, 3]))
        manager.extend(seq, 2)
        manager.commit(seq, kind([4, 5]), computed=5)
        digests.add(manager.digest())
    assert len(digests) == 1


def test_nothing_is_noted_until_somebody_asks() -> None:
    manager = kvdock.CacheManager(8, 4)
    with pytest.raises(kvdock.ArgumentValueError, match=r"CacheManager.digest: expected keep_digest\(\) before.*Fix: call it when"):
        manager.digest()
    busy(manager, 20, 1)
    assert manager.allocator.decisions is None
    manager.keep_digest()
    before = manager.digest()
    manager.keep_digest()
    assert manager.digest() == before == kvdock_digest_of_nothing()
    manager.begin([1])
    assert manager.digest() != before


def kvdock_digest_of_nothing() -> bytes:
    (fresh,) = managers(1)
    return fresh.digest()


def test_a_look_is_no_decision() -> None:
    (manager,) = managers(1, block_size=4)
    seq = manager.begin(range(9))
    before = manager.digest()
    manager.plan(range(20))
    _ = manager.available_size, seq.block_table(), seq.slot_mapping(0, 9)
    with pytest.raises(kvdock.OutOfBlocksError):
        manager.begin(range(1000))
    assert manager.digest() == before


def gathered(monkeypatch: pytest.MonkeyPatch, *digests: bytes) -> None:
    """Let a group's ranks have these digests."""

    def all_gather(found: list[torch.Tensor], mine: torch.Tensor, group: Any = None) -> None:
        for tensor, digest in zip(found, digests, strict=True):
            tensor.copy_(torch.tensor(list(digest)))

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: len(digests))
    monkeypatch.setattr(dist, "all_gather", all_gather)


def test_the_first_rank_that_differs_is_named(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    same, other = b"s" * 32, b"s" * 31 + b"o"
    gathered(monkeypatch, same, same, same)
    check_alike(same)
    gathered(monkeypatch, same, b"t" * 32, other)
    with pytest.raises(kvdock.IntegrityError, match=r"rank 1 of 3: expected the digest of rank 0, 73737373, got 74747474 \(rank 0 73"):
        check_alike(same)
    gathered(monkeypatch, *[same] * 20, other)
    with pytest.raises(kvdock.IntegrityError, match=r"rank 20 of 21.*rank 20 73737373\). Fix: feed all managers the same calls"):
        check_alike(same)


def test_a_group_of_one_is_alike(alone: None) -> None:
    (manager,) = managers(1)
    check_alike(manager.digest())
    with pytest.raises(kvdock.ArgumentTypeError, match=r"check_alike: digest: expected bytes, got 'abc'. Fix: pass manager.digest"):
        check_alike("abc")  # type: ignore[arg-type]
    with pytest.raises(kvdock.ArgumentValueError, match="expected 32 bytes, got 3 bytes"):
        check_alike(b"abc")
