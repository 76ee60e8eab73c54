"""The order of precedence, step by step, and that a tie is an error whatever was registered first."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import kvdock
from kvdock.errors import AmbiguousBackendError, BackendUnavailableError, NoBackendError
from kvdock.plugins.records import PluginState
from kvdock.plugins.registry import Registry
from support_plugins import QUIET, InProcessBackend, plugin

META = torch.device("meta")
OP = "copy_blocks_"


def registry(*backends: InProcessBackend, environ: dict[str, str] | None = None, **configured: Any) -> Registry:
    made = Registry(QUIET | (environ or {}), **configured)
    for backend in backends:
        made.register(plugin(backend), f"plugin-{backend.name}")
    return made


def chosen(made: Registry, named: str | None = None, device: torch.device = META) -> tuple[str, str]:
    choice = made.choose(OP, device, named)
    return choice.backend.name, choice.reason


def two(**second: Any) -> list[InProcessBackend]:
    return [InProcessBackend("first"), InProcessBackend("second", **second)]


def test_only_ready_backend_that_claims_the_device() -> None:
    others = InProcessBackend("absent", probe=kvdock.plugin.Probe.absent("none")), InProcessBackend("elsewhere", claims=("cpu",))
    assert chosen(registry(InProcessBackend("acme"), *others)) == ("acme", "only ready backend that claims meta")


def test_choice_carries_kernels_and_capabilities() -> None:
    backend = InProcessBackend("acme", priority=kvdock.plugin.Priority.FALLBACK)
    choice = registry(backend).choose(OP, META)
    assert choice.backend is backend
    assert (choice.kernels, choice.capabilities.priority) == ({}, kvdock.plugin.Priority.FALLBACK)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_highest_priority_whatever_was_registered_first(order: tuple[int, ...]) -> None:
    backends = [InProcessBackend(priority.name.lower(), priority=priority) for priority in kvdock.plugin.Priority]
    name, reason = chosen(registry(*(backends[index] for index in order)))
    assert name == "specialised"
    assert reason.startswith("highest priority of the ready backends that claim meta: ")
    assert "fallback (priority 0)" in reason


def test_tie_at_the_top_is_an_error_and_below_it_is_not() -> None:
    below = [InProcessBackend(name, priority=kvdock.plugin.Priority.FALLBACK) for name in ("x", "y")]
    assert chosen(registry(InProcessBackend("top"), *below))[0] == "top"
    with pytest.raises(AmbiguousBackendError) as caught:
        chosen(registry(*two(), below[0]))
    assert str(caught.value) == (
        "copy_blocks_: several ready backends claim meta, and none is preferred: first (priority 10), second (priority 10), "
        "x (priority 0). Fix: set KVDOCK_BACKEND_ACME=first (or another of them), or use kvdock.use_backend(name)"
    )


def test_tie_reads_the_same_whatever_was_registered_first() -> None:
    texts = set()
    for backends in (two(), two()[::-1]):
        with pytest.raises(AmbiguousBackendError) as caught:
            chosen(registry(*backends))
        texts.add(str(caught.value))
    assert len(texts) == 1


def test_tie_between_device_types_names_the_variable_of_torchs_own() -> None:
    with pytest.raises(AmbiguousBackendError, match="Fix: set KVDOCK_BACKEND_META=first"):
        chosen(registry(*two(device_type="other")))
    assert chosen(registry(*two(device_type="other"), environ={"KVDOCK_BACKEND_META": "second"}))[0] == "second"


def test_environment_decides_by_the_claimants_type_before_torchs() -> None:
    environ = {"KVDOCK_BACKEND_META": "first", "KVDOCK_BACKEND_ACME": "second"}
    assert chosen(registry(*two(), environ=environ)) == ("second", "configured for meta by KVDOCK_BACKEND_ACME")


def test_contradicting_variables_are_an_error_that_names_both() -> None:
    environ = {"KVDOCK_BACKEND_OTHER": "second", "KVDOCK_BACKEND_ACME": "first"}
    with pytest.raises(AmbiguousBackendError) as caught:
        chosen(registry(*two(device_type="other"), environ=environ))
    assert str(caught.value) == (
        "meta is configured more than once: KVDOCK_BACKEND_ACME says first, KVDOCK_BACKEND_OTHER says second. Fix: leave one of them"
    )


def test_program_decides_for_a_device_before_the_environment() -> None:
    made = registry(*two(), environ={"KVDOCK_BACKEND_ACME": "first"}, device_backends={"acme": "second"})
    assert chosen(made) == ("second", "configured for meta by the program for 'acme'")
    by_torchs_type = registry(*two(), environ={"KVDOCK_BACKEND_ACME": "first"}, device_backends={"meta": "second"})
    assert chosen(by_torchs_type) == ("second", "configured for meta by the program for 'meta'")


def test_op_comes_before_device_and_call_before_op() -> None:
    made = registry(*two(), InProcessBackend("third"), op_backends={OP: "second"}, device_backends={"acme": "first"})
    assert chosen(made) == ("second", "configured for op 'copy_blocks_'")
    assert made.choose("gather_paged", META).backend.name == "first"
    assert chosen(made, "third") == ("third", "asked for by name")


def test_named_backend_need_not_claim_the_device_but_must_run_there() -> None:
    made = registry(InProcessBackend("acme", claims=(), devices=("meta", "cpu")), InProcessBackend("elsewhere", devices=("cpu",)))
    assert chosen(made, "acme")[0] == "acme"
    with pytest.raises(BackendUnavailableError) as caught:
        chosen(made, "elsewhere")
    assert str(caught.value) == (
        "backend 'elsewhere', asked for by name: expected tensors on one of its devices (cpu), got meta. "
        "Fix: move the tensors, or ask for another backend"
    )


@pytest.mark.parametrize(("listed", "runs"), [("meta", True), ("meta:1", True), ("meta:0", False)])
def test_device_without_index_stands_for_all_of_its_type(listed: str, runs: bool) -> None:
    made = registry(InProcessBackend("acme", devices=(listed,)))
    if runs:
        assert chosen(made, "acme", torch.device("meta:1"))[0] == "acme"
    else:
        with pytest.raises(BackendUnavailableError):
            chosen(made, "acme", torch.device("meta:1"))


@pytest.mark.parametrize("environ", [{"KVDOCK_BACKEND_META": "absent"}, {}])
def test_named_or_configured_and_not_ready_raises_though_another_is(environ: dict[str, str]) -> None:
    made = registry(InProcessBackend("acme"), InProcessBackend("absent", probe=kvdock.plugin.Probe.absent("no card")), environ=environ)
    with pytest.raises(BackendUnavailableError) as caught:
        chosen(made, None if environ else "absent")
    assert str(caught.value).endswith(": ABSENT: no card (plugin 'plugin-absent' (registered in this process))")


def test_name_of_a_plugin_points_to_its_backends() -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        chosen(registry(InProcessBackend("acme")), "plugin-acme")
    assert str(caught.value) == (
        "backend 'plugin-acme', asked for by name: it is the name of a plugin (plugin 'plugin-acme' (registered in this process)). "
        "Fix: ask for its backend, acme"
    )


def test_nobody_claims_lists_everybody_with_state_and_reason() -> None:
    made = registry(InProcessBackend("elsewhere"), InProcessBackend("absent", probe=kvdock.plugin.Probe.absent("no card")))
    with pytest.raises(NoBackendError) as caught:
        chosen(made, device=torch.device("cpu"))
    text = str(caught.value)
    assert text.startswith("copy_blocks_: no backend that is ready claims cpu. Installed: ")
    assert "elsewhere (does not claim cpu); absent (ABSENT: no card)" in text
    assert text.endswith("`kvdock doctor` shows tracebacks")


class Raising(InProcessBackend):
    def claims(self, device: torch.device) -> bool:
        raise OSError("lost the card")


def test_backend_whose_claim_raises_breaks_no_other_and_is_listed() -> None:
    made = registry(InProcessBackend("acme"), Raising("raising"))
    assert chosen(made)[0] == "acme"
    by_name = {item.name: item for item in made.candidates(META) if item.name in ("acme", "raising")}
    assert (by_name["acme"].claims, by_name["acme"].reason) == (True, "claims meta with priority 10")
    assert (by_name["raising"].claims, by_name["raising"].reason) == (
        False,
        "backend 'raising': claims(meta): expected a bool, got OSError: lost the card. "
        "Fix: report it to the plugin's author; KVDOCK_BACKENDS_DENY leaves a plugin out",
    )
    with pytest.raises(NoBackendError, match="lost the card"):
        chosen(registry(Raising("raising")))


def test_broken_backend_for_the_same_kind_of_device_is_told_with_the_choice() -> None:
    broken = InProcessBackend("broken", probe=kvdock.plugin.Probe.unusable("driver 3"))
    unrelated = InProcessBackend("unrelated", device_type="other", probe=kvdock.plugin.Probe.unusable("no memory"))
    assert chosen(registry(InProcessBackend("acme"), broken, unrelated)) == (
        "acme",
        "only ready backend that claims meta; broken is UNUSABLE: driver 3",
    )


def test_candidates_hold_every_backend_with_its_state() -> None:
    made = registry(InProcessBackend("acme"), InProcessBackend("absent", probe=kvdock.plugin.Probe.absent("no card")))
    found = [item for item in made.candidates(META) if item.plugin.startswith("plugin-")]
    assert [(item.name, item.plugin, item.state, item.claims) for item in found] == [
        ("acme", "plugin-acme", PluginState.READY, True),
        ("absent", "plugin-absent", PluginState.ABSENT, False),
    ]
