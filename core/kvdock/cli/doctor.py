"""``kvdock doctor``: versions, environment, descriptors, and what becomes of every plugin, each tried in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import attrs
import typer

from kvdock import runtime
from kvdock.cli.counters import counters, show_counters
from kvdock.cli.isolated import examine
from kvdock.cli.output import JsonFlag, errors_shown, show_json, show_lines, show_table
from kvdock.cli.versions import versions
from kvdock.plugins.contract import unknown_op
from kvdock.plugins.entry_points import collect, plan
from kvdock.plugins.records import PluginRecord, PluginState, mark_name_conflicts, summarise
from kvdock.plugins.settings import PER_DEVICE, PluginSettings

__all__ = ["Diagnosis", "command", "diagnose"]

_AT_ONCE = 2  # children at a time: each imports torch
_SLOW_S = 10.0  # the first op of every process waits for all plugins


@attrs.frozen
class Diagnosis:
    """What doctor found.

    Args:
        versions: versions by name.
        environment: kvdock's environment variables that are set.
        plugins: one record per plugin.
        notes: what the user should be told beside the records.
        seconds: how long each plugin took to load and probe, by ``name@distribution``; without those that did not come to an end.
        problems: what is wrong beside the plugins themselves: with metadata, with the lists, or as a whole.
        descriptors: what the descriptor caches of this process have counted, by op and device; see `kvdock.cli.counters`.
    """

    versions: dict[str, str]
    environment: dict[str, str]
    plugins: tuple[PluginRecord, ...]
    notes: tuple[str, ...]
    seconds: Mapping[str, float] = attrs.field(factory=dict)
    problems: tuple[str, ...] = ()
    descriptors: tuple[dict[str, Any], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing needs attention: every plugin is READY, ABSENT or BLOCKED, and there is no problem beside them."""
        return not self.problems and all(record.state.fine for record in self.plugins)

    def as_dict(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        return {
            "ok": self.ok,
            "versions": self.versions,
            "environment": self.environment,
            "plugins": [record.as_dict() for record in self.plugins],
            "notes": list(self.notes),
            "seconds": dict(self.seconds),
            "problems": list(self.problems),
            "descriptors": list(self.descriptors),
        }


def diagnose(timeout_s: float) -> Diagnosis:
    """Examine every installed plugin that the environment allows. Nothing is loaded into this process.

    Args:
        timeout_s: how long each plugin may take, in seconds.

    Raises:
        ArgumentValueError: an environment variable cannot be read.
    """
    found, unreadable = collect()
    settings = PluginSettings.from_environ(os.environ)
    todo = plan(found, settings)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        examined = list(pool.map(lambda item: examine(item, timeout_s), todo.load))
    records = sorted([*todo.refused, *(item.record for item in examined)], key=lambda record: (record.name, record.distribution or ""))
    records = _knowing_each_other(mark_name_conflicts(records))
    seconds = {_key(item.record): item.seconds for item in examined if item.seconds is not None}
    environment = {key: value for key, value in sorted(os.environ.items()) if key.startswith("KVDOCK_")}
    return Diagnosis(
        versions(),
        environment,
        tuple(records),
        notes=tuple(note for item in examined for note in item.notes),
        seconds=seconds,
        problems=(
            *(*unreadable, *todo.notes, *(problem for item in examined for problem in item.problems), *_slow(seconds)),
            *(*_no_backend(records), *_not_there(settings, records), *_ops_of_nobody(records)),
        ),
        descriptors=tuple(counters(runtime.made())),
    )


def _knowing_each_other(records: Sequence[PluginRecord]) -> list[PluginRecord]:
    """Take back doubts about kernels for ops that another plugin brings: each plugin was examined alone."""
    brought = tuple(unknown_op(op, ()).partition(",")[0] for record in records for op in record.ops)
    found = []
    for record in records:
        backends = [attrs.evolve(item, doubts=tuple(d for d in item.doubts if not d.startswith(brought))) for item in record.backends]
        found.append(summarise(attrs.evolve(record, backends=tuple(backends))) if tuple(backends) != record.backends else record)
    return found


def _key(record: PluginRecord) -> str:
    return f"{record.name}@{record.distribution}"


def _slow(seconds: Mapping[str, float]) -> list[str]:
    """Return a problem for each plugin that makes every process wait."""
    wait = "the first op of every process waits for that"
    return [f"plugin {key} took {took:.1f} s to load and probe, and {wait}" for key, took in seconds.items() if took > _SLOW_S]


def _no_backend(records: Sequence[PluginRecord]) -> list[str]:
    """Return a problem if no backend is usable, whatever the reason: that is never fine."""
    if any(backend.state is PluginState.READY for record in records for backend in record.backends):
        return []
    return ["no backend is READY, so every op fails. Fix: see the reasons above, or pip install --force-reinstall kvdock"]


def _not_there(settings: PluginSettings, records: Sequence[PluginRecord]) -> list[str]:
    """Return a problem for each variable that names a backend which is not READY: every op on such a device fails."""
    ready = [backend.name for record in records for backend in record.backends if backend.state is PluginState.READY]
    return [
        f"{PER_DEVICE}{kind.upper()} names {name!r}, which is not READY, so every op on {kind!r} fails. "
        f"Ready: {', '.join(ready) or 'none'}. Fix: name one of them, or unset it"
        for kind, name in settings.device_backends.items()
        if name not in ready
    ]


def _ops_of_nobody(records: Sequence[PluginRecord]) -> list[str]:
    """Return a problem for each op that several plugins bring: nobody can know which is meant, and no backend serves it."""
    owners: dict[str, list[str]] = {}
    for record in records:
        for op in record.ops:
            owners.setdefault(op, []).append(record.label)
    fix = "deny all but one with KVDOCK_BACKENDS_DENY"
    twice = {op: " and ".join(labels) for op, labels in owners.items() if len(labels) > 1}
    return [f"op {op!r} is brought by {labels}, so no backend serves it. Fix: {fix}" for op, labels in twice.items()]


def command(
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that each plugin may take to load and probe.")] = 60.0,
    json_output: JsonFlag = False,
) -> None:
    """Check versions, environment and plugins. Exits with 1 if anything needs attention."""
    with errors_shown("doctor", json_output):
        diagnosis = diagnose(timeout)
    if json_output:
        show_json("doctor", diagnosis.as_dict())
    else:
        _show(diagnosis)
    raise typer.Exit(0 if diagnosis.ok else 1)


def _show(diagnosis: Diagnosis) -> None:
    show_lines(" · ".join(f"{name} {version}" for name, version in diagnosis.versions.items()))
    show_lines(*(f"{name}={value}" for name, value in diagnosis.environment.items()))
    show_table(("plugin", "from", "state", "seconds", "backends", "reason"), [_row(record, diagnosis) for record in diagnosis.plugins])
    show_lines(*(f"note: {note}" for note in diagnosis.notes), *(f"problem: {problem}" for problem in diagnosis.problems))
    for record in diagnosis.plugins:
        if record.traceback:
            show_lines(f"--- {record.label}", record.traceback.rstrip())
    _show_descriptors(diagnosis)
    broken = [record.name for record in diagnosis.plugins if not record.state.fine]
    attention = [*broken, *(["the problems above"] if diagnosis.problems else [])]
    show_lines(f"needs attention: {', '.join(attention)}" if attention else "everything is fine")


def _show_descriptors(diagnosis: Diagnosis) -> None:
    if diagnosis.descriptors:
        show_counters(diagnosis.descriptors)
    else:
        show_lines("descriptors: none yet; `kvdock explain OP --run 3` calls an op three times and shows the counters")


def _row(record: PluginRecord, diagnosis: Diagnosis) -> tuple[str, ...]:
    seconds = diagnosis.seconds.get(_key(record))
    backends = "\n".join(f"{backend.name}: {backend.state.name}" for backend in record.backends)
    return (
        record.name,
        f"{record.distribution} {record.version}",
        record.state.name,
        "" if seconds is None else f"{seconds:.1f}",
        backends,
        record.reason,
    )
