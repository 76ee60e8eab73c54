"""`kvdock new-backend`: the project is written, installed as anybody's, and certified without a line edited."""

from __future__ import annotations

import errno
import json
import re
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import kvdock
from kvdock.cli.app import build
from kvdock_conformance.cases.every_op import OPS
from kvdock_conformance.new_backend import NewBackend
from support_projects import Environment, once, run

NAMES = {"acme": "npu", "a": "xpu", "quite_long_name_2_of_a_company": "a_rather_long_type_of_device_2"}
"""Backends by name, with the type of device: short and long ones, since a line's length changes with them."""


def new_backend(*arguments: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(build(["new-backend"]), ["new-backend", *arguments])


def generate(name: str, device_type: str, folder: Path, *options: str) -> Path:
    """Write a project."""
    done = new_backend(name, "--device-type", device_type, "--dir", str(folder), *options)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="session")
def project(shared: Path) -> Path:
    """The project ``acme``, written once for all workers and never edited."""
    return Path(once(shared, "new-backend-project", lambda folder: str(generate("acme", "npu", folder / "kvdock-acme"))))


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
        assert "@" not in text.replace("@hookimpl", "").replace("@v", ""), f"{path}: a word that was not replaced"
    written = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert written["entry-points"] == {"kvdock.backends": {"acme": "kvdock_acme"}}
    assert "kvdock>=0.1.0,<0.2" in written["dependencies"], "the next minor version may drop what this one warns of"
    assert kvdock.__version__ == "0.1.0"
    assert "license" not in written
    assert "LICENSE" in (project / "README.md").read_text(encoding="utf-8"), "it says how to add one"


@pytest.mark.slow
def test_it_is_found_and_in_nobodys_way(installed: Environment) -> None:
    rows = {row["name"]: row for row in json.loads(installed.kvdock("backends", "--json").stdout)["backends"]}
    assert (rows["acme"]["state"], rows["acme"]["device_type"], rows["acme"]["devices"]) == ("ready", "npu", ["cpu"])
    assert rows["acme"]["native"] == ["copy_blocks_", "gather_paged", "paged_caching_", "static_update_"]
    assert installed.kvdock("explain", "paged_caching_", "--device", "cpu", "--json").returncode == 0, "no tie with the CPU backend"


UNCLAIMED = (
    "quantised caches",
    "lists one device",
    "no streams there",
    "set_sync_debug_mode",
    "does not claim graph_capture",
    "does not claim batch_invariant",
)
"""What a backend of torch operations on host memory does not claim: all else is checked on its own kernels."""


@pytest.mark.slow
def test_from_nothing_to_a_green_report_in_two_minutes(stranger: Callable[..., Environment], tmp_path: Path) -> None:
    """What a stranger does, with kvdock's wheel: no line is edited, and its own kernels are what is checked."""
    environment, start = stranger("road"), time.monotonic()
    for line in ("kvdock new-backend acme --device-type npu", "pip install -e kvdock-acme"):
        done = environment.typed(line, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    done = environment.typed("kvdock conformance --backend acme --report report", tmp_path)
    taken = time.monotonic() - start
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    assert (report["complete"], report["left_out"], report["about"]["class"]) == (True, [], "kvdock_acme.backend.AcmeBackend")
    assert [item["id"] for item in report["requirements"] if item["verdict"] not in ("passed", "unsupported")] == []
    unsupported = {
        item["id"]: item["reason"]
        for item in report["requirements"]
        if item["verdict"] == "unsupported" and (item["area"] in OPS or "it has no kernel for this op" not in item["reason"])
    }
    assert {name: reason for name, reason in unsupported.items() if not any(text in reason for text in UNCLAIMED)} == {}
    passed = Counter(item["area"] for item in report["requirements"] if item["verdict"] == "passed")
    assert all(passed[op] > 15 for op in OPS), passed
    assert taken < 120, "seconds"


def steps(project: Path) -> list[str]:
    """Return the commands of the CI file."""
    text = (project / ".github" / "workflows" / "conformance.yml").read_text(encoding="utf-8")
    return re.findall(r"^ +- run: (.+)$", text, re.MULTILINE)


@pytest.mark.slow  # mypy reads all of torch; core level, and extended level
def test_the_steps_of_its_ci_file(stranger: Callable[..., Environment], tmp_path: Path) -> None:
    environment, project = stranger("road-ci"), generate("acme", "npu", tmp_path / "project")
    ran = [line for line in steps(project) if "--index-url" not in line]  # torch is there
    assert [line.split()[0] for line in ran] == ["pip", "ruff", "ruff", "mypy", "pytest", "kvdock"]
    for line in ran:
        done = environment.typed(line, project)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert json.loads((project / "report" / "report.json").read_text(encoding="utf-8"))["level"] == "extended"


@pytest.mark.slow  # core level
def test_its_wheel_is_all_that_a_user_installs(stranger: Callable[..., Environment], tmp_path: Path) -> None:
    project = generate("acme", "npu", tmp_path / "project")
    done = stranger("road").typed(f"pip wheel --wheel-dir {tmp_path} .", project)
    assert done.returncode == 0, done.stderr
    user = stranger("road-wheel", *tmp_path.glob("*.whl"))
    done = user.kvdock("conformance", "--backend", "acme", "--op", "gather_paged", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["about"]["versions"]["kvdock"] == kvdock.__version__


@pytest.mark.parametrize("name", NAMES)
def test_its_lint_is_clean_whatever_the_names(name: str, tmp_path: Path) -> None:
    folder = generate(name, NAMES[name], tmp_path / "project", "--license", "MIT OR Apache-2.0")
    for arguments in (["check"], ["format", "--check"]):
        run([sys.executable, "-m", "ruff", *arguments, "--no-cache", "."], check=True, folder=folder)
    written = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert written["license"] == "MIT OR Apache-2.0"


WRONG: Sequence[tuple[list[str], str]] = (
    (["Acme"], "name: expected the name of a backend: lower-case letters.*got 'Acme'. Fix: use acme"),
    (["acme-gpu"], "got 'acme-gpu'. Fix: use acme_gpu"),
    (["3d"], "got '3d'. Fix: use d"),
    (["--", "-"], "got '-'. Fix: use a word such as acme"),
    (["a" * 31], "at most 30 characters"),
    (["portable"], "another name than portable, which means kvdock's own kernels"),
    (["cpu"], "got 'cpu', taken by the plugin kvdock_cpu of kvdock .*Fix: use another name, or uninstall that one"),
    (["my-chip"], "got 'my-chip'. Fix: use my_chip"),
    (["triton"], "taken: the package kvdock_triton can be imported here"),
    (["acme", "--device-type", "NPU"], "--device-type: expected torch's name .*got 'NPU'. Fix: use npu"),
    (["acme", "--device-type", "npu:0"], "got 'npu:0'. Fix: use npu"),
    (["acme", "--device-type", "cpu"], "--device-type: expected the type of a device beside the host, got 'cpu'.*Fix: use the type"),
    (["acme", "--license", "my own!"], "--license: expected an SPDX expression, got 'my own!'. Fix: use an id from spdx.org"),
)


@pytest.mark.parametrize(("arguments", "text"), WRONG, ids=[" ".join(arguments)[:30] for arguments, _ in WRONG])
def test_a_name_that_cannot_be_used(arguments: list[str], text: str, tmp_path: Path) -> None:
    given = arguments if "--device-type" in arguments else ["--device-type", "npu", *arguments]
    done = new_backend("--dir", str(tmp_path / "new"), *given)
    assert done.exit_code == 2, done.output
    assert re.search(text, done.output), done.output
    assert not (tmp_path / "new").exists(), "nothing is written"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = new_backend("acme", "--device-type", "npu", "--dir", str(tmp_path), "--json")
    assert done.exit_code == 2
    error = json.loads(done.stdout)["error"]
    assert error["type"] == "ArgumentValueError"
    assert "--dir: expected an empty folder" in error["text"]
    assert "notes.txt" in error["text"]
    assert "Fix: name another folder with --dir" in error["text"]
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    done = new_backend("acme", "--device-type", "npu", "--dir", str(tmp_path / "notes.txt" / "below"))
    assert done.exit_code == 2
    assert "--dir: expected a folder that can be made and written to" in done.output


class FullError(OSError):
    """No space is left."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [FullError, KeyboardInterrupt])
@pytest.mark.parametrize("there", [True, False], ids=["empty", "not there"])
def test_what_cannot_be_finished_leaves_nothing(
    error: type[BaseException], there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "below" / "project"
    if there:
        folder.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    write = Path.write_text

    def full(path: Path, text: str, **settings: str) -> int:
        if path.name == "rows.py":
            raise error
        return write(path, text, **settings)

    monkeypatch.setattr(Path, "write_text", full)
    expected = kvdock.ArgumentValueError if error is FullError else error
    with pytest.raises(expected) as caught:
        NewBackend("acme", "npu").write(folder)
    assert sorted(tmp_path.rglob("*")) == before
    if error is FullError:
        assert "No space left on device). Fix: name another folder with --dir; nothing was left behind" in str(caught.value)


def test_a_link_that_leads_nowhere_stays(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(kvdock.ArgumentValueError, match=r"a folder that can be made and written to, got .*File exists"):
        NewBackend("acme", "npu").write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("name", ["newcomer", "kvdock_newcomer", "class", "x"])
@pytest.mark.parametrize("device_type", ["newcomer", "newcomer_device_2", "kvdock_type"])
def test_names_that_hold_words_of_the_template(name: str, device_type: str) -> None:
    files = NewBackend(name, device_type).files()
    backend = files[f"src/kvdock_{name}/backend.py"]
    assert f'\n    name = "{name}"\n    device_type = "{device_type}"\n' in backend
    written = tomllib.loads(files["pyproject.toml"])["project"]
    assert written["description"] == f"kvdock's backend for {device_type} devices"
    assert written["entry-points"]["kvdock.backends"] == {name: f"kvdock_{name}"}


def test_a_backend_for_a_type_that_another_serves(tmp_path: Path) -> None:
    """It is written, and what it will meet where both claim a device is said."""
    done = new_backend("acme", "--device-type", "cuda", "--dir", str(tmp_path / "text"))
    assert done.exit_code == 0, done.output
    assert "Note: cuda serves cuda devices too." in done.output
    assert "KVDOCK_BACKEND_CUDA=acme" in done.output
    for device_type, notes in (("cuda", 1), ("npu", 0)):
        done = new_backend("acme", "--device-type", device_type, "--dir", str(tmp_path / device_type), "--json")
        assert len(json.loads(done.stdout)["notes"]) == notes


def test_what_it_prints(tmp_path: Path) -> None:
    said = json.loads(new_backend("acme_gpu", "--device-type", "npu", "--dir", str(tmp_path / "new"), "--json").stdout)
    names = {"name": "acme_gpu", "device_type": "npu", "distribution": "kvdock-acme-gpu", "package": "kvdock_acme_gpu"}
    assert {key: said[key] for key in names} == names
    assert all((tmp_path / "new" / path).is_file() for path in said["files"])
    assert said["next"] == [f"pip install -e {tmp_path / 'new'}", "kvdock conformance --backend acme_gpu"]
    assert "class AcmeGpuBackend(Backend)" in (tmp_path / "new" / "src" / "kvdock_acme_gpu" / "backend.py").read_text()


@pytest.mark.slow
def test_a_second_project_of_an_installed_name_is_refused(installed: Environment, tmp_path: Path) -> None:
    done = installed.kvdock("new-backend", "acme", "--device-type", "npu", "--dir", str(tmp_path / "again"))
    assert done.returncode == 2
    assert "taken by the plugin kvdock_acme of kvdock-acme 0.1.0" in done.stderr
