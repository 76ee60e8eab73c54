"""The wheel: what is in it, what it says of itself, and that it works where nothing of this repository is on the path."""

from __future__ import annotations

import email
import email.message
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from support_projects import Environment, run
from support_sources import ROOT

PACKAGES = {
    "kvdock": "core",
    "kvdock_conformance": "core",
    "kvdock_cpu": "backends/cpu",
    "kvdock_cuda": "backends/cuda",
    "kvdock_rocm": "backends/rocm",
    "kvdock_triton": "backends/_triton",
}
"""Where each package of the distribution is."""


@attrs.frozen
class Wheel:
    """A wheel, opened."""

    path: Path

    def names(self) -> list[str]:
        """Return its files."""
        with zipfile.ZipFile(self.path) as archive:
            return archive.namelist()

    def read(self, name: str) -> str:
        """Return the text of one of its files."""
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(name).decode()

    @property
    def info(self) -> str:
        """The folder with its metadata."""
        (folder,) = {name.partition("/")[0] for name in self.names() if name.partition("/")[0].endswith(".dist-info")}
        return folder

    @property
    def metadata(self) -> email.message.Message:
        """What it says of itself."""
        return email.message_from_string(self.read(f"{self.info}/METADATA"))

    def requirements(self, extra: str = "") -> dict[str, Requirement]:
        """Return what it needs by name, with or without an extra."""
        every = map(Requirement, self.metadata.get_all("Requires-Dist") or [])
        chosen = [one for one in every if (one.marker is None and not extra) or (one.marker and one.marker.evaluate({"extra": extra}))]
        return {one.name: one for one in chosen if extra == "" or "extra" in str(one.marker)}


@pytest.fixture(scope="session")
def wheel(kvdock_wheel: Path) -> Wheel:
    """The wheel of this repository, built once for all workers."""
    return Wheel(kvdock_wheel)


def sources() -> set[str]:
    """Return every file of every package, as a wheel names it."""
    files = (path for package, parent in PACKAGES.items() for path in (ROOT / parent / package).rglob("*"))
    kept = [path for path in files if path.is_file() and "__pycache__" not in path.parts]
    parents = set(PACKAGES.values())
    return {path.relative_to(ROOT / parent).as_posix() for path in kept for parent in parents if path.is_relative_to(ROOT / parent)}


def test_it_holds_every_package_and_nothing_else(wheel: Wheel) -> None:
    inside = {name for name in wheel.names() if not name.startswith(wheel.info)}
    assert inside == sources() | {"kvdock/plugins/pyproject.toml"}, "what declares kvdock's own plugins, for lack of metadata"
    assert {name.partition("/")[0] for name in inside} == set(PACKAGES)
    assert not [name for name in wheel.names() if re.search(r"(^|/)(tests?|conftest)[/_.]|\.(pyc|ipynb|orig)$", name.lower())]
    assert wheel.path.name.endswith("-py3-none-any.whl"), "pure Python: one wheel for every machine"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_says_that_it_is_typed(package: str, wheel: Wheel) -> None:
    assert f"{package}/py.typed" in wheel.names()


def test_what_it_says_of_itself(wheel: Wheel) -> None:
    said = wheel.metadata
    assert said["Name"] == "kvdock"
    assert said["License-Expression"] == "Apache-2.0"
    assert "Apache License" in wheel.read(f"{wheel.info}/licenses/LICENSE")
    assert said.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8"), "the long description is the README"
    import kvdock

    assert said["Version"] == kvdock.__version__


def test_which_python_it_runs_on(wheel: Wheel) -> None:
    versions = SpecifierSet(wheel.metadata["Requires-Python"])
    assert [v for v in ("3.10", "3.10.14", "3.11", "3.11.0", "3.12", "3.13", "3.14") if v in versions] == [
        "3.11",
        "3.11.0",
        "3.12",
        "3.13",
        "3.14",
    ]


RANGES = {
    "torch": (("2.11.0", "2.11.1", "2.13.0", "2.13.0+cpu", "2.20.0"), ("2.10.0", "2.9.1", "1.13.1")),
    "pluggy": (("1.6.0", "1.7.0", "1.99"), ("1.5.0", "2.0.0", "2.1")),
    "attrs": (("23.2.0", "26.1.0"), ("21.4.0",)),
    "numpy": (("1.26.0", "2.3.0"), ("1.20.0",)),
}
"""What it needs at run time: versions that are fine, and versions that are not."""


def test_what_it_needs_and_nothing_more(wheel: Wheel) -> None:
    needed = wheel.requirements()
    assert set(needed) == set(RANGES)
    for name, (fine, wrong) in RANGES.items():
        for version in fine:
            assert version in needed[name].specifier, f"{name} {version}"
        for version in wrong:
            assert version not in needed[name].specifier, f"{name} {version}"


def test_the_extras(wheel: Wheel) -> None:
    assert set(wheel.metadata.get_all("Provides-Extra") or []) >= {"triton", "transformers", "cli", "dev"}
    assert set(wheel.requirements("triton")) == {"triton"}
    assert set(wheel.requirements("cli")) == {"typer", "rich"}
    (transformers,) = wheel.requirements("transformers").values()
    assert transformers.name == "transformers"
    assert ["5.14.0" in transformers.specifier, "5.24.0" in transformers.specifier, "5.13.9" in transformers.specifier] == [
        True,
        True,
        False,
    ]
    assert {"pytest", "pytest-xdist", "hypothesis", "mypy", "ruff", "hatchling"} <= set(wheel.requirements("dev"))


def test_the_entry_points(wheel: Wheel) -> None:
    import configparser

    points = configparser.ConfigParser()
    points.optionxform = str  # type: ignore[method-assign,assignment]  # names are case-sensitive
    points.read_string(wheel.read(f"{wheel.info}/entry_points.txt"))
    assert {group: dict(points[group]) for group in points.sections()} == {
        "console_scripts": {"kvdock": "kvdock.cli:main"},
        "kvdock.backends": {"cpu": "kvdock_cpu", "cuda": "kvdock_cuda", "rocm": "kvdock_rocm"},
    }


@pytest.fixture(scope="session")
def installed(stranger: Callable[..., Environment]) -> Environment:
    """The environment with the wheel, made once for all workers."""
    return stranger("wheel-installed")


USE = """
import json
import kvdock
import kvdock_cpu
import torch

spec = kvdock.KVSpec.uniform(num_layers=2, num_kv_heads=2, head_dim=8, max_positions=64, dtype=torch.bfloat16)
cache = kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(num_blocks=4), kvdock.RankInfo("cpu"))
k, v, slots = torch.randn(3, 2, 8).bfloat16(), torch.randn(3, 2, 8).bfloat16(), torch.tensor([5, 17, 63])
cache.update(1, k, v, slots)
got = cache.gather(1, slots)
rows = kvdock.create_cache(spec, kvdock.StaticKVCacheConfig(), kvdock.RankInfo("cpu"))
row = rows.update(0, k[None].transpose(1, 2), v[None].transpose(1, 2), 0)
dispatcher = kvdock.runtime.default().dispatcher
arguments = (cache.k_cache(0), cache.v_cache(0), k, v, slots, None, None)
print(json.dumps({
    "files": [kvdock.__file__, kvdock_cpu.__file__],
    "same": [torch.equal(got[0], k), torch.equal(got[1], v), torch.equal(row[0][0].transpose(0, 1), k)],
    "served by": dispatcher.explain("paged_caching_", arguments).served_by,
}))
"""


@pytest.mark.slow  # in make test, the examples run from it
def test_it_works_where_it_is_installed(installed: Environment) -> None:
    answers = installed.json(USE)
    assert all(Path(file).is_relative_to(installed.site_packages) for file in answers["files"]), answers["files"]
    assert answers["same"] == [True, True, True]
    assert answers["served by"] == "cpu", "its own backend was found by its entry point"


@pytest.mark.slow  # in make test, those of the examples run in such an environment
def test_its_command_runs(installed: Environment) -> None:
    done = run([str(installed.root / "bin" / "kvdock"), "backends", "--json"], environ={"PYTHONPATH": ""}, check=True)
    states = {backend["name"]: backend["state"] for backend in json.loads(done.stdout)["backends"]}
    assert set(states) == {"cpu", "cuda", "rocm"}
    assert states["cpu"] == "ready"


@pytest.mark.slow  # builds a second time, from the source archive
def test_the_source_archive_builds_the_same_wheel(wheel: Wheel, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)], cwd=ROOT, check=True, capture_output=True
    )
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / path.name.removesuffix(".tar.gz")
    for name in ("LICENSE", "README.md", "pyproject.toml", "constraints.txt", "Makefile", "tests/packaging/test_wheel.py"):
        assert (root / name).is_file(), f"{name} is missing: `make test` must work from the archive"
    (tmp_path / "wheels").mkdir()
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--disable-pip-version-check")
    run([sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(tmp_path / "wheels"), str(root)], check=True)
    (again,) = (tmp_path / "wheels").glob("*.whl")
    assert set(Wheel(again).names()) == set(wheel.names())
