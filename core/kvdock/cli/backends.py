"""``kvdock backends``: the backends of this process, what they run on, and which ops they serve themselves."""

from __future__ import annotations

import warnings
from typing import Any

from kvdock import runtime
from kvdock.cli.notes import notes_of
from kvdock.cli.output import JsonFlag, errors_shown, show_json, show_lines, show_table
from kvdock.errors import KVDockError, KVDockWarning
from kvdock.guarded import ask_devices
from kvdock.ops.catalog import CATALOG
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock.plugins.loading import LoadedBackend
from kvdock.plugins.registry import Registry

__all__ = ["command", "describe", "describe_ops"]


def describe(registry: Registry) -> list[dict[str, Any]]:
    """Return one dictionary per backend, and one per plugin that has none, as what JSON can hold."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KVDockWarning)  # every state is in the table
        records, loaded = registry.records(), registry.loaded()
    rows = []
    for record in records:
        origin = {"plugin": record.name, "distribution": record.distribution, "version": record.version}
        if not record.backends:
            rows.append({"name": None, "device_type": None, "state": record.state.value, "reason": record.reason, **origin})
        for backend in record.backends:
            row = {"name": backend.name, "device_type": backend.device_type, "state": backend.state.value, "reason": backend.reason}
            ready = loaded.get(backend.name)
            rows.append({**row, **origin, **(_abilities(ready) if ready else {})})
    return rows


def describe_ops(registry: Registry) -> list[dict[str, Any]]:
    """Return one dictionary per op that a plugin brings: from whom, and which ready backends serve it by what kernel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KVDockWarning)
        records, loaded = registry.records(), registry.loaded()
    return [
        {
            "op": name,
            "plugin": record.name,
            "distribution": record.distribution,
            "version": record.version,
            "native": sorted(backend for backend, item in loaded.items() if name in item.kernels),
            "portable": sorted(backend for backend, item in loaded.items() if name not in item.kernels),
        }
        for record in records
        for name in record.ops
        if name in registry.brought_ops()
    ]


def _abilities(loaded: LoadedBackend) -> dict[str, Any]:
    able = loaded.capabilities
    return {
        "devices": _devices(loaded),
        "priority": able.priority.name,
        "dtypes": None if able.dtypes is None else [str(dtype) for dtype in able.dtypes],
        "graph_capture": able.graph_capture,
        "batch_invariant": able.batch_invariant,
        "native": sorted(loaded.kernels),
        "overridden": sorted(loaded.overridden),
        "portable": sorted(op for op in CATALOG if op not in loaded.kernels and op in PORTABLE_KERNELS),
        "notes": notes_of(loaded.backend),
    }


def _devices(loaded: LoadedBackend) -> list[str]:
    """Return its devices; where it cannot say, that instead."""
    try:
        return [str(device) for device in ask_devices(loaded.backend)]
    except KVDockError as error:
        return [str(error)]


def command(json_output: JsonFlag = False) -> None:
    """List the backends, the ops that each serves with its own kernels or else with portable ones, and the ops that plugins bring."""
    with errors_shown("backends", json_output):
        rows, ops = describe(runtime.default().registry), describe_ops(runtime.default().registry)
    if json_output:
        show_json("backends", {"backends": rows, "ops": ops})
    else:
        columns = ("backend", "device type", "state", "devices or reason", "priority", "dtypes", "native ops", "portable ops", "plugin")
        show_table(columns, [_cells(row) for row in rows])
        show_lines(*(f"{row['name']}: {note}" for row in rows for note in row.get("notes", ())))
        if ops:
            show_table(("op of a plugin", "native on", "portable on", "plugin"), [_op_cells(row) for row in ops])


def _op_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return row["op"], "\n".join(row["native"]), "\n".join(row["portable"]), f"{row['plugin']}\n{row['distribution'] or 'this process'}"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "devices" not in row:
        able: tuple[str, ...] = (row["reason"], "", "", "", "")
    else:
        dtypes = "up to each kernel" if row["dtypes"] is None else "\n".join(row["dtypes"])
        native = [f"{op} (overridden)" if op in row["overridden"] else op for op in row["native"]]
        able = ("\n".join(row["devices"]), row["priority"], dtypes, "\n".join(native), "\n".join(row["portable"]))
    return (
        row["name"] or "-",
        row["device_type"] or "-",
        row["state"].upper(),
        *able,
        f"{row['plugin']}\n{row['distribution'] or 'this process'}",
    )
