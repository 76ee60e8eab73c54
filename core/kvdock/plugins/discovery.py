"""All plugins: which are installed, which may be loaded, what became of each.

Our own loop, not pluggy's bulk loader, which stops at the first broken plugin and silently skips the second one of a name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import attrs

from kvdock.ops.catalog import Op
from kvdock.plugins.entry_points import collect, plan
from kvdock.plugins.loading import Contribution, LoadedBackend, StepWatcher, ask_kernels, load, unwatched
from kvdock.plugins.records import PluginRecord, PluginState, mark_name_conflicts, with_outcome
from kvdock.plugins.settings import PluginSettings

__all__ = ["Discovery", "discover"]


@attrs.frozen
class Discovery:
    """Everything known about plugins.

    Args:
        settings: what the environment said when they were loaded.
        records: one per plugin, sorted by name and distribution; those registered in this process follow.
        loaded: backends that are ready, by name.
        prefix_caches: for each plugin that brings any, its prefix caches by name.
        transports: the same of transports.
        ops: the ops that plugins bring, by name.
        notes: what the user should be told beside the records.
    """

    settings: PluginSettings
    records: tuple[PluginRecord, ...] = ()
    loaded: Mapping[str, LoadedBackend] = attrs.field(factory=dict)
    prefix_caches: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    transports: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    ops: Mapping[str, Op] = attrs.field(factory=dict)
    notes: tuple[str, ...] = ()

    def plus(self, contribution: Contribution) -> Discovery:
        """Return this and one more plugin, whose names nobody else uses."""
        return attrs.evolve(
            self,
            records=(*self.records, contribution.record),
            loaded={**self.loaded, **{item.backend.name: item for item in contribution.backends}},
            prefix_caches={**self.prefix_caches, **_caches([contribution])},
            transports={**self.transports, **_transports([contribution])},
            ops={**self.ops, **contribution.ops},
        )

    def with_kernels(self, name: str, ops: Collection[str], watch: StepWatcher = unwatched) -> tuple[Discovery, list[str]]:
        """Ask a backend for its kernels; return this with the answer, and what the user should be told about it.

        Args:
            name: name of a backend that is ready, and was not asked.
            ops: names of the ops that there are.
            watch: called before it is asked.
        """
        owner = next(record for record in self.records if any(backend.name == name for backend in record.backends))
        before = next(backend for backend in owner.backends if backend.name == name)
        ready, outcome, trace = ask_kernels(self.loaded[name], before, ops, watch)
        record = with_outcome(owner, outcome, trace)
        loaded = {other: item for other, item in self.loaded.items() if other != name} | ({} if ready is None else {name: ready})
        known = attrs.evolve(self, records=tuple(record if each is owner else each for each in self.records), loaded=loaded)
        told = [] if outcome.state.fine else [f"{record.label} is {record.verdict}"]
        return known, told + [f"backend {name!r} ({record.label}): {doubt}" for doubt in outcome.doubts]

    def with_backend(self, loaded: LoadedBackend) -> Discovery:
        """Return this with one backend replaced."""
        return attrs.evolve(self, loaded={**self.loaded, loaded.backend.name: loaded})


def discover(settings: PluginSettings, watch: StepWatcher = unwatched) -> Discovery:
    """Load every plugin that ``settings`` allow, each under its own guard.

    Args:
        settings: which plugins may be loaded.
        watch: called before each step of each plugin.

    Raises:
        DiscoveryReentryError: a plugin is being imported right now, further up in this thread.
    """
    found, unreadable = collect()
    todo = plan(found, settings)
    contributions = [load(item, watch) for item in todo.load]
    records = [*todo.refused, *(contribution.record for contribution in contributions)]
    records = mark_name_conflicts(sorted(records, key=lambda record: (record.name, record.distribution or "")))
    usable = {backend.name for record in records for backend in record.backends if backend.state is PluginState.READY}
    loaded = {item.backend.name: item for contribution in contributions for item in contribution.backends}
    twice = _brought_twice(contributions)
    return Discovery(
        settings=settings,
        records=tuple(records),
        loaded={name: item for name, item in loaded.items() if name in usable},
        prefix_caches=_caches(contributions),
        transports=_transports(contributions),
        ops={name: op for item in contributions for name, op in item.ops.items() if name not in twice},
        notes=(*unreadable, *todo.notes, *twice.values()),
    )


def _caches(contributions: list[Contribution]) -> dict[str, Mapping[str, Any]]:
    return {item.record.name: item.prefix_caches for item in contributions if item.prefix_caches}


def _transports(contributions: list[Contribution]) -> dict[str, Mapping[str, Any]]:
    return {item.record.name: item.transports for item in contributions if item.transports}


def _brought_twice(contributions: list[Contribution]) -> dict[str, str]:
    """Return for each op that several plugins bring what to say: nobody can know which is meant, so there is none."""
    owners: dict[str, list[str]] = {}
    for item in contributions:
        for name in item.ops:
            owners.setdefault(name, []).append(item.record.name)
    fix = "deny all but one with KVDOCK_BACKENDS_DENY"
    return {
        name: f"op {name!r} is brought by plugins {', '.join(sorted(plugins))}, and is not there. Fix: {fix}"
        for name, plugins in owners.items()
        if len(plugins) > 1
    }
