"""Seeded faults: backends that are wrong in one way, to prove that the requirements notice.

`fault` is what a fault is and how it is seeded, and there is one module of faults per area. A new area is a new module with
a list ``FAULTS``, and a line in `AREAS`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Mapping

from kvdock.errors import ArgumentValueError
from kvdock_conformance.faults.fault import Fault
from kvdock_conformance.requirement import Requirement

__all__ = ["AREAS", "find", "load", "of_ops"]

AREAS = (
    "families",
    "pairs",
    "pairs_at_sizes",
    "many",
    "places",
    "paged_caching",
    "gather_paged",
    "gather_results",
    "copy_blocks",
    "copy_forms",
    "swap_blocks",
    "scales",
    "static_update",
    "paged_attention",
    "attention_values",
    "attention_joins",
    "attention_sizes",
    "attention_many",
    "latents",
    "descriptors",
    "repeats",
    "errors",
    "devices",
    "device_guards",
    "hygiene",
    "hygiene_calls",
    "resources",
    "reads",
    "threads",
    "fuzz",
    "prefix",
    "prefix_answers",
    "prefix_behind",
    "prefix_groups",
)
"""Modules of this package."""


def find(name: str) -> Fault:
    """Return a fault by its name: one of `load`, or one of a plugin's op: ``op-input-changed@rope_caching_``."""
    own, _, op = name.partition("@")
    return importlib.import_module(f"{__name__}.ops").FAULTS[own].of(op) if op else load()[name]


def of_ops(requirements: Iterable[Requirement]) -> dict[str, Fault]:
    """Return the faults of the ops that plugins bring, by name: each with those of its killers that are among the requirements."""
    faults = importlib.import_module(f"{__name__}.ops").FAULTS.values()
    asked = {item.id: item for item in requirements}
    ops = dict.fromkeys(name.partition("@")[2] for name in asked if "@" in name)
    every = [fault.of(op, asked) for op in ops for fault in faults]
    return {fault.name: fault for fault in every if fault.killers}


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
