"""Namespaces as JSON has them. Nothing is evaluated."""

from __future__ import annotations

from typing import Any

from kvdock.errors import ArgumentValueError, FileContentError
from kvdock.prefix.interface import Namespace

__all__ = ["check_depth", "from_json", "to_json"]

_MOST_DEEP = 32


def to_json(namespace: Namespace) -> list[Any]:
    """Return a namespace as a list: bytes become ``{"bytes": hex}``, tuples lists, all else stays."""
    return [to_json(part) if isinstance(part, tuple) else {"bytes": part.hex()} if isinstance(part, bytes) else part for part in namespace]


def check_depth(subject: str, namespace: Namespace, depth: int = 0) -> None:
    """Raise an ArgumentValueError for a namespace that `from_json` would refuse: nobody could load its file."""
    if depth > _MOST_DEEP:
        raise ArgumentValueError(subject, expected=f"tuples of at most {_MOST_DEEP} levels", got="more", fix="name it by a flat tuple")
    for part in namespace:
        if isinstance(part, tuple):
            check_depth(subject, part, depth + 1)


def from_json(path: object, value: Any, depth: int = 0) -> Namespace:
    """Return the namespace that became a list.

    Raises:
        FileContentError: none did.
    """
    if not isinstance(value, list) or depth > _MOST_DEEP:
        raise FileContentError(f"{path}: namespaces", expected="lists of at most 32 levels", got=repr(value)[:80], fix="save it anew")
    return tuple(_part(path, part, depth) for part in value)


def _part(path: object, part: Any, depth: int) -> Any:
    if part is None or isinstance(part, str | int):
        return part
    if isinstance(part, dict) and list(part) == ["bytes"]:
        try:
            return bytes.fromhex(part["bytes"])
        except (TypeError, ValueError) as error:
            raise FileContentError(f"{path}: namespaces", expected="hexadecimal bytes", got=repr(part)[:80], fix="save it anew") from error
    return from_json(path, part, depth + 1)
