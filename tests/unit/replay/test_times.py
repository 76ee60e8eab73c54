from __future__ import annotations

from typing import Any

import pytest

from kvdock.replay import times
from kvdock.replay.times import OperationTimes, Times


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nanoseconds that the clock says, one reading after the other."""
    readings: list[int] = []
    monkeypatch.setattr(times, "perf_counter_ns", lambda: readings.pop(0))
    return readings


def test_by_hand(clock: list[int]) -> None:
    taken = OperationTimes(("match", "evict"))
    clock += [0, 1000, 5000, 8000, 9000, 11_000]
    for _ in range(3):
        taken.call("match", lambda: None)
    found = taken.summary()
    assert found["match"] == Times(3, 6e-6, 2e-6, 2e-6, 3e-6, 3e-6)
    assert found["evict"] == Times(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert taken.total_s() == 6e-6


def test_quantiles_are_times_that_a_call_took(clock: list[int]) -> None:
    taken = OperationTimes(("match",))
    for number in range(1, 201):
        clock += [0, number * 1000]
        taken.call("match", lambda: None)
    found = taken.summary()["match"]
    assert (found.p50_s, found.p99_s, found.max_s) == (pytest.approx(100e-6), pytest.approx(198e-6), pytest.approx(200e-6))


def test_what_is_called_gets_its_arguments_and_its_result_comes_back() -> None:
    def function(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    assert OperationTimes(("match",)).call("match", function, 1, record=False) == ((1,), {"record": False})


def test_a_call_that_raises_does_not_count() -> None:
    taken = OperationTimes(("match",))
    with pytest.raises(ZeroDivisionError):
        taken.call("match", lambda: 1 // 0)
    assert taken.summary()["match"].calls == 0
