"""Kinds of things that the kit tests. A new kind is a new module with ``open_target``, and a line in `KINDS`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

__all__ = ["KINDS", "UNKNOWN_DEVICE", "Kind"]

UNKNOWN_DEVICE = "unknown device"
"""The state of what is asked for on a device that it does not have."""


@attrs.frozen
class Kind:
    """A kind of thing that can be tested.

    Args:
        module: the module of this package that opens it. Imported in the child only.
        target: ``"module:class"`` of what checks take; made of a name alone. Its source goes into ``repro.py``.
        names: what its names are, for errors.
    """

    module: str
    target: str
    names: str

    def open(self, name: str, setup: str | None, device: str | None) -> tuple[Any, dict[str, Any]]:
        """Load one by its name.

        Args:
            name: its name.
            setup: what was called to make it known, ``"module:function"``, or None.
            device: on which of its devices; None for the first.

        Returns:
            What checks take, and what it says of itself.

        Raises:
            BackendUnavailableError: there is none, or it is not ready; its ``got`` is the state, ``"unknown"`` if nobody has it, and
                `UNKNOWN_DEVICE` with what there is as its subject.
        """
        opened: tuple[Any, dict[str, Any]] = importlib.import_module(f"{__name__}.{self.module}").open_target(name, setup, device)
        return opened

    def target_class(self) -> Any:
        """Return the class of what checks take."""
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "backend": Kind("backend", "kvdock_conformance.checking.target:Target", "the name of a backend as `kvdock backends` lists it"),
        "prefix": Kind(
            "prefix", "kvdock_conformance.checking.prefix_target:PrefixTarget", "the name of a prefix cache as create_prefix_cache takes it"
        ),
    }
)
"""The kinds by name."""
