"""The child's end: requests and answers, asked in this process."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvdock_conformance import requirements, worker
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.prefix_target import PrefixTarget
from kvdock_conformance.requirement import Capability, Case, Requirement, Requirements
from kvdock_conformance.worker import Worker, serve
from support_conformance import requirement


class SilentError(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class NoTextError(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value] - as careless code has it


def passes(target: Any, data: Mapping[str, Any]) -> None:
    """Accept everything."""


def fails(target: Any, data: Mapping[str, Any]) -> None:
    raise NonconformanceError("the sum", expected=3, got=4)


def raises(target: Any, data: Mapping[str, Any]) -> None:
    raise {"exit": SystemExit(0), "silent": SilentError(), "no text": NoTextError(), "group": ExceptionGroup("two", [OSError("a")])}[
        data["what"]
    ]


def spoils(target: Any, data: Mapping[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)


def spoils_and_fails(target: Any, data: Mapping[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    fails(target, data)


def unclaimed(target: Any, data: Mapping[str, Any]) -> Sequence[str]:
    return data.get("reasons", [])  # type: ignore[no-any-return] - what a case holds


def refusal(target: Any, data: Mapping[str, Any], reasons: Sequence[str], check: Any) -> None:
    if data.get("bad refusal"):
        fails(target, data)


CLAIM = Capability("does it", unclaimed, refusal)


@pytest.fixture(autouse=True)
def own_requirements(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Requirements that are these functions, in order."""
    checks = [passes, fails, raises, spoils, spoils_and_fails]
    made = [requirement(number, check=check) for number, check in enumerate(checks, 1)]
    made.append(requirement(6, check=fails, needs=CLAIM))
    monkeypatch.setattr(requirements, "load", lambda: Requirements(made))
    yield
    assert torch.get_default_dtype() is torch.float32


def case(number: int, **data: Any) -> dict[str, Any]:
    """Ask for one case; the answer without its time."""
    worker = Worker()
    worker._target = PrefixTarget("naive")  # whatever: these checks do not look at it
    found = worker.answer({"case": {"requirement": f"KVD-TEST-{number:03}", "data": data}})
    assert found.pop("seconds") >= 0
    json.dumps(found)
    return found


def test_what_passes_says_no_more() -> None:
    assert case(1) == {"verdict": "passed"}


def test_what_does_not_conform_is_told_as_the_check_told_it() -> None:
    assert case(2) == {"verdict": "failed", "failure": {"what": "the sum", "expected": "3", "got": "4"}}


@pytest.mark.parametrize(
    ("what", "got", "details"),
    [
        ("exit", "SystemExit: 0", "SystemExit: 0"),
        ("silent", "SilentError, whose text cannot be told: its str() raises KeyboardInterrupt", "in raises"),
        ("no text", "NoTextError, whose text cannot be told: its str() raises TypeError", "in raises"),
        ("group", "ExceptionGroup: two (1 sub-exception)", "OSError: a"),
    ],
)
def test_whatever_is_raised_has_a_text_and_a_traceback(what: str, got: str, details: str) -> None:
    found = case(3, what=what)
    assert found["verdict"] == "failed"
    assert (found["failure"]["what"], found["failure"]["expected"], found["failure"]["got"]) == ("the check", "no such error", got)
    assert details in found["failure"]["details"]
    assert "in raises" in found["failure"]["details"]


def test_a_traceback_without_end_is_cut_at_its_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_SHOWN", 40)
    details = case(3, what="exit")["failure"]["details"]
    assert len(details) == 40
    assert details.endswith("SystemExit: 0\n")


def test_a_setting_that_is_left_otherwise_fails_a_case_that_passes() -> None:
    failure = case(4)["failure"]
    assert failure["what"] == "torch.get_default_dtype() behind the calls"
    assert (failure["expected"], failure["got"]) == ("torch.float32", "torch.float64")


def test_what_the_check_found_counts_more_than_a_setting() -> None:
    assert case(5)["failure"]["what"] == "the sum"


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        ({}, "failed"),  # claimed, and the check says no
        ({"reasons": ["no fp8", "no int4"]}, "unsupported"),
        ({"reasons": ["no fp8"], "bad refusal": True}, "failed"),
        ({"reasons": [3.5]}, "failed"),
        ({"reasons": None}, "failed"),
    ],
)
def test_what_is_not_claimed_must_be_refused_well(data: dict[str, Any], verdict: str) -> None:
    found = case(6, **data)
    assert found["verdict"] == verdict
    if verdict == "unsupported":
        assert found["reason"] == "no fp8; no int4"


def test_requests_are_answered_by_number_in_order() -> None:
    asked = [[7, {"fault": None}], [9, {"case": {"requirement": "KVD-TEST-001", "data": {}}}]]
    answers = io.StringIO()
    serve(io.StringIO("".join(json.dumps(item) + "\n" for item in asked)), answers)
    found = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert [number for number, _ in found] == [7, 9]
    assert found[0][1] == {"reason": ""}
    assert found[1][1]["verdict"] == "passed"


def test_a_request_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(KeyError, match="sing"):
        Worker().answer({"sing": "loud"})


@pytest.mark.parametrize(
    ("wanted", "state", "said"),
    [
        ({"kind": "backend", "name": "nobody"}, "unknown", "nobody"),
        ({"kind": "backend", "name": "reference", "device": "acme:1"}, "unknown device", "one of cpu"),
        ({"kind": "prefix", "name": "nobody"}, "unknown", "nobody"),
        ({"kind": "prefix", "name": "radix", "device": "cpu"}, "unknown device", "none"),
    ],
)
def test_what_cannot_be_opened_says_its_state(wanted: dict[str, Any], state: str, said: str) -> None:
    found = Worker().open(wanted)
    assert found["state"] == state
    assert said in found["error"]


def test_whatever_opening_raises_is_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvdock_conformance.kinds import Kind

    def broken(self: Kind, *args: Any) -> Any:
        raise SilentError

    monkeypatch.setattr(Kind, "open", broken)
    found = Worker().open({"kind": "backend", "name": "reference"})
    assert found["state"] == "unusable"
    assert found["error"].startswith("opening it raised SilentError, whose text cannot be told")
    assert "in broken" in found["error"]


def test_what_it_says_of_itself_must_be_data(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvdock_conformance.kinds import Kind

    monkeypatch.setattr(Kind, "open", lambda self, *args: (None, {"device_type": {1, 2}}))
    found = Worker().open({"kind": "backend", "name": "reference"})
    assert found["error"].startswith("opening it raised TypeError: Object of type set is not JSON serializable")


def test_setup_is_called_before_anything_is_looked_for() -> None:
    found = Worker().open({"kind": "backend", "name": "good", "setup": "support_conformance:register"})
    assert found["about"]["class"] == "support_conformance.BadBackend"
    json.dumps(found)


SCRIPT = """
import os, sys, threading
sys.path.insert(0, {tests!r})
from kvdock_conformance import worker
{change}
sys.argv[1:] = sys.argv[1:3]
worker.main()
"""


def ask(change: str, *lines: str) -> tuple[int, str, str]:
    """Run the worker's main in a process on real pipes; returns its exit code, what it answered, and what it printed."""
    code = SCRIPT.format(tests=str(Path(__file__).parents[2]), change=change)
    (to_child, requests), (answers, from_child) = os.pipe(), os.pipe()
    os.write(requests, "".join(line + "\n" for line in lines).encode())
    os.close(requests)
    command = [sys.executable, "-P", "-c", code, str(to_child), str(from_child)]
    with subprocess.Popen(command, pass_fds=(to_child, from_child), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        os.close(to_child)
        os.close(from_child)
        answered = b""
        while part := os.read(answers, 65536):
            answered += part
        assert process.stdout is not None
        said = process.stdout.read()
    os.close(answers)
    return process.returncode, answered.decode(), said.decode()


FAULT_NONE = json.dumps([1, {"fault": None}])


def test_the_child_goes_first_when_memory_runs_out() -> None:
    change = (
        "own = worker.serve\ndef serve(*args):\n    print(open('/proc/self/oom_score_adj').read())\n    own(*args)\nworker.serve = serve"
    )
    code, answered, said = ask(change, FAULT_NONE)
    assert (code, json.loads(answered)) == (0, [1, {"reason": ""}])
    assert said.split() == ["1000"]
    assert Path("/proc/self/oom_score_adj").read_text().strip() != "1000"


@pytest.mark.slow
def test_its_pipes_are_not_inherited_by_what_a_backend_starts() -> None:
    change = (
        "own = worker.serve\n"
        "def serve(*args):\n"
        "    print([os.get_inheritable(int(number)) for number in sys.argv[1:3]])\n"
        "    own(*args)\n"
        "worker.serve = serve"
    )
    assert ask(change, FAULT_NONE)[2].strip() == "[False, False]"


def test_a_copy_of_the_child_ends_both() -> None:
    change = """
import time
own = worker.Worker.fault
def fault(self, name):
    if os.fork():
        time.sleep(30)  # the copy is first
    return own(self, name)
worker.Worker.fault = fault
"""
    code, answered, said = ask(change, FAULT_NONE)
    assert (code, answered) == (-6, "")
    assert "a process that the backend forked came back from the case" in said


def test_a_case_may_be_one_of_any_requirement_of_the_kit() -> None:
    item = Requirement("KVD-TEST-001", "It is so.", "area", passes, lambda: [Case("one", {})])
    assert worker._run(None, item.id, {}) == {"verdict": "passed"}
