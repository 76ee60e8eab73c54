"""A child that is a script without torch, which does what a case says: for tests of sessions."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from kvdock_conformance.requirement import Case, Requirement, Requirements
from kvdock_conformance.session import ConformancePlan, Session
from support_conformance import requirement

SCRIPT = """
import json, os, sys, time
requests, answers = open(int(sys.argv[1])), open(int(sys.argv[2]), "w")
log = open(os.environ["LOG"], "a")
for line in requests:
    number, request = json.loads(line)
    log.write(json.dumps(request) + "\\n"); log.flush()
    (name, argument), = request.items()
    if name == "open":
        answer = json.loads(os.environ.get("OPEN", '{"about": {"pid": %d}}' % os.getpid()))
        if answer == "crash":
            os.abort()
    elif name == "fault":
        answer = {"reason": "" if argument in (None, "seeded") else "not here"}
    else:
        what = argument["data"].get("do")
        if what == "crash":
            os.abort()
        if what == "hang":
            time.sleep(60)
        answer = {"verdict": what or "passed", "seconds": 0.5, "reason": "why", "failure": {"what": "w", "expected": "e", "got": "g"}}
    answers.write(json.dumps([number, answer]) + "\\n"); answers.flush()
"""


class Scripted:
    """Sessions of one script, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.log.touch()
        self.plan = ConformancePlan("acme", Requirements(), command=(sys.executable, "-I", "-c", SCRIPT), environ={"LOG": str(self.log)})

    def session(self, **settings: Any) -> Session:
        environ = {**self.plan.environ, **settings.pop("environ", {})}
        return Session(attrs.evolve(self.plan, environ=environ, **settings))

    def asked(self) -> list[str]:
        return [next(iter(json.loads(line))) for line in self.log.read_text().splitlines()]


def cases(*what: str, number: int = 1, **settings: Any) -> Requirement:
    """Return a requirement whose cases do something each."""
    made: Sequence[Case] = [Case(f"{number} {do}", {"do": do}) for number, do in enumerate(what)]
    return requirement(number, cases=lambda: made, **{"limit_s": 20.0, **settings})
