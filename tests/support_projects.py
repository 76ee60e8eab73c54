"""Real distributions for tests: projects written by the test, built with hatchling and installed, all without network."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from support_isolated import dependencies
from support_sources import ROOT

_PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"

[project.entry-points."kvdock.backends"]
{entry_points}

[tool.hatch.build.targets.wheel]
only-include = {packages}
"""

_BUILD = """
import os, sys
from hatchling.build import build_wheel
wheels, *roots = sys.argv[1:]
for root in roots:
    os.chdir(root)
    build_wheel(wheels)
"""


@attrs.frozen
class Project:
    """A distribution to be: its entry points by name, and its files by path."""

    name: str
    version: str
    entry_points: Mapping[str, str]
    files: Mapping[str, str]

    def write(self, parent: Path) -> Path:
        """Write it below ``parent``; returns its folder."""
        root = parent / self.name
        for path, text in self.files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
        points = "\n".join(f'{json.dumps(name, ensure_ascii=False)} = "{value}"' for name, value in self.entry_points.items())
        packages = json.dumps(sorted({path.split("/")[0] for path in self.files}))
        text = _PYPROJECT.format(name=self.name, version=self.version, entry_points=points, packages=packages)
        (root / "pyproject.toml").write_text(text, encoding="utf-8")
        return root


def build(projects: Sequence[Project], folder: Path) -> dict[str, Path]:
    """Build wheels in one go; returns them by the project's name."""
    built = wheels_of([project.write(folder / "projects") for project in projects], folder / "wheels")
    wheels = {path.name.split("-")[0].replace("_", "-"): path for path in built}
    return {project.name: wheels[project.name] for project in projects}


def wheels_of(roots: Sequence[Path], folder: Path) -> list[Path]:
    """Build the wheels of projects' folders by what pip calls, in one process: pip starts three for each."""
    run([sys.executable, "-P", "-c", _BUILD, str(folder), *map(str, roots)], check=True)
    return sorted(folder.glob("*.whl"))


def _pip(*arguments: str) -> None:
    """Run this interpreter's pip; it must not look anywhere but at what it is given."""
    run([sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments], check=True)


def build_kvdock(folder: Path) -> str:
    """Build the wheel of this repository, with the build backend that is installed; returns its path."""
    _pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    (path,) = folder.glob("*.whl")
    return str(path)


def run(
    command: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    check: bool = False,
    timeout: float = 120,
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program with an environment free of kvdock's variables but for ``environ``. With ``check`` it must succeed."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KVDOCK_")} | dict(environ or {})
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=timeout, check=False, cwd=folder)
    if check and done.returncode != 0:
        raise AssertionError(f"{command} exited with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


@attrs.frozen
class Environment:
    """A scratch environment that sees all that is installed beside this interpreter, and what is installed into itself.

    Args:
        root: its folder.
        is_strangers: whether it was made by `stranger`: nothing of this repository's folder is on its path.
    """

    root: Path
    is_strangers: bool = False

    @classmethod
    def stranger(cls, root: Path, kvdock: Path) -> Environment:
        """Make one as a stranger has it: with kvdock's wheel, and with what that needs."""
        run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
        made = cls(root, is_strangers=True)
        (made.site_packages / "dependencies.pth").write_text(f"{dependencies(root / 'site')}\n", encoding="utf-8")
        made.install(kvdock)
        return made

    @classmethod
    def create(cls, root: Path) -> Environment:
        """Make an empty one."""
        run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
        made = cls(root)
        # A .pth inside a folder that is added this way works too, so that editable installs of the parent count.
        parent = sysconfig.get_path("purelib")
        (made.site_packages / "parent.pth").write_text(f"import site; site.addsitedir({parent!r})\n", encoding="utf-8")
        return made

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.root / "bin" / "python")

    @property
    def site_packages(self) -> Path:
        """Where it keeps packages."""
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.root)}))

    def install(self, *what: str | Path) -> None:
        """Install wheels, or with ``-e`` before it a project's folder."""
        options = ("--no-deps", "--no-index", "--no-build-isolation", "--no-compile")
        _pip("--python", self.python, "install", *options, *map(str, what))

    def kvdock(self, *arguments: str, environ: Mapping[str, str] | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run kvdock's command line."""
        return run([self.python, "-P", "-m", "kvdock.cli", *arguments], environ=self._environ(environ), timeout=timeout)

    def typed(self, line: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a line as a reader types it into a shell in ``folder``, with tools of this environment, and no network for pip."""
        words = shlex.split(line, comments=True)
        settings = dict(word.split("=", 1) for word in words if re.fullmatch(r"[A-Z_]+=\S+", word))
        command = self._program([word for word in words if "=" not in word or word.startswith("-")])
        return run(command, environ=self._environ(settings), timeout=1200, folder=folder)

    def _program(self, words: Sequence[str]) -> list[str]:
        """Return what a command is in an environment without pip, and without network."""
        name, *rest = words
        if name == "pip":
            options = ["--yes"] if rest[0] == "uninstall" else ["--no-deps", "--no-index", "--no-build-isolation"]
            return [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check", rest[0], *options, *rest[1:]]
        if name == "ruff":  # a program, which is found beside its own interpreter only
            return [sys.executable, "-m", name, *rest]
        modules = {"kvdock": ["-P", "-m", "kvdock.cli"], "pytest": ["-m", "pytest", "-p", "no:cacheprovider"], "python": ["-P"]}
        return [self.python, *modules.get(name, ["-m", name]), *rest]

    def _environ(self, environ: Mapping[str, str] | None) -> dict[str, str]:
        """Return the variables of a program: PYTHONPATH, which may lead to this repository, is none of a stranger's."""
        return {**({"PYTHONPATH": ""} if self.is_strangers else {}), **(environ or {})}

    def script(self, code: str, *arguments: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a script, which must end well."""
        path = self.root / f"script-{zlib.crc32(code.encode())}.py"
        path.write_text(code, encoding="utf-8")
        return run([self.python, "-P", str(path), *arguments], environ=self._environ(environ), check=True)

    def json(self, code: str, *arguments: str, environ: Mapping[str, str] | None = None) -> Any:
        """Run a script and read the last line of its output as JSON."""
        return json.loads(self.script(code, *arguments, environ=environ).stdout.splitlines()[-1])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep the other workers of pytest-xdist out."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def once(folder: Path, name: str, make: Callable[[Path], Any]) -> Any:
    """Make something below ``folder`` once for all workers; returns what ``make`` returned, through JSON."""
    with _locked(folder / f"{name}.lock"):
        result = folder / f"{name}.json"
        if not result.exists():
            (folder / name).mkdir()
            result.write_text(json.dumps(make(folder / name)), encoding="utf-8")
        return json.loads(result.read_text(encoding="utf-8"))
