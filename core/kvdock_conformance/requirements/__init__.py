"""The requirements, one module per area. A new area is a new module with a list ``REQUIREMENTS``, and a line in `AREAS`."""

from __future__ import annotations

import functools
import importlib

from kvdock_conformance.requirement import Requirements

__all__ = ["AREAS", "load"]

AREAS = (
    "paged_caching",
    "gather_paged",
    "copy_blocks",
    "static_update",
    "descriptors",
    "errors",
    "devices",
    "hygiene",
    "resources",
    "reads",
    "threads",
    "fuzz",
    "prefix",
)
"""Modules of this package, in the order in which their requirements run."""


@functools.cache
def load() -> Requirements:
    """Return every requirement."""
    modules = [importlib.import_module(f"{__name__}.{area}") for area in AREAS]
    return Requirements(requirement for module in modules for requirement in module.REQUIREMENTS)
