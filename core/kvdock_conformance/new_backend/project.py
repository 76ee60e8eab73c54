"""The project that is written: the template beside this module, with its names replaced."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from types import MappingProxyType

import attrs

import kvdock
from kvdock.errors import ArgumentValueError
from kvdock_conformance.new_backend.names import check_device_type, check_license, check_name

__all__ = ["NewBackend"]

_PLACES: Mapping[str, str] = MappingProxyType(
    {
        "pyproject.toml.in": "pyproject.toml",
        "README.md.in": "README.md",
        "gitignore.in": ".gitignore",
        "conformance.yml.in": ".github/workflows/conformance.yml",
        "conformance_file.py.in": "tests/test_conformance.py",
    }
)
"""Where each file around the package goes. Their names here hide them from tools that would take them for this repository's."""


@attrs.frozen
class NewBackend:
    """A project to be.

    Args:
        name: name of the backend, and of its entry point: ``"acme"``. Package and distribution are named after it.
        device_type: torch's name for the type of device that it claims.
        license: SPDX expression for the project's metadata; None for none yet.
    """

    name: str
    device_type: str
    license: str | None = None

    @property
    def distribution(self) -> str:
        """Name of the distribution: ``"kvdock-acme"``."""
        return f"kvdock-{self.name.replace('_', '-')}"

    @property
    def package(self) -> str:
        """Name of the package: ``"kvdock_acme"``."""
        return f"kvdock_{self.name}"

    def files(self) -> dict[str, str]:
        """Return the text of each file by its path in the project.

        Raises:
            ArgumentValueError: a name that cannot be used; see `kvdock_conformance.new_backend.names`.
        """
        check_name(self.name)
        check_device_type(self.device_type)
        if self.license is not None:
            check_license(self.license)
        return {path: self._named(text) for path, text in sorted(self._template())}

    def write(self, folder: Path) -> list[Path]:
        """Write the project into a folder, which is made, and return its files. Nothing that is there is overwritten.

        Args:
            folder: where to; it must be empty, or not be there.

        Raises:
            ArgumentValueError: something is there already, the folder cannot be made or written to, or a name cannot be used.
                Whatever is raised, nothing is left behind.
        """
        files = self.files()
        with _all_or_nothing(folder):
            for path, text in files.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text, encoding="utf-8")
        return [folder / path for path in files]

    def _template(self) -> Iterator[tuple[str, str]]:
        template = resources.files(__package__) / "template"
        for item in (template / "package").iterdir():
            if item.is_file():
                yield f"src/{self.package}/{item.name}", item.read_text(encoding="utf-8")
        for name, place in _PLACES.items():
            yield place, (template / "project" / name).read_text(encoding="utf-8")

    def _named(self, text: str) -> str:
        """Put the project's names in place of the template's: all in one go, since a name may hold a word of the template's.

        Longer words are tried first, since they hold shorter ones.
        """
        words = self._words()
        return re.sub("|".join(map(re.escape, words)), lambda match: words[match[0]], text)

    def _words(self) -> dict[str, str]:
        add_license = 'Add a file `LICENSE`, and `license = "<SPDX id>"` below `[project]` in `pyproject.toml`.'
        return {
            "kvdock-newcomer": self.distribution,
            "newcomer_device": self.device_type,
            "Newcomer": "".join(part.capitalize() for part in self.name.split("_")),
            "newcomer": self.name,
            "@KVDOCK_VERSION@": kvdock.__version__,
            "@KVDOCK_NEXT@": _next_minor(kvdock.__version__),
            "@LICENSE_LINE@": f'license = "{self.license}"\n' if self.license else "",
            "@LICENSE_TEXT@": f"{self.license}. Add its text as a file `LICENSE`." if self.license else add_license,
        }


def _next_minor(version: str) -> str:
    """Return the next minor version, which may drop what this one has warned of."""
    major, minor = version.split(".")[:2]
    return f"{major}.{int(minor) + 1}"


@contextmanager
def _all_or_nothing(folder: Path) -> Iterator[None]:
    """Make a folder, which may be there if it is empty, for what the block writes into it; as it was before if the block fails."""
    there = _check_empty(folder)
    made = [folder, *(parent for parent in folder.parents if not parent.exists())][-1]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        for path in list(folder.iterdir()) if there else [made]:
            if path.is_file():
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)  # what is no folder, such as a link that leads nowhere, stays
        if isinstance(error, OSError):
            raise _unwritable(folder, error) from error
        raise


def _check_empty(folder: Path) -> bool:
    """Refuse a folder that holds something, or cannot be made; returns whether it is there."""
    try:
        there = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _unwritable(folder, error) from error
    if there:
        raise ArgumentValueError(
            "--dir",
            expected="an empty folder, or one that is not there yet: nothing is overwritten",
            got=f"{folder} with {', '.join(there[:3])}{' and more' if len(there) > 3 else ''}",
            fix="name another folder with --dir, or move what is there",
        )
    return True


def _unwritable(folder: Path, error: OSError) -> ArgumentValueError:
    return ArgumentValueError(
        "--dir",
        expected="a folder that can be made and written to",
        got=f"{folder} ({error.strerror})",
        fix="name another folder with --dir; nothing was left behind",
    )
