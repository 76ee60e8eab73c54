"""The plan that the lists make of what is installed. That it is installed for real is tested in `tests/packaging`."""

from __future__ import annotations

from kvdock.plugins.entry_points import FoundEntryPoint, plan
from kvdock.plugins.records import PluginState
from kvdock.plugins.settings import PluginSettings

A = FoundEntryPoint("acme", "dist-a", "1.0", "mod_a")
B = FoundEntryPoint("acme", "dist-b", "2.0", "mod_b")
A_AGAIN = FoundEntryPoint("acme", "dist-c", "3.0", "mod_a")
OTHER = FoundEntryPoint("other", "dist-o", "1.0", "mod_o")


def settings(**environ: str) -> PluginSettings:
    return PluginSettings.from_environ({f"KVDOCK_{key}": value for key, value in environ.items()})


def test_all_load_in_order_without_lists() -> None:
    made = plan([A, OTHER], settings())
    assert (made.load, made.refused, made.notes) == ((A, OTHER), (), ())


def test_same_plugin_seen_twice_is_loaded_once_and_is_no_rival_of_itself() -> None:
    assert plan([A, A_AGAIN, OTHER], settings()).load == (A, OTHER)
    conflict = plan([A, B, A_AGAIN], settings())
    assert conflict.load == ()
    assert [record.distribution for record in conflict.refused] == ["dist-a", "dist-b"]


def test_conflict_of_denied_plugins_is_none() -> None:
    made = plan([A, B, OTHER], settings(BACKENDS_DENY="acme"))
    assert made.load == (OTHER,)
    assert {record.state for record in made.refused} == {PluginState.BLOCKED}


def test_picking_an_unknown_distribution_is_told_with_those_there_are() -> None:
    made = plan([A, B], settings(BACKENDS="acme@dist-x"))
    assert made.load == ()
    assert made.notes == ("KVDOCK_BACKENDS names 'acme@dist-x', which is not installed. Installed: acme@dist-a, acme@dist-b",)


def test_denying_what_is_not_installed_is_quiet() -> None:
    assert plan([A], settings(BACKENDS_DENY="gone")).notes == ()


def test_nothing_installed() -> None:
    made = plan([], settings(BACKENDS="acme"))
    assert made.notes == ("KVDOCK_BACKENDS names 'acme', which is not installed. Installed: none",)
