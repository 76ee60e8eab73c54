"""Which versions are installed of kvdock and of what it can use."""

from __future__ import annotations

import importlib.metadata
import platform
import re

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
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements() -> list[str]:
    """Return the names of the distributions that kvdock's metadata names, in its order."""
    try:
        lines = importlib.metadata.requires("kvdock") or []
    except importlib.metadata.PackageNotFoundError:
        lines = ["torch", "pluggy"]
    names = [_LEADING_NAME.match(line) for line in lines if not re.search(r"extra\s*==\s*.dev\b", line)]
    return list(dict.fromkeys(match.group().lower() for match in names if match and match.group() != "kvdock"))
