"""Backends that do to the kit what no backend should: each is a verdict, never a green one, and the run goes on."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

import support_hostile as hostile
from kvdock_conformance import child as child_module
from kvdock_conformance.requirement import Case, Level
from kvdock_conformance.requirements import load
from kvdock_conformance.run import run
from kvdock_conformance.session import ConformancePlan, Session
from kvdock_conformance.verdict import CaseOutcome, Verdict
from support_conformance import CHILD, chosen

ITEM = load()["KVD-WRITE-001"]
CASE, OTHER = ITEM.selected(Level.EXTENDED)[:2]


def plan(behaviour: Path, **settings: object) -> ConformancePlan:
    environ = {hostile.BEHAVIOUR: str(behaviour)}
    made = ConformancePlan("hostile", chosen([ITEM.id]), setup="support_hostile:register", command=CHILD, environ=environ)
    return attrs.evolve(made, **settings)  # type: ignore[arg-type] - what a plan has


class Hostile:
    """A session in which each case may behave in another way."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "behaviour"
        self.file.write_text("good")
        self.session = Session(plan(self.file))

    def case(self, behaviour: str, case: Case = CASE) -> CaseOutcome:
        self.file.write_text(behaviour)
        if behaviour in hostile.PLANS:
            self.session.close()  # so that a plan is prepared
        return self.session._survived(ITEM, case)

    def failure(self, behaviour: str, case: Case = CASE) -> str:
        found = self.case(behaviour, case)
        assert found.verdict is Verdict.FAILED, behaviour
        assert found.failure is not None
        return "{what}: expected {expected}, got {got}".format(**found.failure)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hostile]:
    made = Hostile(tmp_path_factory.mktemp("hostile"))
    yield made
    made.session.close()


@pytest.fixture(autouse=True)
def good_before_and_behind(one: Hostile) -> Iterator[None]:
    """Whatever a case has done, the next one is judged as if nothing had been."""
    yield
    assert one.case("good").verdict is Verdict.PASSED


@pytest.mark.parametrize(
    ("behaviour", "got"),
    [
        ("sys.exit", "got SystemExit: 0"),
        ("interrupts", "got KeyboardInterrupt: stop"),
        ("generator", "got GeneratorExit: "),
        ("unspeakable", "got UnspeakableError, whose text cannot be told: its str() raises RuntimeError"),
        ("odd text", "got RuntimeError: a ? \x00 \x1b[31m ]]> \ufffe"),
    ],
)
def test_whatever_it_raises_is_its_failure(one: Hostile, behaviour: str, got: str) -> None:
    assert got in one.failure(behaviour)
    assert one.session._child is not None, "the same child goes on"


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("folder", "the current directory behind the calls: expected '"),
        ("environment", "environment variable OMP_NUM_THREADS behind the calls: expected "),
        ("unset", "environment variable PATH behind the calls: expected '"),
        ("dtype", "torch.get_default_dtype() behind the calls: expected torch.float32, got torch.float64"),
        ("device", "torch.get_default_device() behind the calls: expected device(type='cpu'), got device(type='meta')"),
        ("gradients", "torch.is_grad_enabled() behind the calls: expected True, got False"),
        ("threads", "torch.get_num_threads() behind the calls: expected "),
        ("seeds", "the state of torch's random numbers behind the calls"),
        ("seeds Python", "the state of Python's random numbers behind the calls"),
        ("filters", "warnings.filters behind the calls"),
        ("patches", "kvdock.ops.copy_blocks_ behind the calls: expected <function copy_blocks_"),
    ],
)
def test_settings_of_the_process_that_it_changes_are_its_failure(one: Hostile, behaviour: str, said: str) -> None:
    assert said in one.failure(behaviour)
    assert one.session._child is not None


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("no list", "expected a list of reasons (str), empty for yes, got None (NoneType)"),
        ("not a number", "expected a list of reasons (str), empty for yes, got [nan] (list)"),
        ("empty", "reason against paged_caching_: expected a text that says why, got ''"),
        pytest.param("refuses and ends", "SystemExit: 0", marks=pytest.mark.slow),
        ("no plan", "expected a Descriptor, got None (NoneType)"),
    ],
)
def test_reasons_and_plans_that_are_none_are_a_failure(one: Hostile, behaviour: str, said: str) -> None:
    assert said in one.failure(behaviour, OTHER), "another case, since what serves a refused one is remembered"


@pytest.mark.parametrize(
    ("behaviour", "how"),
    [
        ("ends well", "ended with exit code 0"),
        pytest.param("closes", "ended with exit code 1", marks=pytest.mark.slow),
        pytest.param("cheats", "wrote to the kit's own pipe: '[1, {", marks=pytest.mark.slow),
        pytest.param("plan crashes", "crashed with SIGSEGV", marks=pytest.mark.slow),
    ],
)
def test_what_takes_the_child_away_is_a_failure(one: Hostile, behaviour: str, how: str) -> None:
    assert how in one.failure(behaviour)
    assert one.session._child is None


@pytest.mark.slow
def test_a_call_that_comes_back_in_two_processes_is_noticed(one: Hostile) -> None:
    # Each of the two would go on with the kit's work. Which of them is first is chance: then a later case notices, mostly the next.
    found = [one.case("forks")]
    while len(found) < 6 and (len(found) < 2 or all(case.verdict is Verdict.PASSED for case in found)):
        found.append(one.case("good"))
    failed = [case for case in found if case.verdict is Verdict.FAILED]
    assert failed
    assert failed[0].failure is not None
    assert failed[0].failure["got"] == "crashed with SIGABRT"
    assert "a process that the backend forked came back from the case" in failed[0].failure["details"]


@pytest.mark.slow
def test_the_end_of_much_output_is_kept(one: Hostile) -> None:
    found = one.case("much output")
    assert found.failure is not None
    assert found.failure["got"] == "crashed with SIGSEGV"
    assert "the end of it" in found.failure["details"]
    assert len(found.failure["details"]) <= child_module._SHOWN


def test_what_it_leaves_running_ends_with_the_child(one: Hostile) -> None:
    found = one.case("leaves")
    assert found.failure is not None, "its bytes are right; a thread that it has left is a setting of the process that is not as it was"
    assert re.fullmatch(r"'Thread-\d+ \(sleep\)'", found.failure["got"])
    left = int(one.file.with_suffix(".left").read_text())
    assert Path(f"/proc/{left}").exists()
    one.session.close()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{left}/cmdline").exists() and Path(f"/proc/{left}/cmdline").read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{left}/cmdline").exists() or not Path(f"/proc/{left}/cmdline").read_bytes(), "at most its entry is left"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("no device", "backend 'hostile' has no device: devices() is empty"),
        pytest.param("no capabilities", "UnspeakableError", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_opened_leaves_everything_not_run(one: Hostile, tmp_path: Path, behaviour: str, said: str) -> None:
    file = tmp_path / "behaviour"
    file.write_text(behaviour)
    found = run(plan(file))
    assert found.exit_code == 3
    assert said in found.outcomes[0].reason


def test_a_backend_that_hangs_while_it_is_loaded_is_not_run(tmp_path: Path) -> None:
    found = run(plan(tmp_path, setup="support_hostile:hang", start_s=1.0))
    assert found.exit_code == 3
    assert found.outcomes[0].reason.startswith("loading the backend did not end within 1 s")


@pytest.mark.slow  # three children
def test_what_cannot_be_opened_again_is_not_tried_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(plan(tmp_path, setup="support_conformance:crash"))
    opened: list[Session] = []
    own = Session.open
    monkeypatch.setattr(Session, "open", lambda self: opened.append(self) or own(self))
    outcomes = [session._survived(ITEM, CASE) for _ in range(5)]
    assert {outcome.verdict for outcome in outcomes} == {Verdict.NOT_RUN}
    assert len(opened) == 3
    assert (
        outcomes[2].reason == "the backend could not be opened: the child that ran the case crashed with SIGKILL, as when memory runs out"
    )
    assert outcomes[4].reason == "the backend could not be opened 3 times"
