"""The plugins of kvdock's own distribution where its metadata does not declare them: a frozen application, a checkout on the path.

Core has no list of them. They are read from the project file, which lies beside the code: in a wheel as a copy in this package, in a
checkout at its root.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import tomllib
from collections.abc import Iterator
from typing import Any

__all__ = ["PROJECT_FILE", "built_in"]

PROJECT_FILE = "pyproject.toml"


def built_in(group: str, project: str) -> tuple[str, dict[str, str]]:
    """Return the project's version, and of its entry points in a group those whose modules are here: values by name."""
    for text in _texts():
        declared = _project(text)
        if declared.get("name") == project:
            points: dict[str, str] = declared.get("entry-points", {}).get(group, {})
            return declared["version"], {name: value for name, value in points.items() if importlib.util.find_spec(value)}
    return "", {}


def _texts() -> Iterator[str]:
    package = importlib.resources.files("kvdock")
    for place in (package / "plugins" / PROJECT_FILE, package / ".." / ".." / PROJECT_FILE):
        try:
            yield place.read_text(encoding="utf-8")
        except (OSError, KeyError, ValueError):  # a zip file has no such place, another project's file is in no encoding of ours
            continue


def _project(text: str) -> dict[str, Any]:
    try:
        table: dict[str, Any] = tomllib.loads(text).get("project", {})
    except tomllib.TOMLDecodeError:
        return {}
    return table
