"""Backends."""

from __future__ import annotations

import platform
from typing import Any

import torch

import kvdock
from kvdock import runtime
from kvdock.errors import ArgumentValueError, BackendUnavailableError
from kvdock.plugins.settings import PER_DEVICE
from kvdock_conformance.checking.target import Target
from kvdock_conformance.kinds import UNKNOWN_DEVICE, hardware
from kvdock_conformance.stand_ins import register

__all__ = ["open_target"]


def open_target(name: str, setup: str | None, device: str | None) -> tuple[Target, dict[str, Any]]:
    """Load a backend, or register one of the kit's own, and say what it is.

    Raises:
        BackendUnavailableError: it is not ready, or has no such device.
    """
    register(name)
    try:
        target = Target(name, setup, device)
    except ArgumentValueError as error:
        if device is None:
            raise BackendUnavailableError(f"backend {name!r} has no device: devices() is empty", got="unusable") from error
        raise BackendUnavailableError(str(error.expected), got=UNKNOWN_DEVICE) from error
    except BackendUnavailableError as error:
        raise BackendUnavailableError(str(error), got=_state(runtime.default().registry.records(), name)) from error
    return target, _about(target)


def _state(records: Any, name: str) -> str:
    """Return the state of a backend that is not ready; ``"unknown"`` when no plugin has it."""
    for record in records:
        for item in (*record.backends, record):
            if item.name == name:
                return str(item.state.value)
    return "unknown"


def _by_name(target: Target) -> str:
    """Return that calls by functions must name the backend, and what would have them as they come; empty where they need not."""
    if all(map(target.is_chosen, target.backend.kernels())):
        return ""
    kind = target.device.type
    variable = f"{PER_DEVICE}{kind.upper()}"
    return f"calls by functions were made under use_backend, and so never repeated by Descriptor.fix; {variable}={target.name} has them so"


def _about(target: Target) -> dict[str, Any]:
    claims = target.backend.capabilities()
    return {
        "backend": target.name,
        "class": f"{type(target.backend).__module__}.{type(target.backend).__qualname__}",
        "device_type": target.backend.device_type,
        "device": str(target.device),
        "hardware": hardware.of_device(target.device),
        "ops": sorted(target.backend.kernels()),
        "dtypes": None if claims.dtypes is None else sorted(map(str, claims.dtypes)),
        "graph_capture": claims.graph_capture,
        "batch_invariant": claims.batch_invariant,
        "must_raise": target.must_raise,
        "by_name": _by_name(target),
        "versions": {"kvdock": kvdock.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "platform": platform.platform(),
    }
