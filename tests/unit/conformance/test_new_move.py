"""A new op that copies: one entry of the table of moves, and the families give it requirements and faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvdock_conformance.faults import families
from kvdock_conformance.prove import prove_one
from kvdock_conformance.requirement import Level, Requirements
from kvdock_conformance.session import ConformancePlan, Session
from kvdock_conformance.verdict import Verdict
from support_conformance import CHILD, TESTS
from support_swap_kit import FAULTS, REQUIREMENTS, SWAP

EVERY = Requirements(REQUIREMENTS)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(ConformancePlan("cpu", EVERY, setup="support_swap:register", command=CHILD)) as opened:
        yield opened


def test_it_costs_the_kit_at_most_150_lines() -> None:
    assert len((TESTS / "support_swap_kit.py").read_text(encoding="utf-8").splitlines()) <= 150


def test_it_gets_the_faults_of_the_family() -> None:
    assert len(FAULTS) > 20
    assert {killer for fault in FAULTS for killer in fault.killers} == {item.id for item in REQUIREMENTS} - {SWAP.killer("nothing")}
    assert {fault.name for fault in families.FAULTS} & {fault.name for fault in FAULTS} == set(), "they are its own"


@pytest.mark.parametrize("number", range(len(REQUIREMENTS)))
def test_its_requirements_pass(session: Session, number: int) -> None:
    outcome = session.requirement(REQUIREMENTS[number], Level.CORE)
    assert outcome.verdict is Verdict.PASSED, [(case.name, case.failure) for case in outcome.failed[:1]]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_of_its_faults_is_noticed(session: Session, fault: families.Fault) -> None:
    proof = prove_one(session, fault, EVERY)
    assert proof.verdict == "killed", f"{fault.name}: {proof.verdict}, missed by {proof.missed}"
