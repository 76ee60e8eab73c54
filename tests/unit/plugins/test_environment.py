"""An environment that no longer says what plugins were loaded with is reported once. Child processes: `tests/packaging`."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

from kvdock.errors import ArgumentValueError, KVDockWarning
from kvdock.plugins.environment import MARKER
from kvdock.plugins.registry import Registry
from support_plugins import QUIET, InProcessBackend, plugin

META = torch.device("meta")


def test_change_after_loading_is_reported_once_and_changes_nothing() -> None:
    environ = dict(QUIET)
    registry = Registry(environ)
    registry.register(plugin(InProcessBackend("acme")), "acme")
    environ["KVDOCK_BACKEND_META"] = "other"
    with pytest.warns(KVDockWarning) as caught:
        assert registry.choose("copy_blocks_", META).backend.name == "acme"
    assert [str(item.message) for item in caught] == [
        "plugins were loaded with [allow all; deny none; autoload off]; [allow all; deny none; autoload off; meta: other] came too "
        "late and changes nothing in this process. Fix: set KVDOCK_* variables before the first process uses kvdock"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.records()
        registry.choose("gather_paged", META)


def test_change_to_something_unreadable_is_a_warning_after_loading_and_an_error_before() -> None:
    environ = dict(QUIET)
    registry = Registry(environ)
    registry.records()
    environ["KVDOCK_BACKENDS"] = "@"
    with pytest.warns(KVDockWarning, match="plugins are loaded already, and keep what they were loaded with: KVDOCK_BACKENDS: expected"):
        registry.records()
    with pytest.raises(ArgumentValueError, match="KVDOCK_BACKENDS: expected plugin names"):
        Registry(environ).records()


def test_failed_first_question_is_not_remembered() -> None:
    environ = {**QUIET, "KVDOCK_BACKENDS": "@"}
    registry = Registry(environ)
    with pytest.raises(ArgumentValueError):
        registry.records()
    del environ["KVDOCK_BACKENDS"]
    assert all(record.state.name == "BLOCKED" for record in registry.records())


def test_only_the_processs_own_environment_is_left_to_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MARKER, raising=False)
    Registry(dict(QUIET)).records()
    assert MARKER not in os.environ
    monkeypatch.setenv("KVDOCK_DISABLE_AUTOLOAD", "1")
    Registry().records()
    assert os.environ.pop(MARKER) == "allow all; deny none; autoload off"
