"""doctor loads and probes each plugin in a process of its own: a hang, a crash or an exit becomes a verdict."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from support_distributions import Environments
from support_projects import Environment

TIMEOUT_S = 1.5


@pytest.fixture(scope="module")
def slow(environments: Environments) -> Environment:
    """An environment with plugins that hang, crash and exit."""
    return environments.with_projects("kvdock-slow")


@pytest.fixture(scope="module")
def crashed(slow: Environment, environments: Environments) -> dict[str, Any]:
    """What doctor says of those that end their process, and of those that do not."""
    names = {"KVDOCK_BACKENDS": "crash_in_probe,exit_in_import,sys_exit,opens_context,no_devices"}
    answer: dict[str, Any] = environments.once("crashed", lambda: json.loads(slow.kvdock("doctor", "--json", environ=names).stdout))
    return answer | {"plugins": {plugin["name"]: plugin for plugin in answer["plugins"]}}


def test_crash_in_a_probe_is_unusable_and_shows_where(crashed: dict[str, Any]) -> None:
    plugin = crashed["plugins"]["crash_in_probe"]
    assert (plugin["state"], plugin["reason"]) == ("unusable", "probe() of backend 'crash-in-probe' crashed the process with SIGSEGV")
    assert "Fatal Python error: Segmentation fault" in plugin["traceback"]
    assert "in probe" in plugin["traceback"]


def test_exit_in_an_import_is_load_failed(crashed: dict[str, Any]) -> None:
    plugin = crashed["plugins"]["exit_in_import"]
    assert (plugin["state"], plugin["reason"]) == (
        "load_failed",
        "importing kvdock_slow.exit_in_import ended the process with exit code 3",
    )


def test_sys_exit_in_an_import_shows_its_traceback(crashed: dict[str, Any]) -> None:
    plugin = crashed["plugins"]["sys_exit"]
    assert plugin["state"] == "load_failed"
    assert "sys.exit('no licence found')" in plugin["traceback"]


def test_one_that_cannot_list_its_devices_needs_attention(crashed: dict[str, Any]) -> None:
    assert crashed["plugins"]["no_devices"]["state"] == "ready"
    (problem,) = [problem for problem in crashed["problems"] if "no-devices" in problem]
    assert problem.startswith("backend 'no-devices': devices(): expected a list of torch.device, got IndexError: list index out of range")


def test_context_opened_while_loading_is_told(crashed: dict[str, Any]) -> None:
    assert crashed["plugins"]["opens_context"]["state"] == "ready"
    assert crashed["ok"] is False, "for the others"
    assert crashed["notes"] == [
        "plugin 'opens_context' opened a context on 'meta' when it was loaded or probed: a process that forks after that "
        "cannot use the device"
    ]


@pytest.mark.slow
def test_hangs_end_at_the_time_limit_with_the_place_and_leave_no_process(slow: Environment) -> None:
    begin = time.monotonic()
    done = slow.kvdock("doctor", "--json", "--timeout", str(TIMEOUT_S), environ={"KVDOCK_BACKENDS": "hang_in_import,hang_in_probe"})
    took_s = time.monotonic() - begin
    plugins = {plugin["name"]: plugin for plugin in json.loads(done.stdout)["plugins"]}
    assert done.returncode == 1
    imported, probed = plugins["hang_in_import"], plugins["hang_in_probe"]
    assert (imported["state"], imported["reason"]) == (
        "load_failed",
        f"importing kvdock_slow.hang_in_import did not end within {TIMEOUT_S:g} s",
    )
    assert (probed["state"], probed["reason"]) == ("unusable", f"probe() of backend 'hang-in-probe' did not end within {TIMEOUT_S:g} s")
    assert "hang_in_probe.py" in probed["traceback"]
    assert "in probe" in probed["traceback"]
    assert took_s < 60, "each of them sleeps for 600 s"
    assert not _running("time.sleep(600)"), "what a plugin started is ended with it"


def _running(text: str) -> list[str]:
    """Return the command lines of running processes that contain a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found += [line] if text in line and "pytest" not in line else []
    return found


@pytest.mark.slow
def test_doctor_is_content_with_what_works_and_loads_nothing_into_its_own_process(slow: Environment) -> None:
    code = """
import json, sys
from kvdock.cli.app import build
from typer.testing import CliRunner
result = CliRunner().invoke(build(["doctor"]), ["doctor", "--json"])
print(json.dumps([result.exit_code, json.loads(result.stdout), sorted(name for name in sys.modules if name.startswith("kvdock_"))]))
"""
    exit_code, answer, imported = slow.json(code, environ={"KVDOCK_BACKENDS": "well"})
    assert (exit_code, answer["ok"], answer["schema"], answer["command"]) == (0, True, 1, "doctor")
    states = {plugin["name"]: plugin["state"] for plugin in answer["plugins"]}
    assert (states["well"], states["crash_in_probe"]) == ("ready", "blocked")
    assert answer["environment"] == {"KVDOCK_BACKENDS": "well"}
    assert imported == []
