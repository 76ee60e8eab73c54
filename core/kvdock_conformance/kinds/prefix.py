"""Prefix caches."""

from __future__ import annotations

import inspect
import platform
from typing import Any

import torch

import kvdock
from kvdock.errors import ArgumentValueError, BackendUnavailableError, KVDockError, PluginError
from kvdock.prefix import PrefixCache
from kvdock_conformance.checking.prefix_target import PrefixTarget
from kvdock_conformance.kinds import UNKNOWN_DEVICE, hardware

__all__ = ["open_target"]


def open_target(name: str, setup: str | None, device: str | None) -> tuple[PrefixTarget, dict[str, Any]]:
    """Make a prefix cache by name, and say what it is.

    Raises:
        BackendUnavailableError: nobody brings it, several do, or it cannot be made; or a device is asked for.
    """
    if device is not None:
        raise BackendUnavailableError("none, since a prefix cache runs on no device", got=UNKNOWN_DEVICE)
    try:
        target = PrefixTarget(name, setup)
        _check_signatures(target.kind)
    except ArgumentValueError as error:
        raise BackendUnavailableError(str(error), got="unknown" if "one of" in str(error.expected) else "conflict") from error
    except (KVDockError, TypeError) as error:  # the latter from a class that lacks a method
        raise BackendUnavailableError(f"prefix cache {name!r}: {error}", got="unusable") from error
    versions = {"kvdock": kvdock.__version__, "torch": torch.__version__, "python": platform.python_version()}
    about = {"prefix": name, "class": f"{target.kind.__module__}.{target.kind.__qualname__}", "policy": target.policy}
    return target, {**about, "hardware": hardware.processor(), "versions": versions, "platform": platform.platform()}


def _check_signatures(kind: type[PrefixCache]) -> None:
    """Raise a PluginError unless each method can be called as the contract says: others were written for another contract."""
    for name in sorted(PrefixCache.__abstractmethods__):
        ours, theirs = getattr(PrefixCache, name), getattr(kind, name)
        if inspect.isfunction(ours):
            expected, got = inspect.signature(ours), inspect.signature(theirs)
            named = [key for key, parameter in expected.parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
            try:
                got.bind(*expected.parameters.keys() - named, **dict.fromkeys(named))
            except TypeError as error:
                fix = "write it for the contract of this version: kvdock.prefix.PrefixCache"
                raise PluginError(f"{kind.__qualname__}.{name}", expected=str(expected), got=str(got), fix=fix) from error
