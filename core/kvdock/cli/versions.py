"""Which versions are installed of kvdock and of what it can use."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
from collections.abc import Iterator

from kvdock.interface import KVDOCK_API

__all__ = ["versions"]

_LEADING_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def versions() -> dict[str, str]:
    """Return versions by name: kvdock, its API, Python, then every requirement in kvdock's metadata that is installed.

    The requirements of its extras count too, except those that only its developers need.
    """
    found = {"kvdock": _version("kvdock") or "not installed", "api": ".".join(map(str, KVDOCK_API)), "python": platform.python_version()}
    for name in _requirements():
        version = _version(name)
        if version is not None:
            found[name] = version
    return found


def _version(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    return next((metadata["Version"] for metadata in _metadata(name)), None)


def _metadata(name: str) -> Iterator[importlib.metadata.PackageMetadata]:
    """Yield the metadata of each installation of a name, but for what an interrupted uninstall left."""
    for distribution in importlib.metadata.distributions(name=name):
        with contextlib.suppress(Exception):  # each release of Python raises something else for metadata that is not there
            if "Version" in distribution.metadata:
                yield distribution.metadata


def _requirements() -> list[str]:
    """Return the names of the distributions that kvdock's metadata names, in its order."""
    lines = next((metadata.get_all("Requires-Dist", []) for metadata in _metadata("kvdock")), ["torch", "pluggy"])
    names = [_LEADING_NAME.match(line) for line in lines if not re.search(r"extra\s*==\s*.dev\b", line)]
    return list(dict.fromkeys(match.group().lower() for match in names if match and match.group() != "kvdock"))
