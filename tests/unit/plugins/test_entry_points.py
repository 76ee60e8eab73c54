"""The plan that the lists make of what is installed. That it is installed for real is tested in `tests/packaging`."""

from __future__ import annotations

import sys
from pathlib import Path

import attrs
import pytest

from kvdock.plugins.entry_points import FoundEntryPoint, plan
from kvdock.plugins.installed import installed
from kvdock.plugins.records import PluginState
from kvdock.plugins.settings import PluginSettings, Selector

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


def test_conflict_with_a_plugin_of_kvdocks_own_first_tells_how_to_keep_that_one() -> None:
    stranger, own = FoundEntryPoint("cpu", "acme", "1.0", "acme_cpu"), FoundEntryPoint("cpu", "kvdock", "0.1.0", "kvdock_cpu")
    reasons = {record.reason for record in plan([stranger, own], settings()).refused}
    (reason,) = reasons
    assert reason.endswith(
        "Fix: keep that of kvdock with KVDOCK_BACKENDS_DENY=cpu@acme, or keep that of acme with KVDOCK_BACKENDS_DENY=cpu@kvdock"
    )


def test_the_printed_fix_of_three_rivals_works() -> None:
    rivals = [attrs.evolve(A, name="a, b@c", distribution=name, value=name.replace("-", "_")) for name in ("dist-x", "dist-y", "dist-z")]
    fix = plan(rivals, settings()).refused[0].reason.rpartition("BACKENDS_DENY=")[2]
    assert plan(rivals, settings(BACKENDS_DENY=fix)).load == (rivals[2],)


@pytest.mark.parametrize("name", ["acme", "a,b", "a@b", " a ", "100%", "%2C", "日本", "a b", "\ta"])
def test_the_lists_can_express_every_name(name: str) -> None:
    item = FoundEntryPoint(name, "Dist_X", "1.0", "mod")
    written = str(Selector(name, "dist-x"))
    assert plan([item, OTHER], settings(BACKENDS=written)).load == (item,)
    assert plan([item, OTHER], settings(BACKENDS_DENY=written)).load == (OTHER,)


def test_entry_point_without_a_name_is_refused_as_no_list_could_name_it() -> None:
    (record,) = plan([FoundEntryPoint("", "dist", "1.0", "mod")], settings()).refused
    assert (record.state, record.reason) == (PluginState.INCOMPATIBLE, "dist declares an entry point without a name")


def test_what_an_entry_point_names() -> None:
    assert attrs.evolve(A, value="mod.sub : some.thing [gpu, extra]").target == ("mod.sub", ("some", "thing"))
    assert attrs.evolve(A, value="mod [gpu]").target == attrs.evolve(A, value="mod").target == ("mod", ())
    assert plan([A, attrs.evolve(A_AGAIN, value="mod_a [gpu]")], settings()).load == (A,)
    with pytest.raises(ValueError, match="the entry point is 'no-module'; expected module or module:attribute"):
        attrs.evolve(A, value="no-module").target  # noqa: B018 - the question is what raises


@pytest.mark.parametrize("module", ["acme", "acme_of_old"])
def test_what_pip_has_set_aside_stands_behind_what_is_installed(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, version, points in (("~v_acme", "0.9", module), ("kv_acme", "1.0", "acme")):
        place = tmp_path / folder / f"{folder}-{version}.dist-info"
        place.mkdir(parents=True)
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kv-acme\nVersion: {version}\n", encoding="utf-8")
        (place / "entry_points.txt").write_text(f"[zoo.keepers]\nacme = {points}\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "~v_acme"), str(tmp_path / "kv_acme")])
    (found,), notes = installed("zoo.keepers")
    assert (found.version, found.points) == ("1.0", (("acme", "acme"),))
    told = [note.partition("; ")[2] for note in notes]
    fix = f"what this one declares (acme) is not loaded, as {found.place} comes first. Fix: remove that folder"
    assert told == ([] if module == "acme" else [fix])
