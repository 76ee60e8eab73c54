"""Metadata that is half there, stale, oddly named or not there at all hides no plugin, and is told."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support_distributions import Environments, report
from support_projects import Environment
from support_slow import first_of
from support_sources import ROOT

pytestmark = pytest.mark.slow  # each starts processes that import torch


def acme(wheels: dict[str, Path], root: Path) -> Environment:
    made = Environment.create(root / "env")
    made.install(wheels["kvdock-acme"])
    return made


def empty_folder(folder: Path) -> Path:
    """What an interrupted uninstall leaves."""
    left = folder / "kvdock_acme-0.9.dist-info"
    left.mkdir(parents=True)
    return left


def stale_egg_info(folder: Path) -> Path:
    left = folder / "kvdock_acme.egg-info"
    left.mkdir(parents=True)
    (left / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: kvdock-acme\nVersion: 0.1\n", encoding="utf-8")
    return left


def older_version(folder: Path) -> Path:
    left = folder / "kvdock_acme-0.5.dist-info"
    left.mkdir(parents=True)
    (left / "METADATA").write_text("Metadata-Version: 2.1\nName: kvdock-acme\nVersion: 0.5\n", encoding="utf-8")
    return left


@pytest.mark.parametrize("leave", first_of([empty_folder, stale_egg_info, older_version]))
def test_what_is_left_of_another_installation_hides_nothing_and_is_told(
    wheels: dict[str, Path], tmp_path: Path, leave: Callable[[Path], Path]
) -> None:
    environment = acme(wheels, tmp_path)
    left = leave(tmp_path / "first")  # before site-packages on the path
    found = report(environment, ("meta", "acme"), PYTHONPATH=joined(left.parent))
    assert found.states == {"acme@kvdock-acme": "READY"}
    assert found.of("acme").version == "1.0"
    assert found.answers[0]["backend"] == "acme"
    (note,) = found.notes
    assert note.startswith(f"{left}: is left of another installation of kvdock-acme, and hides its entry points in ")
    assert note.endswith("Fix: remove that folder, then pip install --force-reinstall kvdock-acme")
    assert [kind for kind, text in found.warnings if text.startswith(note)] == ["KVDockWarning"]


def joined(*folders: Path) -> str:
    """A path with these folders first, and this checkout's packages behind them."""
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])


@pytest.mark.slow
def test_all_that_importlib_finds_is_found_whatever_its_folder_is_called(wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = acme(wheels, tmp_path)
    site = environment.site_packages
    (site / "kvdock_acme-1.0.dist-info").rename(site / "Kvdock-Acme-1.0.dist-info")  # importlib takes it for "kvdock"
    found = report(environment)
    assert (found.states, found.notes) == ({"acme@kvdock-acme": "READY"}, [])
    assert {"cpu"} < {record.name for record in found.records if record.distribution == "kvdock"}


@pytest.mark.slow
def test_plugin_without_its_metadata_file_is_found_as_importlib_finds_it(wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = acme(wheels, tmp_path)
    (environment.site_packages / "kvdock_acme-1.0.dist-info" / "METADATA").unlink()
    found = report(environment)
    assert (found.states, found.of("acme").version) == ({"acme@kvdock_acme": "READY"}, "1.0")
    assert ["kvdock_acme-1.0.dist-info: its metadata cannot be read" in note for note in found.notes] == [True]


@pytest.mark.slow
def test_second_version_that_declares_something_else_is_told_and_not_loaded(wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = acme(wheels, tmp_path)
    newer = older_version(tmp_path / "first")
    (newer / "entry_points.txt").write_text("[kvdock.backends]\nacme2 = kvdock_acme\n", encoding="utf-8")
    found = report(environment, PYTHONPATH=joined(newer.parent))
    assert found.states == {"acme2@kvdock-acme": "READY"}
    assert ["kvdock-acme is installed twice; what this one declares (acme) is not loaded" in note for note in found.notes] == [True]


@pytest.mark.slow
def test_one_folder_twice_on_the_path_is_no_second_installation(wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = acme(wheels, tmp_path)
    (tmp_path / "link").symlink_to(environment.site_packages)
    found = report(environment, PYTHONPATH=joined(environment.site_packages, tmp_path / "link"))
    assert (found.states, found.notes) == ({"acme@kvdock-acme": "READY"}, [])


def doctor(environment: Environment, **environ: str) -> tuple[int, dict[str, Any], str]:
    done = environment.kvdock("doctor", "--json", environ=environ)
    answer = json.loads(done.stdout)
    return done.returncode, answer, done.stderr


@pytest.fixture
def own(tmp_path: Path, kvdock_wheel: Path) -> Environment:
    """A stranger's environment of our own, to spoil."""
    return Environment.stranger(tmp_path / "own", kvdock_wheel)


OP = """
import json, torch, kvdock
pool = torch.zeros(2, 4, 1, 8)
kvdock.ops.copy_blocks_(pool, torch.ones(2, 4, 1, 8), [(0, 1)])
print(json.dumps([record.name for record in kvdock.runtime.default().registry.records() if record.state.name == "READY"]))
"""


def test_kvdock_itself_behind_an_empty_folder_works_and_doctor_minds(own: Environment) -> None:
    (own.site_packages / "kvdock-0.0.9.dist-info").mkdir()
    assert "cpu" in own.json(OP)
    code, answer, _ = doctor(own)
    assert (code, answer["ok"], answer["versions"]["kvdock"]) == (1, False, "0.1.0")
    assert {plugin["name"] for plugin in answer["plugins"]} == {"cpu", "cuda", "rocm"}
    assert ["kvdock-0.0.9.dist-info: is left of another installation of kvdock" in text for text in answer["problems"]] == [True]
    (own.site_packages / "kvdock-0.0.9.dist-info").rmdir()
    code, answer, _ = doctor(own, KVDOCK_BACKENDS="cpu")
    assert (code, answer["ok"], answer["problems"]) == (0, True, [])


def test_kvdock_without_any_metadata_has_its_backends_all_the_same(own: Environment) -> None:
    shutil.rmtree(own.site_packages / "kvdock-0.1.0.dist-info")
    assert "cpu" in own.json(OP)
    (own.site_packages / "kvdock-0.0.9.dist-info").mkdir()  # now there is some, and it is wrong
    assert "cpu" in own.json("import warnings; warnings.simplefilter('ignore')\n" + OP)
    code, answer, _ = doctor(own)
    assert (code, {plugin["name"] for plugin in answer["plugins"]}) == (1, {"cpu", "cuda", "rocm"})
    assert answer["problems"] == [
        "the metadata of kvdock declares no plugins; found beside its code: cpu, cuda, rocm. Fix: pip install --force-reinstall kvdock"
    ]


@pytest.mark.slow
def test_application_in_a_zip_file_has_the_cpu_backend(own: Environment, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        for path in own.site_packages.rglob("*"):
            if path.is_file() and path.relative_to(own.site_packages).parts[0] in ("kvdock", "kvdock_cpu"):
                archive.write(path, path.relative_to(own.site_packages))
    for path in own.site_packages.glob("kvdock*"):
        shutil.rmtree(path)
    assert own.json(f"import sys; sys.path.insert(0, {str(tmp_path / 'app.zip')!r})\n" + OP) == ["cpu"]


@pytest.mark.slow
def test_checkout_on_the_path_has_the_cpu_backend(own: Environment) -> None:
    for path in own.site_packages.glob("kvdock*"):
        shutil.rmtree(path)
    folders = [str(ROOT / "core"), str(ROOT / "backends" / "cpu")]
    assert own.json(f"import sys; sys.path[:0] = {folders!r}\n" + OP) == ["cpu"]


@pytest.mark.parametrize(
    "environ", first_of([{"KVDOCK_DISABLE_AUTOLOAD": "1"}, {"KVDOCK_BACKENDS": "nobody"}, {"KVDOCK_BACKENDS_DENY": "cpu"}]), ids=str
)
def test_no_backend_at_all_is_never_fine(environments: Environments, environ: dict[str, str]) -> None:
    code, answer, _ = doctor(environments.with_projects("kvdock-rival"), **({"KVDOCK_BACKENDS": "cpu"} | environ))
    assert (code, answer["ok"]) == (1, False)
    assert answer["problems"][-1].startswith("no backend is READY, so every op fails")


@pytest.mark.slow
def test_allowed_name_that_is_not_installed_needs_attention(environments: Environments) -> None:
    code, answer, _ = doctor(environments.with_projects("kvdock-rival"), KVDOCK_BACKENDS="cpu,nobody")
    assert (code, answer["problems"][0].partition(".")[0]) == (1, "KVDOCK_BACKENDS names 'nobody', which is not installed")
