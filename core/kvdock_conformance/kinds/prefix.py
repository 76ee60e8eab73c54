"""Prefix caches."""

from __future__ import annotations

import platform
from typing import Any

import torch

import kvdock
from kvdock.errors import ArgumentValueError, BackendUnavailableError, KVDockError
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
        target = PrefixTarget(name)
    except ArgumentValueError as error:
        raise BackendUnavailableError(str(error), got="unknown" if "one of" in str(error.expected) else "conflict") from error
    except KVDockError as error:
        raise BackendUnavailableError(str(error), got="unusable") from error
    versions = {"kvdock": kvdock.__version__, "torch": torch.__version__, "python": platform.python_version()}
    about = {"prefix": name, "class": f"{target.kind.__module__}.{target.kind.__qualname__}", "policy": target.policy}
    return target, {**about, "hardware": hardware.processor(), "versions": versions, "platform": platform.platform()}
