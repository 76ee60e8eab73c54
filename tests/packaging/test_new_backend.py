"""`kvdock new-backend`: the project is written, installed as anybody's, and certified without a line edited."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvdock
from kvdock.cli.app import build
from support_projects import Environment, once, run

NAMES = {"acme": "npu", "a": "xpu", "quite_long_name_2_of_a_company": "a_rather_long_type_of_device_2"}
"""Backends by name, with the type of device: short and long ones, since a line's length changes with them."""


def generate(environment: Environment, name: str, device_type: str, folder: Path, *options: str) -> Path:
    """Write a project."""
    done = environment.kvdock("new-backend", name, "--device-type", device_type, "--dir", str(folder), *options)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def bare(shared: Path) -> Environment:
    """An environment with kvdock and no other plugin."""
    return Environment(Path(once(shared, "new-backend-bare", lambda folder: str(Environment.create(folder / "env").root))))


@pytest.fixture(scope="session")
def project(shared: Path, bare: Environment) -> Path:
    """The project ``acme``, written once for all workers and never edited."""
    return Path(once(shared, "new-backend-project", lambda folder: str(generate(bare, "acme", "npu", folder / "kvdock-acme"))))


@pytest.fixture(scope="session")
def installed(shared: Path, project: Path) -> Environment:
    """An environment with that project."""

    def make(folder: Path) -> str:
        made = Environment.create(folder / "env")
        made.install(project)
        return str(made.root)

    return Environment(Path(once(shared, "new-backend-installed", make)))


def test_what_is_written(project: Path) -> None:
    files = {path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file() and "build" not in path.parts}
    package = {"__init__", "backend", "paged_caching", "static_update", "gather_paged", "copy_blocks", "rows"}
    around = {"pyproject.toml", "README.md", ".gitignore", ".github/workflows/conformance.yml", "tests/test_conformance.py"}
    assert files == around | {f"src/kvdock_acme/{name}.py" for name in package} | {"src/kvdock_acme/py.typed"}
    for path in files:
        text = (project / path).read_text(encoding="utf-8")
        assert "newcomer" not in text.lower(), path
        assert "@" not in text.replace("@kvdock.hookimpl", "").replace("@v", ""), f"{path}: a word that was not replaced"
    written = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert written["entry-points"] == {"kvdock.backends": {"acme": "kvdock_acme"}}
    assert f"kvdock>={kvdock.__version__}" in written["dependencies"]
    assert "license" not in written
    assert "LICENSE" in (project / "README.md").read_text(encoding="utf-8"), "it says how to add one"


def test_it_is_found_and_in_nobodys_way(installed: Environment) -> None:
    rows = {row["name"]: row for row in json.loads(installed.kvdock("backends", "--json").stdout)["backends"]}
    assert (rows["acme"]["state"], rows["acme"]["device_type"], rows["acme"]["devices"]) == ("ready", "npu", ["cpu"])
    assert rows["acme"]["native"] == ["copy_blocks_", "gather_paged", "paged_caching_", "static_update_"]
    assert installed.kvdock("explain", "paged_caching_", "--device", "cpu", "--json").returncode == 0, "no tie with the CPU backend"


@pytest.mark.slow  # the whole of core level
def test_it_passes_core_level_at_once(installed: Environment, tmp_path: Path) -> None:
    done = installed.kvdock("conformance", "--backend", "acme", "--report", str(tmp_path / "report"), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    verdicts = {item["verdict"] for item in report["requirements"]}
    assert verdicts <= {"passed", "unsupported"}


@pytest.mark.slow  # the whole of core level
def test_its_own_tests_pass(installed: Environment, project: Path) -> None:
    done = inside(project, installed.python, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert " passed" in done
    assert "failed" not in done


def inside(folder: Path, *command: str) -> str:
    """Run a program in a folder; returns what it printed. It must end well."""
    code = f"import os, sys; os.chdir({str(folder)!r}); os.execv(sys.argv[1], sys.argv[1:])"
    return run([command[0], "-c", code, *command], check=True, timeout=300).stdout


def tool(bare: Environment, folder: Path, *arguments: str) -> str:
    """Run a tool that is installed beside this interpreter."""
    return inside(folder, bare.python, "-m", *arguments)


@pytest.mark.parametrize("name", NAMES)
def test_its_lint_is_clean_whatever_the_names(name: str, bare: Environment, tmp_path: Path) -> None:
    folder = generate(bare, name, NAMES[name], tmp_path / "project", "--license", "MIT OR Apache-2.0")
    tool(bare, folder, "ruff", "check", "--no-cache", ".")
    tool(bare, folder, "ruff", "format", "--no-cache", "--check", ".")
    written = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert written["license"] == "MIT OR Apache-2.0"


@pytest.mark.slow  # mypy reads all of torch
def test_its_types_are_clean(bare: Environment, project: Path, tmp_path: Path) -> None:
    assert "Success" in tool(bare, project, "mypy", "--cache-dir", str(tmp_path))


WRONG: Sequence[tuple[list[str], str]] = (
    (["Acme"], "name: expected the name of a backend: lower-case letters.*got 'Acme'. Fix: use acme"),
    (["acme-gpu"], "got 'acme-gpu'. Fix: use acme_gpu"),
    (["3d"], "got '3d'. Fix: use d"),
    (["--", "-"], "got '-'. Fix: use a word such as acme"),
    (["a" * 31], "at most 30 characters"),
    (["portable"], "another name than portable, which means kvdock's own kernels"),
    (["cpu"], "got 'cpu', taken by the plugin kvdock_cpu of kvdock .*Fix: use another name, or uninstall that one"),
    (["triton"], "taken: the package kvdock_triton can be imported here"),
    (["acme", "--device-type", "NPU"], "--device-type: expected torch's name .*got 'NPU'. Fix: use npu"),
    (["acme", "--device-type", "cpu"], "--device-type: expected the type of a device beside the host, got 'cpu'.*Fix: use the type"),
    (["acme", "--license", "my own!"], "--license: expected an SPDX expression, got 'my own!'. Fix: use an id from spdx.org"),
)


@pytest.mark.parametrize(("arguments", "text"), WRONG, ids=[" ".join(arguments)[:30] for arguments, _ in WRONG])
def test_a_name_that_cannot_be_used(arguments: list[str], text: str, tmp_path: Path) -> None:
    given = arguments if "--device-type" in arguments else ["--device-type", "npu", *arguments]
    done = CliRunner().invoke(build(["new-backend"]), ["new-backend", "--dir", str(tmp_path / "new"), *given])
    assert done.exit_code == 2, done.output
    assert re.search(text, done.output), done.output
    assert not (tmp_path / "new").exists(), "nothing is written"


def test_nothing_is_overwritten(bare: Environment, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = bare.kvdock("new-backend", "acme", "--device-type", "npu", "--dir", str(tmp_path), "--json")
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["type"] == "ArgumentValueError"
    assert "--dir: expected an empty folder" in error["text"]
    assert "notes.txt" in error["text"]
    assert "Fix: name another folder with --dir" in error["text"]
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    done = bare.kvdock("new-backend", "acme", "--device-type", "npu", "--dir", str(tmp_path / "notes.txt" / "below"))
    assert done.returncode == 2
    assert "--dir: expected a folder that can be made" in done.stderr


def test_what_it_prints(bare: Environment, tmp_path: Path) -> None:
    done = bare.kvdock("new-backend", "acme_gpu", "--device-type", "npu", "--dir", str(tmp_path / "new"), "--json")
    said = json.loads(done.stdout)
    assert (said["distribution"], said["package"], said["name"], said["device_type"]) == (
        "kvdock-acme-gpu",
        "kvdock_acme_gpu",
        "acme_gpu",
        "npu",
    )
    assert all((tmp_path / "new" / path).is_file() for path in said["files"])
    assert said["next"] == [f"pip install -e {tmp_path / 'new'}", "kvdock conformance --backend acme_gpu"]
    assert "class AcmeGpuBackend(kvdock.Backend)" in (tmp_path / "new" / "src" / "kvdock_acme_gpu" / "backend.py").read_text()


def test_a_second_project_of_an_installed_name_is_refused(installed: Environment, tmp_path: Path) -> None:
    done = installed.kvdock("new-backend", "acme", "--device-type", "npu", "--dir", str(tmp_path / "again"))
    assert done.returncode == 2
    assert "taken by the plugin kvdock_acme of kvdock-acme 0.1.0" in done.stderr
