from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from typer.testing import CliRunner

from kvdock.cli.app import build
from kvdock.cli.backends import describe_ops
from kvdock.cli.isolated_child import said_by
from kvdock.runtime import Runtime
from opskit import active, runtime_of
from support_ops import PICK, SUM
from support_plugins import CallKernel, InProcessBackend, module


def run(*arguments: str) -> str:
    result = CliRunner().invoke(build(["backends"]), ["backends", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def row(name: str) -> dict[str, Any]:
    answer = json.loads(run("--json"))
    assert (answer["schema"], answer["command"]) == (1, "backends")
    (found,) = [item for item in answer["backends"] if item["name"] == name]
    return dict(found)


def test_ready_backend_with_what_it_can_do(acme_runtime: Runtime) -> None:
    assert row("acme") == {
        "name": "acme",
        "device_type": "acme",
        "state": "ready",
        "reason": "made by a test",
        "plugin": "acme-plugin",
        "distribution": None,
        "version": None,
        "devices": ["cpu"],
        "priority": "NORMAL",
        "dtypes": None,
        "graph_capture": False,
        "batch_invariant": False,
        "native": ["copy_blocks_", "own_op"],
        "overridden": [],
        "portable": ["gather_paged", "mla_caching_", "mla_gather", "paged_attention", "paged_caching_", "static_update_", "swap_blocks_"],
        "notes": [],
    }


def test_overridden_kernel_is_shown(acme_runtime: Runtime) -> None:
    acme_runtime.registry.register_kernel("acme", "copy_blocks_", CallKernel(lambda *args: None), override=True)
    assert row("acme")["overridden"] == ["copy_blocks_"]
    assert "copy_blocks_ (overridden)" in run()


@pytest.mark.parametrize(("name", "state", "reason"), [("absent", "absent", "no card"), ("broken", "unusable", "driver 3 is too old")])
def test_backend_that_is_not_ready(acme_runtime: Runtime, name: str, state: str, reason: str) -> None:
    found = row(name)
    assert (found["state"], found["reason"], found["plugin"]) == (state, reason, "others")
    assert "devices" not in found


def test_table_for_people(acme_runtime: Runtime) -> None:
    table = run()
    for text in ("acme", "READY", "own_op", "gather_paged", "up to each kernel", "UNUSABLE", "driver 3 is too old", "this process"):
        assert text in table


class Talking(InProcessBackend):
    """A backend with something to say, or whose notes are broken."""

    def __init__(self, name: str, *said: str) -> None:
        super().__init__(name, claims=(), devices=("cpu",))
        self.said = said

    def notes(self) -> Sequence[str]:
        if not self.said:
            raise OSError("libacme is gone")
        return self.said


BROKEN = (
    "backend 'broken': notes(): expected a list of lines (str), got OSError: libacme is gone. "
    "Fix: report it to the plugin's author; KVDOCK_BACKENDS_DENY leaves a plugin out"
)


@pytest.mark.parametrize(
    ("notes", "got"),
    [(lambda: sys.exit(3), "SystemExit: 3"), (lambda: "firmware 3", "'firmware 3' (str)"), (lambda: None, "None (NoneType)")],
    ids=["exits", "text", "none"],
)
def test_notes_that_are_no_lines_are_told_and_hide_no_other_backend(notes: Callable[[], Any], got: str) -> None:
    odd = Talking("odd")
    odd.notes = notes  # type: ignore[method-assign]
    with active(runtime_of(odd, Talking("talking", "direct launches"))):
        assert row("odd")["notes"][0].startswith(f"backend 'odd': notes(): expected a list of lines (str), got {got}. Fix: ")
        assert row("talking")["notes"] == ["direct launches"]


def test_notes_are_shown() -> None:
    with active(runtime_of(Talking("talking", "direct launches", "two queues"), Talking("broken"), InProcessBackend("silent"))):
        assert [row(name)["notes"] for name in ("talking", "broken", "silent")] == [
            ["direct launches", "two queues"],
            [BROKEN],
            [],
        ]
        lines = run().splitlines()
    assert lines[-3:] == ["talking: direct launches", "talking: two queues", f"broken: {BROKEN}"]


def test_doctors_child_asks_for_notes_and_says_whom() -> None:
    """So that a backend that hangs there is named."""
    mine, steps = runtime_of(Talking("talking", "direct launches"), Talking("broken")), list[dict[str, Any]]()
    assert said_by(mine.registry, lambda **line: steps.append(line)) == [
        "backend 'talking': direct launches",
        f"backend 'broken': {BROKEN}",
    ]
    assert steps == [{"step": "notes", "subject": "talking"}, {"step": "notes", "subject": "broken"}]


def test_ops_of_plugins_with_who_serves_them(acme_runtime: Runtime) -> None:
    assert describe_ops(acme_runtime.registry) == []
    assert "op of a plugin" not in run()
    acme_runtime.registry.register(module("zoo", KVDOCK_API=(1, 0), kvdock_ops=lambda: [SUM, PICK]), "zoo")
    acme_runtime.registry.register_kernel("acme", "zoo_sum_", SUM.portable)
    origin = {"plugin": "zoo", "distribution": None, "version": None}
    assert json.loads(run("--json"))["ops"] == [
        {"op": "zoo_sum_", **origin, "native": ["acme"], "portable": []},
        {"op": "zoo_pick", **origin, "native": [], "portable": ["acme"]},
    ]
    assert "zoo_pick" in run()
