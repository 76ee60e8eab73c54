"""Each backend's folder has the shape of a third party's project, so that it can move out by adding a pyproject."""

from __future__ import annotations

import ast
import importlib
import sys
import tomllib
from pathlib import Path

import pytest

import kvdock
from kvdock.ops.catalog import CATALOG
from support_sources import BACKENDS, CORE, ROOT, circle, modules_below

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = sorted(folder for folder in BACKENDS.iterdir() if folder.is_dir())
REGISTERED = [folder for folder in FOLDERS if not folder.name.startswith("_")]
DOOR = "kvdock.plugin"
"""The one module of kvdock that a plugin imports."""

PLUGINS = [
    *(folder for folder in FOLDERS),
    CORE / "kvdock_conformance" / "new_backend" / "template",
    *(ROOT / "examples" / name for name in ("acme_backend/src", "rope_op/src", "torch_devices")),
]
"""Where the sources of plugins lie: kvdock's own backends, what the scaffold writes, and the examples."""


def package_of(folder: Path) -> str:
    """Return the package in a folder."""
    return f"kvdock_{folder.name.removeprefix('_')}"


def files(folder: Path) -> set[str]:
    """Return the names of a package's files."""
    return {path.name for path in (folder / package_of(folder)).glob("*.py")}


def test_the_folders() -> None:
    assert {folder.name for folder in FOLDERS} >= {"cpu", "cuda", "rocm", "_triton"}
    assert {folder.name: package_of(folder) for folder in REGISTERED} == PYPROJECT["project"]["entry-points"]["kvdock.backends"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_holds_one_package_that_is_installed(folder: Path) -> None:
    assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == [package_of(folder)]
    relative = folder.relative_to(ROOT).as_posix()
    targets = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert f"{relative}/{package_of(folder)}" in targets["packages"]
    assert relative in targets["dev-mode-dirs"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_backend_imports_only_kvdock(folder: Path) -> None:
    own = package_of(folder)
    shared = {"kvdock_triton", "triton"} if folder.name in ("cuda", "rocm", "_triton") else set()
    allowed = {"torch", "attrs", "numpy", "kvdock", own} | shared | sys.stdlib_module_names  # what kvdock itself requires
    for module in modules_below(folder):
        for line, name in module.imports():
            assert name.split(".")[0] in allowed, f"{module.where}:{line} imports {name}"


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_a_plugin_takes_of_kvdock_what_is_behind_one_door(folder: Path) -> None:
    modules = list(modules_below(folder))
    names = [(module.where, line, name) for module in modules for line, name in module.imports() if name.split(".")[0] == "kvdock"]
    assert names
    for where, line, name in names:
        assert name.rpartition(".")[0] == DOOR, f"{where}:{line} imports {name}"
        assert name.rpartition(".")[2] in kvdock.plugin.__all__, f"{where}:{line}: {name}"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_no_module_of_a_backend_is_in_a_circle(folder: Path) -> None:
    assert not circle(modules_below(folder))


@pytest.mark.parametrize("folder", REGISTERED, ids=lambda folder: folder.name)
def test_the_entry_module_states_version_and_hook(folder: Path) -> None:
    entry = importlib.import_module(package_of(folder))
    assert entry.KVDOCK_API == kvdock.plugin.KVDOCK_API
    assert entry.__all__ == ["KVDOCK_API", "kvdock_backends"]
    backends = entry.kvdock_backends()
    assert [type(backend).__module__ for backend in backends] == [f"{package_of(folder)}.backend"]
    assert [backend.name for backend in backends] == [folder.name]


@pytest.mark.parametrize("folder", REGISTERED, ids=lambda folder: folder.name)
def test_the_same_file_names_in_every_folder(folder: Path) -> None:
    assert {"__init__.py", "backend.py"} <= files(folder)
    stems = {name.removesuffix("_") for name in CATALOG}
    kernels = {path.removesuffix(".py") for path in files(folder)} & stems
    (backend,) = importlib.import_module(package_of(folder)).kvdock_backends()
    if backend.probe().state is kvdock.plugin.ProbeState.READY or folder.name == "cpu":
        assert kernels == {name.removesuffix("_") for name in backend.kernels()}, "one file per op, under the op's name"


def test_siblings_have_the_same_files() -> None:
    assert files(BACKENDS / "cuda") - {"driver.py"} == files(BACKENDS / "rocm"), "one of the two can ask its driver for a version"
    portable = {path.name for path in (CORE / "kvdock" / "ops" / "portable").glob("*.py")}
    attention = {"key_tiles.py", "softmax.py"}
    assert files(BACKENDS / "cpu") - attention == portable | {"backend.py"}, "the shortest backend is readable after the portable kernels"


WHOLE = {"cpu": BACKENDS / "cpu" / "kvdock_cpu" / "backend.py", "triton": BACKENDS / "_triton" / "kvdock_triton" / "base.py"}
"""Where the classes that answer every question are; those of CUDA and ROCm add to the Triton one who they are."""


@pytest.mark.parametrize("name", WHOLE)
def test_a_backend_class_answers_every_question_in_one_file(name: str) -> None:
    tree = ast.parse(WHOLE[name].read_text(encoding="utf-8"))
    (backend,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    methods = [node.name for node in backend.body if isinstance(node, ast.FunctionDef)]
    assert {"probe", "claims", "devices", "kernels"} <= set(methods)
    order = ["probe", "claims", "devices", "kernels", "device_guard", "capabilities", "notes", "skipped_writes", "is_capturing"]
    order += ["side_stream", "pin", "capture"]
    assert [name for name in methods if name in order] == [name for name in order if name in methods], "in the contract's order"
    contract = ast.parse((CORE / "kvdock" / "interface.py").read_text(encoding="utf-8"))
    (abstract,) = (node for node in contract.body if isinstance(node, ast.ClassDef) and node.name == "Backend")
    assert [node.name for node in abstract.body if isinstance(node, ast.FunctionDef)] == order
