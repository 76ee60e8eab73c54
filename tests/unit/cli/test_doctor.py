"""What doctor makes of its findings. The children themselves run in `tests/packaging`."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from typer.testing import CliRunner

import kvdock
from kvdock.cli import doctor
from kvdock.cli.app import build
from kvdock.cli.doctor import Diagnosis
from kvdock.cli.versions import versions
from kvdock.plugins.contract import unknown_op
from kvdock.plugins.records import BackendRecord, PluginRecord, PluginState
from kvdock.plugins.settings import PluginSettings


def diagnosis(*states: PluginState) -> Diagnosis:
    plugins = [PluginRecord(state.value, "m", "dist", "1.0", state, "because", f"trace of {state.value}") for state in states]
    return Diagnosis({"kvdock": "0.1.0"}, {"KVDOCK_BACKENDS": "acme"}, tuple(plugins), ("a note",))


@pytest.mark.parametrize("state", list(PluginState))
def test_exit_code_follows_the_states(monkeypatch: pytest.MonkeyPatch, state: PluginState) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda timeout_s: diagnosis(PluginState.READY, state))
    result = CliRunner().invoke(build(["doctor"]), ["doctor", "--json"])
    fine = state in (PluginState.READY, PluginState.ABSENT, PluginState.BLOCKED)
    assert (result.exit_code, json.loads(result.stdout)["ok"]) == ((0, True) if fine else (1, False))


def test_text_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda timeout_s: diagnosis(PluginState.LOAD_FAILED, PluginState.UNUSABLE))
    lines = CliRunner().invoke(build(["doctor"]), ["doctor"]).stdout.splitlines()
    assert lines[:2] == ["kvdock 0.1.0", "KVDOCK_BACKENDS=acme"]
    assert "note: a note" in lines
    assert "--- plugin 'load_failed' (dist 1.0)" in lines
    assert "trace of unusable" in lines
    assert lines[-1] == "needs attention: load_failed, unusable"


def test_time_limit_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(doctor, "diagnose", lambda timeout_s: seen.append(timeout_s) or diagnosis())
    for arguments in ([], ["--timeout", "2.5"]):
        CliRunner().invoke(build(["doctor"]), ["doctor", *arguments])
    assert seen == [60.0, 2.5]


def test_environment_that_cannot_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDOCK_BACKENDS", "@acme")
    result = CliRunner().invoke(build(["doctor"]), ["doctor", "--json"])
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["text"].startswith("KVDOCK_BACKENDS: expected plugin names separated by commas")


def test_problems_need_attention_whatever_the_plugins_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = attrs.evolve(diagnosis(PluginState.READY), problems=("stale metadata",), seconds={"ready@dist": 12.34})
    monkeypatch.setattr(doctor, "diagnose", lambda timeout_s: found)
    result = CliRunner().invoke(build(["doctor"]), ["doctor"])
    lines = result.stdout.splitlines()
    assert (result.exit_code, lines[-1]) == (1, "needs attention: the problems above")
    assert "problem: stale metadata" in lines
    assert [line for line in lines if "ready" in line and "12.3" in line], "how long it took is shown"
    answer = json.loads(CliRunner().invoke(build(["doctor"]), ["doctor", "--json"]).stdout)
    assert (answer["ok"], answer["problems"], answer["seconds"]) == (False, ["stale metadata"], {"ready@dist": 12.34})


def test_versions_hold_what_kvdock_needs_and_no_developers_tools() -> None:
    found = versions()
    assert found["api"] == ".".join(map(str, kvdock.plugin.KVDOCK_API))
    assert {"kvdock", "python", "torch", "pluggy"} <= set(found)
    assert not {"ruff", "mypy", "pytest", "hypothesis"} & set(found)


def test_core_of_doctor_names_no_kind_of_hardware() -> None:
    # The versions come from kvdock's metadata, so that a new backend needs no change here.
    folder = Path(doctor.__file__).parent
    text = " ".join(path.read_text(encoding="utf-8").lower() for path in folder.glob("*.py"))
    assert not [word for word in ("cuda", "rocm", "hip", "nvidia", "triton", "npu") if f" {word}" in text or f'"{word}' in text]


def test_a_backend_for_a_device_that_is_not_ready_is_a_problem() -> None:
    states = {"cpu": PluginState.READY, "acme": PluginState.ABSENT}
    backends = tuple(BackendRecord(name, "cpu", state) for name, state in states.items())
    record = PluginRecord("acme", "m", "acme", "1.0", PluginState.READY, backends=backends)
    for name, fine in (("cpu", True), ("acme", False), ("nobody", False)):
        found = doctor._not_there(PluginSettings.from_environ({"KVDOCK_BACKEND_CPU": name}), [record])
        assert found == (
            []
            if fine
            else [
                f"KVDOCK_BACKEND_CPU names {name!r}, which is not READY, so every op on 'cpu' fails. Ready: cpu. "
                "Fix: name one of them, or unset it"
            ]
        )


def test_an_op_that_two_plugins_bring_is_a_problem() -> None:
    one, two = (PluginRecord(name, "m", name, "1.0", PluginState.READY, ops=("zoo_sum_", f"{name}_op")) for name in ("a", "b"))
    assert doctor._ops_of_nobody([one]) == []
    assert doctor._ops_of_nobody([one, two]) == [
        "op 'zoo_sum_' is brought by plugin 'a' (a 1.0) and plugin 'b' (b 1.0), so no backend serves it. "
        "Fix: deny all but one with KVDOCK_BACKENDS_DENY"
    ]
    assert PluginRecord.from_dict(json.loads(json.dumps(one.as_dict()))) == one


def test_a_kernel_for_the_op_of_another_plugin_is_no_mistake() -> None:
    doubts = tuple(unknown_op(op, ("paged_caching_",)) for op in ("zoo_sum_", "zoo_sam_"))
    backend = BackendRecord("acme", "npu", PluginState.READY, "", doubts)
    acme = PluginRecord("acme", "m", "acme", "1.0", PluginState.READY, "; ".join(doubts), backends=(backend,))
    zoo = PluginRecord("zoo", "m", "zoo", "1.0", PluginState.READY, ops=("zoo_sum_",))
    assert doctor._knowing_each_other([acme]) == [acme]
    known, other = doctor._knowing_each_other([acme, zoo])
    assert (known.reason, other) == (doubts[1], zoo)
