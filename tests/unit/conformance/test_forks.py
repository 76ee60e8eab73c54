"""A backend is asked by a forked process too, whatever threads torch has: GNU OpenMP's are not there in the child."""

from __future__ import annotations

from kvdock_conformance.requirement import Level
from kvdock_conformance.requirements import load
from kvdock_conformance.session import ConformancePlan, Session
from support_conformance import chosen


def test_a_forked_process_answers_where_openmp_has_several_threads() -> None:
    item = load()["KVD-THREAD-005"]
    cases = [case for case in item.selected(Level.CORE) if "paged_attention" in case.name and "forked" in case.name]
    assert cases
    with Session(ConformancePlan("cpu", chosen([item.id]), environ={"OMP_NUM_THREADS": "2"})) as session:
        assert [session.case(item, case).failure for case in cases] == [None] * len(cases)
