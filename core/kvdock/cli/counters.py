"""The counters of descriptor caches, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from kvdock.cli.output import show_table
from kvdock.runtime import Runtime

__all__ = ["counters", "show_counters"]

_COLUMNS = ("op", "device", "hits", "misses", "evictions", "held", "of", "destroyed", "failures", "prepare ms")


def counters(current: Runtime | None, op: str | None = None) -> list[dict[str, Any]]:
    """Return what a runtime's descriptor caches have counted over all threads, as what JSON can hold.

    Args:
        current: the runtime; None has counted nothing.
        op: the op to show, or None for all.

    Returns:
        One dictionary per op and device on which anything was called: ``op``, ``device`` and the fields of `CacheStats`.
    """
    stats = {} if current is None else current.dispatcher.descriptors.stats()
    return [
        {"op": name, "device": "host" if device is None else str(device), **attrs.asdict(counted)}
        for name, by_device in sorted(stats.items())
        for device, counted in by_device.items()
        if op in (None, name)
    ]


def show_counters(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print counters as a table."""
    show_table(_COLUMNS, [_cells(row) for row in rows])


def _cells(row: Mapping[str, Any]) -> tuple[object, ...]:
    counts = [row[name] for name in ("hits", "misses", "evictions", "size", "capacity", "destroyed", "failures")]
    return row["op"], row["device"], *counts, f"{row['prepare_s'] * 1e3:.3f}"
