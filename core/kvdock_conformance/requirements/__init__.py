"""The requirements, one module per area. A new area is a new module with a list ``REQUIREMENTS``, and a line in `AREAS`."""

from __future__ import annotations

import functools
import gc
import importlib

from kvdock_conformance.requirement import Requirement, Requirements

__all__ = ["AREAS", "find", "load", "load_alone"]

AREAS = (
    "paged_caching",
    "gather_paged",
    "copy_blocks",
    "swap_blocks",
    "static_update",
    "paged_attention",
    "latents",
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


def find(requirement_id: str) -> Requirement:
    """Return a requirement by its id: one of `load`, or one of a plugin's op, ``KVD-OP-001@rope_caching_``, without its cases.

    Raises:
        ArgumentValueError: there is none.
    """
    name, _, op = requirement_id.partition("@")
    if not op:
        return load()[name]
    ops = importlib.import_module(f"{__name__}.ops")
    return Requirements(item.of(op) for item in ops.REQUIREMENTS)[requirement_id]


@functools.cache
def load() -> Requirements:
    """Return every requirement."""
    modules = [importlib.import_module(f"{__name__}.{area}") for area in AREAS]
    return Requirements(requirement for module in modules for requirement in module.REQUIREMENTS)


def load_alone() -> Requirements:
    """Return every requirement, in a process that is the kit's own.

    The garbage collector would look through all of torch a dozen times while it comes, and then again and again: what is there then stays.
    """
    gc.disable()
    found = load()
    gc.enable()
    gc.freeze()
    return found
