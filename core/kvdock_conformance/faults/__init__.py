"""Seeded faults: backends that are wrong in one way, to prove that the requirements notice.

`fault` is what a fault is and how it is seeded, and there is one module of faults per area. A new area is a new module with
a list ``FAULTS``, and a line in `AREAS`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping

from kvdock.errors import ArgumentValueError
from kvdock_conformance.faults.fault import Fault

__all__ = ["AREAS", "load"]

AREAS = (
    "families",
    "pairs",
    "paged_caching",
    "gather_paged",
    "gather_results",
    "copy_blocks",
    "copy_forms",
    "scales",
    "static_update",
    "descriptors",
    "repeats",
    "errors",
    "devices",
    "hygiene",
    "resources",
    "reads",
    "threads",
    "fuzz",
    "prefix",
    "prefix_answers",
    "prefix_behind",
)
"""Modules of this package."""


@functools.cache
def load() -> Mapping[str, Fault]:
    """Return every fault by name.

    Raises:
        ArgumentValueError: two have one name.
    """
    found: dict[str, Fault] = {}
    for area in AREAS:
        for fault in importlib.import_module(f"{__name__}.{area}").FAULTS:
            if fault.name in found:
                raise ArgumentValueError(f"fault {fault.name!r}", expected="a name that no other fault has", got=f"that of {area}'s")
            found[fault.name] = fault
    return found
