"""Transports by name: kvdock's own, and those of plugins through the same door as backends."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import kvdock
from kvdock.errors import ArgumentTypeError, ArgumentValueError, PluginError
from kvdock.plugin import hookimpl
from kvdock.plugins.registry import Registry
from kvdock.transfer import Transport, create_transport
from support_plugins import QUIET
from support_transfer import Loop


class Nameless(Loop):
    """A transport without a name."""

    name = None  # type: ignore[assignment]  # on purpose


def raising() -> Transport:
    """Raise what a plugin's class may raise."""
    raise OSError("no such device")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The process's registry for this test: of plugins that it registers."""
    made = Registry(QUIET)
    monkeypatch.setattr("kvdock.transfer.factory.process_runtime", lambda: kvdock.Runtime(made))
    return made


def brings(registry: Registry, name: str, **transports: Any) -> None:
    """Register a plugin that brings transports."""
    registry.register(SimpleNamespace(KVDOCK_API=(1, 0), kvdock_transports=hookimpl(lambda: transports)), name)


def test_a_plugins_transport_is_made_with_options(registry: Registry) -> None:
    brings(registry, "acme", loop=Loop)
    made = create_transport("loop", me="d")
    assert isinstance(made, Loop)
    assert made.me == "d"


def test_an_unknown_name_lists_what_there_is(registry: Registry) -> None:
    brings(registry, "acme", loop=Loop)
    with pytest.raises(ArgumentValueError, match=r"create_transport: name: expected one of loop, torch\.distributed, got 'nixl'"):
        create_transport("nixl")


def test_two_plugins_with_one_name(registry: Registry) -> None:
    brings(registry, "acme", loop=Loop)
    brings(registry, "other", loop=Loop)
    with pytest.raises(
        ArgumentValueError, match=r"expected one plugin that brings it, got 'loop' from acme, other\. Fix: deny all but one"
    ):
        create_transport("loop", me="d")


@pytest.mark.parametrize(
    ("factory", "options", "error", "text"),
    [
        (Transport, {}, PluginError, r"transport 'x': expected every method of Transport, got a class without \['close', 'connect', "),
        (Loop, {"you": "d"}, ArgumentTypeError, "create_transport: 'x': expected options that its class takes, got .*you"),
        (raising, {}, PluginError, "transport 'x': expected a Transport, got OSError: no such device. Fix: report it"),
        (dict, {}, PluginError, "transport 'x': expected a Transport with a name, got {}"),
        (Nameless, {"me": "d"}, PluginError, "transport 'x': expected a Transport with a name, got <"),
    ],
)
def test_a_class_that_is_no_transport(
    factory: Callable[..., Any], options: dict[str, str], error: type[Exception], text: str, registry: Registry
) -> None:
    brings(registry, "acme", x=factory)
    with pytest.raises(error, match=text):
        create_transport("x", **options)


def test_a_name_that_is_none() -> None:
    with pytest.raises(ArgumentTypeError, match="create_transport: name: expected a str, got 3"):
        create_transport(3)  # type: ignore[arg-type]  # on purpose
