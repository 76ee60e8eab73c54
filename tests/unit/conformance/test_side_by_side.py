"""Areas at once: what comes of them is what comes of them one after the other, and an interrupt ends all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path

import attrs
import pytest

from kvdock_conformance.child import ChildEndedError
from kvdock_conformance.requirement import Level, Requirement
from kvdock_conformance.session import Session
from kvdock_conformance.side_by_side import outcomes_of
from kvdock_conformance.turns import Turns
from support_scripted import Scripted, cases


@pytest.fixture
def scripted(tmp_path: Path) -> Scripted:
    return Scripted(tmp_path)


@contextmanager
def together(scripted: Scripted, workers: int) -> Iterator[list[Session]]:
    """Yield sessions of one run."""
    with ExitStack() as stack:
        first = stack.enter_context(scripted.session())
        yield [first, *(stack.enter_context(Session(first._plan, first)) for _ in range(1, workers))]


def areas() -> list[Requirement]:
    """Return requirements of three areas, in one of which every child is lost."""
    lost = [cases(*["crash"] * 4, number=number, area="lost") for number in range(1, 6)]
    mixed = [cases("passed", "crash", "failed", number=6), cases("unsupported", number=7, alone=True)]
    return [*lost, *mixed, cases("passed", "passed", number=8, area="another")]


def told(scripted: Scripted, workers: int) -> dict[str, list[tuple[str, str]]]:
    """Return what comes of each case, in the order in which it is told."""
    with together(scripted, workers) as sessions:
        outcomes = list(outcomes_of(sessions, areas(), Level.CORE))
    return {outcome.requirement.id: [(case.verdict.value, case.reason) for case in outcome.cases] for outcome in outcomes}


def test_the_outcomes_are_those_of_one_worker(scripted: Scripted) -> None:
    alone, at_once = told(scripted, 1), told(scripted, 3)
    assert at_once == alone
    assert [verdict for verdict, _ in alone["KVD-TEST-006"]] == ["passed", "failed", "failed"], "a child that is lost fails its case"
    assert alone["KVD-TEST-005"][0][1].endswith("3 requirements of its area in a row that crashed or hung in every case")
    assert [*alone] == [item.id for item in areas()]
    for area in ("lost", "paged_caching_"):
        own = [item.id for item in areas() if item.area == area]
        assert [name for name in at_once if name in own] == own, "an area's are told in their order"


def test_whoever_closes_it_ends_what_hangs(scripted: Scripted) -> None:
    hanging = [attrs.evolve(cases("hang", "hang", number=number), area=f"area {number}") for number in (2, 3)]
    with together(scripted, 2) as sessions:
        with closing(outcomes_of(sessions, [cases("passed"), *hanging], Level.CORE)) as outcomes:
            assert next(outcomes).requirement.id == "KVD-TEST-001"
            begin = time.monotonic()
        assert time.monotonic() - begin < 10, "not the minute that the cases sleep"
        assert all(session.is_stopped for session in sessions)


def test_a_child_that_is_started_while_its_session_is_stopped_is_ended(scripted: Scripted) -> None:
    with together(scripted, 2) as (session, _):
        session.stop()
        begin = time.monotonic()
        with pytest.raises(ChildEndedError):
            session.case(cases("hang"), cases("hang").selected(Level.CORE)[0])
        assert time.monotonic() - begin < 10


def test_an_error_of_a_worker_is_raised(scripted: Scripted) -> None:
    twice = attrs.evolve(cases("passed", number=2, area="another"), cases=lambda: cases("passed").selected(Level.CORE) * 2)
    with together(scripted, 2) as sessions, pytest.raises(ValueError, match="more than once"):
        list(outcomes_of(sessions, [cases("passed"), twice], Level.CORE))


class Watched(Turns):
    """Turns that remember who had to be alone."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bool] = []

    def turn(self, *, alone: bool) -> AbstractContextManager[None]:
        self.asked.append(alone)
        return super().turn(alone=alone)


def test_a_case_may_have_to_be_alone_and_so_may_a_requirement(scripted: Scripted) -> None:
    mixed = cases("passed", "passed", number=1)
    first, second = mixed.selected(Level.CORE)
    mixed = attrs.evolve(mixed, cases=lambda: [first, attrs.evolve(second, alone=True)])
    with scripted.session() as session:
        session._turns = watched = Watched()
        session.requirement(mixed, Level.CORE)
        session.requirement(cases("passed", "passed", number=2, alone=True), Level.CORE)
    assert watched.asked == [False, True, True], "those in a row share a turn"


def test_what_must_be_alone_waits_for_others_and_they_for_it() -> None:
    turns, order, is_running, may_end = Turns(), [], threading.Event(), threading.Event()

    def first() -> None:
        with turns.turn(alone=False):
            is_running.set()
            may_end.wait(10)
            order.append("the first")

    def alone() -> None:
        with turns.turn(alone=True):
            time.sleep(0.05)
            order.append("alone")

    def late() -> None:
        with turns.turn(alone=False):
            order.append("the late one")

    threads = [threading.Thread(target=first), threading.Thread(target=alone), threading.Thread(target=late)]
    threads[0].start()
    assert is_running.wait(10)
    threads[1].start()
    while not turns._waiting:
        time.sleep(0.001)
    threads[2].start()
    time.sleep(0.02)
    assert order == []
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert order == ["the first", "alone", "the late one"]
