from __future__ import annotations

import json

import pytest

from kvdock.interface import ProbeState
from kvdock.plugins.records import BackendRecord, PluginRecord, PluginState, mark_name_conflicts, summarise

READY = PluginState.READY


def record(name: str, *backends: tuple[str, PluginState, str]) -> PluginRecord:
    made = tuple(BackendRecord(backend, "acme", state, reason) for backend, state, reason in backends)
    return PluginRecord(name, f"{name}_module", f"{name}-dist", "1.0", READY, backends=made)


def test_what_needs_nobody_is_fine() -> None:
    assert {state for state in PluginState if state.fine} == {READY, PluginState.ABSENT, PluginState.BLOCKED}


@pytest.mark.parametrize("probe", list(ProbeState))
def test_every_probe_state_has_a_state(probe: ProbeState) -> None:
    assert PluginState.of_probe(probe).name == probe.name


def test_json_round_trip() -> None:
    before = summarise(record("acme", ("a", READY, "two cards"), ("b", PluginState.UNUSABLE, "driver")))
    text = json.dumps(before.as_dict())
    assert json.loads(text)["backends"][1] == {"name": "b", "device_type": "acme", "state": "unusable", "reason": "driver", "doubts": []}
    assert PluginRecord.from_dict(json.loads(text)) == before


@pytest.mark.parametrize(
    ("states", "worst"),
    [
        ((READY, PluginState.ABSENT), READY),
        ((PluginState.ABSENT, PluginState.ABSENT), PluginState.ABSENT),
        ((READY, PluginState.UNUSABLE), PluginState.UNUSABLE),
        ((PluginState.UNUSABLE, PluginState.INCOMPATIBLE), PluginState.INCOMPATIBLE),
    ],
)
def test_plugin_has_the_worst_state_of_its_backends(states: tuple[PluginState, PluginState], worst: PluginState) -> None:
    summary = summarise(record("acme", ("a", states[0], "one"), ("b", states[1], "two")))
    assert summary.state is worst


def test_reasons_of_several_backends_name_them() -> None:
    broken = [(name, PluginState.UNUSABLE, reason) for name, reason in (("b", "driver 3"), ("c", "no memory"))]
    summary = summarise(record("acme", ("a", READY, "fine"), *broken))
    assert summary.reason == "backend 'b': driver 3; backend 'c': no memory"
    assert summary.verdict == "UNUSABLE: backend 'b': driver 3; backend 'c': no memory"


def test_labels() -> None:
    assert record("acme").label == "plugin 'acme' (acme-dist 1.0)"
    assert PluginRecord("mine", "module", None, None, READY).label == "plugin 'mine' (registered in this process)"
    assert PluginRecord("mine", "module", None, None, READY).verdict == "READY"


def test_name_conflict_spares_the_other_backends_of_the_plugin() -> None:
    before = [record("one", ("x", READY, ""), ("y", READY, "fine")), record("two", ("x", READY, "")), record("three", ("z", READY, ""))]
    one, two, three = mark_name_conflicts(before)
    assert [backend.state.name for backend in one.backends] == ["CONFLICT", "READY"]
    assert (one.state, two.state, three.state) == (PluginState.CONFLICT, PluginState.CONFLICT, READY)
    assert (
        one.backends[0].reason
        == two.reason
        == (
            "backend name 'x' is brought by plugin 'one' (one-dist 1.0) and plugin 'two' (two-dist 1.0); none of them is used. "
            "Fix: refuse one, such as KVDOCK_BACKENDS_DENY=two@two-dist"
        )
    )


def test_plugin_that_uses_one_name_twice_conflicts_with_itself() -> None:
    (one,) = mark_name_conflicts([record("one", ("x", READY, ""), ("x", READY, ""))])
    assert one.state is PluginState.CONFLICT
    assert one.reason.endswith("none of them is used. Fix: the plugin must rename one; backend 'x': " + one.backends[1].reason)
