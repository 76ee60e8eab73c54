"""The hooks that a plugin may implement. pluggy is touched at start-up only; kernels are returned as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pluggy

from kvdock.interface import Backend
from kvdock.ops.catalog import Op

__all__ = ["PROJECT", "hookimpl", "hookspec", "kvdock_backends", "kvdock_ops", "kvdock_prefix_caches", "kvdock_transports"]

PROJECT = "kvdock"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's functions: ``@kvdock.plugin.hookimpl``."""


@hookspec
def kvdock_backends() -> Sequence[Backend]:
    """Return the plugin's backends, one object each. Called once a process; must not touch a device."""
    raise NotImplementedError


@hookspec
def kvdock_ops() -> Sequence[Op]:
    """Return the plugin's own ops. Called once a process; must not touch a device."""
    raise NotImplementedError


@hookspec
def kvdock_prefix_caches() -> Mapping[str, Any]:
    """Return the plugin's prefix caches: classes by the name that `create_prefix_cache` takes."""
    raise NotImplementedError


@hookspec
def kvdock_transports() -> Mapping[str, Any]:
    """Return the plugin's transports: classes by the name that `kvdock.transfer.create_transport` takes."""
    raise NotImplementedError
