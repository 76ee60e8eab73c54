"""The errors: a tree that is drawn in the docstring, and texts made of parts."""

from __future__ import annotations

import builtins
import inspect
import re

import pytest

import kvdock
from kvdock import errors

LINE = re.compile(r"^    (?P<indent>[│├└─ ]*)(?P<name>[A-Z]\w+)(?: +\((?P<builtin>\w+)\))?")


def drawn() -> dict[str, tuple[str | None, str | None]]:
    """Read the tree in the docstring: the parent of each error, and the built-in it derives from."""
    assert errors.__doc__ is not None
    found: dict[str, tuple[str | None, str | None]] = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        match = LINE.match(line)
        if match is None or not (match["indent"] or match["name"] == "KVDockError"):
            continue
        depth = len(match["indent"]) // 4
        path[depth:] = [match["name"]]
        found[match["name"]] = (path[depth - 1] if depth else None, match["builtin"])
    return found


ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.KVDockError) and kind.__module__ == errors.__name__
}


def test_every_error_is_drawn() -> None:
    assert set(drawn()) == set(ERRORS)
    assert len(ERRORS) >= 14


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_derives_from_what_is_drawn(name: str) -> None:
    parent, builtin = drawn()[name]
    bases = {base.__name__ for base in ERRORS[name].__bases__}
    assert bases == {parent or "Exception", *([builtin] if builtin else [])}
    if name not in ("KVDockError",):
        inherited = [
            base for base in ERRORS[name].__mro__ if base in vars(builtins).values() and base not in (Exception, BaseException, object)
        ]
        assert inherited, "every error but the root is also a built-in one"


def test_every_error_is_public_and_at_the_top() -> None:
    assert set(ERRORS) | {"KVDockWarning"} == set(errors.__all__)
    for_plugins = {"PluginError", "DiscoveryReentryError"}  # an engine catches both as BackendError
    assert set(errors.__all__) - set(kvdock.__all__) == for_plugins


def test_the_warning_is_one() -> None:
    assert issubclass(kvdock.KVDockWarning, UserWarning)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, "op: k"),
        ({"expected": "a tensor"}, "op: k: expected a tensor"),
        ({"got": 3}, "op: k: got 3"),
        ({"expected": "4", "got": 3}, "op: k: expected 4, got 3"),
        ({"fix": "try harder"}, "op: k. Fix: try harder"),
        ({"expected": "4", "got": 3, "fix": "add 1"}, "op: k: expected 4, got 3. Fix: add 1"),
        ({"expected": 0, "got": 0}, "op: k: expected 0, got 0"),
        ({"got": False}, "op: k: got False"),
    ],
)
@pytest.mark.parametrize("kind", ERRORS.values(), ids=ERRORS)
def test_the_text_is_made_of_parts_that_are_attributes_too(kind: type[kvdock.KVDockError], parts: dict[str, object], text: str) -> None:
    error = kind("op: k", **parts)  # type: ignore[arg-type]
    assert str(error) == text
    assert error.subject == "op: k"
    assert (error.expected, error.got, error.fix) == tuple(parts.get(part) for part in ("expected", "got", "fix"))


@pytest.mark.parametrize("kind", ERRORS.values(), ids=ERRORS)
def test_an_error_is_caught_as_its_builtin_and_survives_pickling(kind: type[kvdock.KVDockError]) -> None:
    import copy
    import pickle

    for error in (kind("op: k", expected="4", got=3, fix="add 1"), kind()):
        for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301 - our own bytes
            assert type(twin) is kind
            assert str(twin) == str(error)
            assert (twin.subject, twin.expected, twin.got, twin.fix) == (error.subject, error.expected, error.got, error.fix)
