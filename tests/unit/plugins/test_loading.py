"""What an imported plugin becomes. Imports themselves are tested with real distributions in `tests/packaging`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import kvdock
from kvdock.plugins.loading import Contribution, admit
from kvdock.plugins.records import PluginRecord, PluginState
from support_plugins import InProcessBackend, module, plugin

EMPTY = PluginRecord("acme", "acme_plugin", "acme-dist", "1.0", PluginState.READY)


def admitted(*backends: object) -> Contribution:
    return admit(plugin(*backends), EMPTY)


def test_ready_backend_is_asked_once_for_everything_but_kernels() -> None:
    backend = InProcessBackend("acme")
    contribution = admitted(backend)
    assert backend.asked == ["probe", "capabilities"]
    assert [item.backend for item in contribution.backends] == [backend]
    assert contribution.record.state is PluginState.READY
    assert contribution.record.backends[0].device_type == "acme"
    assert contribution.record.reason == "made by a test"


@pytest.mark.parametrize("probe", [kvdock.plugin.Probe.absent("no card"), kvdock.plugin.Probe.unusable("driver 3")])
def test_backend_that_is_not_ready_is_not_asked_for_kernels(probe: kvdock.plugin.Probe) -> None:
    backend = InProcessBackend("acme", probe=probe)
    contribution = admitted(backend)
    assert backend.asked == ["probe"]
    assert contribution.backends == ()
    assert (contribution.record.state.name, contribution.record.reason) == (probe.state.name, probe.reason)


class Broken(InProcessBackend):
    def __init__(self, method: str, call: Any) -> None:
        super().__init__("acme")
        setattr(self, method, call)


def raises() -> Any:
    raise SystemExit(5)


@pytest.mark.parametrize("method", ["probe", "capabilities"])
def test_method_that_raises_makes_unusable_with_its_traceback(method: str) -> None:
    record = admitted(Broken(method, raises)).record
    assert (record.state, record.reason) == (PluginState.UNUSABLE, f"{method}() raised SystemExit: 5")
    assert "in raises" in record.traceback


@pytest.mark.parametrize("method", ["probe", "capabilities"])
def test_method_that_returns_something_else_makes_incompatible(method: str) -> None:
    record = admitted(Broken(method, lambda: 7)).record
    assert record.state is PluginState.INCOMPATIBLE
    assert record.reason.startswith(f"{method}() of backend 'acme': expected a ")
    assert record.reason.endswith("got 7 (int)")


def test_ready_backend_beside_a_broken_one_of_the_same_plugin_is_usable() -> None:
    contribution = admitted(InProcessBackend("good"), Broken("probe", raises))
    assert [item.backend.name for item in contribution.backends] == ["good"]
    assert (contribution.record.state, contribution.record.reason) == (PluginState.UNUSABLE, "backend 'acme': probe() raised SystemExit: 5")


def test_hook_that_raises_is_load_failed() -> None:
    record = admit(module("m", KVDOCK_API=(1, 0), kvdock_backends=raises), EMPTY).record
    assert (record.state, record.reason) == (PluginState.LOAD_FAILED, "kvdock_backends() raised SystemExit: 5")


def test_abstract_backend_is_load_failed_with_the_missing_methods() -> None:
    class Half(kvdock.plugin.Backend):
        name = "half"
        device_type = "acme"

    record = admit(module("m", KVDOCK_API=(1, 0), kvdock_backends=lambda: [Half()]), EMPTY).record  # type: ignore[abstract]
    assert record.state is PluginState.LOAD_FAILED
    assert "claims" in record.reason


def test_no_backend_is_absent_and_prefix_caches_alone_are_ready() -> None:
    assert (admitted().record.state, admitted().record.reason) == (PluginState.ABSENT, "kvdock_backends() returned no backend")

    def caches() -> Mapping[str, Any]:
        return {"mine": dict}

    contribution = admit(module("m", KVDOCK_API=(1, 0), kvdock_prefix_caches=caches), EMPTY)
    assert (contribution.record.state, contribution.record.reason) == (PluginState.READY, "brings prefix caches: mine")
    assert contribution.prefix_caches == {"mine": dict}


def test_keyboard_interrupt_is_not_swallowed() -> None:
    def interrupt() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        admitted(Broken("probe", interrupt))


def test_steps_are_watched_in_order() -> None:
    steps: list[tuple[str, str]] = []
    admit(plugin(InProcessBackend("a"), InProcessBackend("b")), EMPTY, lambda step, subject: steps.append((step, subject)))
    assert steps == [("hooks", "acme"), ("probe", "a"), ("probe", "b")]


def test_version_is_read_before_the_hooks() -> None:
    asked: list[str] = []
    made = module("m", KVDOCK_API=(9, 0), kvdock_backends=lambda config: asked.append("hook"))
    record = admit(made, EMPTY).record
    assert (record.state, record.reason.split(":")[0], asked) == (PluginState.INCOMPATIBLE, "KVDOCK_API", [])
