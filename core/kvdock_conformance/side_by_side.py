"""Requirements of several areas at once, each area by a session of its own."""

from __future__ import annotations

import collections
import queue
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvdock_conformance.requirement import Level, Requirement
from kvdock_conformance.session import Session
from kvdock_conformance.verdict import Outcome

__all__ = ["outcomes_of"]

_LONGEST = ("paged_attention", "hygiene", "threads")
"""Areas that take longest, begun first: else the last of them would run when there is nothing left to run beside it. What must be alone
waits for what runs beside it: it comes behind the seconds of a fresh interpreter, with which hygiene begins."""


def outcomes_of(sessions: Sequence[Session], requirements: Iterable[Requirement], level: Level) -> Generator[Outcome, None, None]:
    """Yield what comes of requirements as it comes, those of an area in their order. Closing it, or an interrupt, stops the sessions.

    Args:
        sessions: each with a child of its own. One runs everything in order, in this thread.
        requirements: those to run.
        level: at which level.
    """
    if len(sessions) == 1:
        yield from (sessions[0].requirement(item, level) for item in requirements)
        return
    every = sorted(requirements, key=lambda item: _LONGEST.index(item.area) if item.area in _LONGEST else len(_LONGEST))
    # By one session: for a fake tensor, torch loads its compiler, which takes a second.
    of_any_op = {item.area for item in every if "@" in item.id}
    listed: dict[str, list[Requirement]] = {}
    for item in every:
        listed.setdefault("of any op" if item.area in of_any_op else item.area, []).append(item)
    areas = collections.deque(listed.values())
    told: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()

    def work(session: Session) -> None:
        try:
            while areas and not session.is_stopped:
                for item in areas.popleft():
                    told.put(session.requirement(item, level))
        finally:
            told.put(None)

    with ThreadPoolExecutor(len(sessions)) as pool:
        try:
            ends = [pool.submit(work, session) for session in sessions]
            left = len(ends)
            while left:
                outcome = told.get()
                left -= outcome is None
                if outcome is not None:
                    yield outcome
            for end in ends:
                end.result()
        finally:
            for session in sessions:
                session.stop()
