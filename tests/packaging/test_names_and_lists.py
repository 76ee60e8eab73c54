"""Names that several distributions use, and the lists that decide what is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from support_distributions import ACME, Environments, Report, report, reports
from support_projects import Environment, _pip

pytestmark = pytest.mark.slow  # each starts processes that import torch

BOTH = (
    "entry point 'acme' is declared by kvdock-acme 1.0 (kvdock_acme) and kvdock-rival 2.0 (kvdock_rival); none of them is loaded. "
    "Fix: keep that of kvdock-acme with KVDOCK_BACKENDS_DENY=acme@kvdock-rival, "
    "or keep that of kvdock-rival with KVDOCK_BACKENDS_DENY=acme@kvdock-acme"
)


@pytest.fixture(scope="module")
def rivals(environments: Environments) -> Environment:
    """Two distributions that use one entry-point name for different plugins."""
    return environments.with_projects("kvdock-acme", "kvdock-rival")


PICKS = [{"KVDOCK_BACKENDS": "acme@kvdock-rival"}, {"KVDOCK_BACKENDS_DENY": "acme@Kvdock_Acme"}]


@pytest.fixture(scope="module")
def picked(rivals: Environment, environments: Environments) -> list[Report]:
    """What becomes of both, first without a list, then with each pick."""
    found = environments.once("picked", lambda: reports(rivals, [{}, *PICKS], ("meta", "acme"), ("meta", None)))
    return [Report.of_dict(item) for item in found]


def test_two_distributions_with_one_name_are_both_named_and_neither_is_loaded(picked: list[Report]) -> None:
    found = picked[0]
    assert found.states == {"acme@kvdock-acme": "CONFLICT", "acme@kvdock-rival": "CONFLICT"}
    assert {record.reason for record in found.records if record.name == "acme"} == {BOTH}
    assert not {"acme", "rival"} & set(found.loaded)
    assert not {"kvdock_acme", "kvdock_rival"} & set(found.imported)
    assert found.answers[0]["error"] == "BackendUnavailableError"
    assert found.answers[0]["text"].count("is CONFLICT: ") == 2


@pytest.mark.parametrize("index", range(len(PICKS)))
def test_user_picks_one_of_two_distributions(picked: list[Report], index: int) -> None:
    found = picked[index + 1]
    assert found.states == {"acme@kvdock-acme": "BLOCKED", "acme@kvdock-rival": "READY"}
    assert found.answers[1]["backend"] == "rival"


@pytest.mark.slow
def test_same_name_and_value_in_two_distributions_is_one_plugin(environments: Environments) -> None:
    found = report(environments.with_projects("kvdock-acme", "kvdock-twin"))
    assert found.states == {"acme@kvdock-acme": "READY"}


@pytest.mark.slow
def test_editable_and_installed_is_one_plugin(environments: Environments, wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = Environment.create(tmp_path / "env")
    environment.install("-e", ACME.write(tmp_path))
    _pip("install", "--no-deps", "--no-index", "--target", str(tmp_path / "installed"), str(wheels["kvdock-acme"]))
    found = report(environment, PYTHONPATH=str(tmp_path / "installed"))
    assert found.states == {"acme@kvdock-acme": "READY"}


def test_two_backends_of_one_name_name_both_plugins(environments: Environments) -> None:
    found = report(environments.with_projects("kvdock-first", "kvdock-same"), ("meta", "first"))
    assert found.states == {"first@kvdock-first": "CONFLICT", "same@kvdock-same": "CONFLICT"}
    assert found.of("first").reason == (
        "backend name 'first' is brought by plugin 'first' (kvdock-first 1.0) and plugin 'same' (kvdock-same 4.0); "
        "none of them is used. Fix: refuse one, such as KVDOCK_BACKENDS_DENY=same@kvdock-same"
    )
    assert found.answers[0]["error"] == "BackendUnavailableError"
    assert "CONFLICT: backend name 'first' is brought by" in found.answers[0]["text"]


LISTS = [
    ({"KVDOCK_DISABLE_AUTOLOAD": "1", "KVDOCK_BACKENDS": "first"}, [], "KVDOCK_DISABLE_AUTOLOAD=1 turns every plugin off"),
    ({"KVDOCK_BACKENDS": "first", "KVDOCK_BACKENDS_DENY": "first"}, [], "KVDOCK_BACKENDS_DENY names 'first'"),
    ({"KVDOCK_BACKENDS": "second"}, ["kvdock_second"], "KVDOCK_BACKENDS does not name it; it names second"),
    ({"KVDOCK_BACKENDS_DENY": "other, first@kvdock-first"}, ["kvdock_second"], "KVDOCK_BACKENDS_DENY names 'first@kvdock-first'"),
    ({"KVDOCK_BACKENDS": " first , frist"}, ["kvdock_first", "kvdock_second"], ""),
]
"""One process tries these in turn: what it imported grows from list to list, and `first` is imported by the last only."""


@pytest.fixture(scope="module")
def listed(environments: Environments) -> list[Report]:
    """What becomes of two plugins with each of the lists."""
    environment = environments.with_projects("kvdock-first", "kvdock-second")
    found = environments.once("lists", lambda: reports(environment, [environ for environ, _, _ in LISTS]))
    return [Report.of_dict(item) for item in found]


@pytest.mark.parametrize("index", range(len(LISTS)))
def test_lists_act_before_a_plugin_is_imported(listed: list[Report], index: int) -> None:
    outcome, (_, imported, reason) = listed[index], LISTS[index]
    assert [name for name in outcome.imported if name in ("kvdock_first", "kvdock_second")] == imported
    assert (outcome.of("first").state.name, outcome.of("first").reason) == ("BLOCKED" if reason else "READY", reason)


def test_allowed_name_that_is_not_installed_is_reported(listed: list[Report]) -> None:
    found = listed[-1]
    text = "KVDOCK_BACKENDS names 'frist', which is not installed. Installed: "
    assert [note for note in found.notes if note.startswith(text) and "first@kvdock-first" in note]
    assert [warning for kind, warning in found.warnings if kind == "KVDockWarning" and warning.startswith(text)]
    assert found.of("first").state.name == "READY"


@pytest.mark.slow
def test_unreadable_metadata_of_one_distribution_hides_no_other(
    environments: Environments, wheels: dict[str, Path], tmp_path: Path
) -> None:
    environment = Environment.create(tmp_path / "env")
    environment.install(wheels["kvdock-first"], wheels["kvdock-second"])
    (environment.site_packages / "kvdock_second-1.0.dist-info" / "METADATA").unlink()
    found = report(environment)
    assert found.states == {"first@kvdock-first": "READY", "second@kvdock_second": "READY"}, "importlib finds it too"
    assert [note for note in found.notes if "kvdock_second-1.0.dist-info: its metadata cannot be read" in note], found.notes
