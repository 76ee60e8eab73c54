"""What became of each plugin: plain data, to print, to compare and to send between processes."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvdock.interface import ProbeState
from kvdock.plugins.hookspecs import PROJECT
from kvdock.plugins.settings import Selector

__all__ = ["BackendRecord", "PluginRecord", "PluginState", "mark_name_conflicts", "summarise", "with_outcome"]


class PluginState(enum.Enum):
    """Where a plugin, or one of its backends, stopped on its way to being usable."""

    BLOCKED = "blocked"
    """Not loaded, because the environment says so."""

    CONFLICT = "conflict"
    """Another plugin has the same name; neither is used until the user picks one."""

    INCOMPATIBLE = "incompatible"
    """Made for another version of the contract, or does not keep to it."""

    LOAD_FAILED = "load_failed"
    """Raised while it was imported or asked for its backends."""

    ABSENT = "absent"
    """Fine, and its hardware is not here."""

    UNUSABLE = "unusable"
    """Its hardware may be here, and something is broken."""

    READY = "ready"
    """Usable."""

    @property
    def fine(self) -> bool:
        """Whether this is a normal outcome, which nobody needs to be told about."""
        return self in (PluginState.READY, PluginState.ABSENT, PluginState.BLOCKED)

    @classmethod
    def of_probe(cls, state: ProbeState) -> PluginState:
        """Return the state that follows from a probe."""
        return cls(state.value)


_WORST_FIRST = (PluginState.INCOMPATIBLE, PluginState.CONFLICT, PluginState.UNUSABLE, PluginState.READY, PluginState.ABSENT)


@attrs.frozen
class BackendRecord:
    """What became of one backend of a plugin that was loaded. ``doubts`` are things that are allowed, and rarely meant."""

    name: str
    device_type: str
    state: PluginState
    reason: str = ""
    doubts: tuple[str, ...] = ()


@attrs.frozen
class PluginRecord:
    """What became of one plugin.

    Args:
        name: name of the entry point, or the name it was registered under.
        value: what the entry point names: a module, or ``module:object``.
        distribution: name of the distribution that declares it; None when it was registered in this process.
        version: version of that distribution.
        state: the worst state among its backends, or where loading stopped.
        reason: why, for people: one sentence, with the fix where there is one.
        traceback: the full text of what it raised; empty when it raised nothing.
        backends: one record for each of its backends; empty when it was not loaded.
        ops: names of the ops that it brings.
    """

    name: str
    value: str
    distribution: str | None
    version: str | None
    state: PluginState
    reason: str = ""
    traceback: str = ""
    backends: tuple[BackendRecord, ...] = ()
    ops: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The plugin for a sentence: ``plugin 'acme' (kvdock-acme 1.0)``."""
        origin = f"{self.distribution} {self.version}" if self.distribution else "registered in this process"
        return f"plugin {self.name!r} ({origin})"

    @property
    def verdict(self) -> str:
        """Its state and reason in one phrase: ``LOAD_FAILED: importing acme raised ImportError: libacme.so``."""
        return f"{self.state.name}: {self.reason}" if self.reason else self.state.name

    def as_dict(self) -> dict[str, Any]:
        """Return the record as what JSON can hold; states become their lower-case names."""
        return attrs.asdict(self, value_serializer=lambda _, __, value: value.value if isinstance(value, PluginState) else value)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PluginRecord:
        """Read what `as_dict` wrote."""
        backends = tuple(
            BackendRecord(**{**item, "state": PluginState(item["state"]), "doubts": tuple(item["doubts"])}) for item in data["backends"]
        )
        return cls(**{**data, "state": PluginState(data["state"]), "backends": backends, "ops": tuple(data["ops"])})


def summarise(record: PluginRecord) -> PluginRecord:
    """Give a plugin that was loaded the worst state among its backends, and the reasons of those that are in it."""
    if not record.backends:
        return record
    state = min((backend.state for backend in record.backends), key=_WORST_FIRST.index)
    said = [(backend, "; ".join(filter(None, [backend.reason, *backend.doubts]))) for backend in record.backends]
    reasons = [(backend.name, reason) for backend, reason in said if reason and (backend.state is state or backend.doubts)]
    several = "; ".join(f"backend {name!r}: {reason}" for name, reason in reasons)
    return attrs.evolve(record, state=state, reason=several if len(said) > 1 else said[0][1])


def with_outcome(record: PluginRecord, outcome: BackendRecord, trace: str) -> PluginRecord:
    """Return the record of a plugin with that of one of its backends replaced, and what it raised."""
    backends = tuple(outcome if backend.name == outcome.name else backend for backend in record.backends)
    traces = "\n".join(filter(None, [record.traceback, trace]))
    return summarise(attrs.evolve(record, backends=backends, traceback=traces))


def mark_name_conflicts(records: Sequence[PluginRecord]) -> list[PluginRecord]:
    """Put every backend whose name another one has too into CONFLICT, with all owners named."""
    owners: dict[str, list[PluginRecord]] = {}
    for record in records:
        for backend in record.backends:
            owners.setdefault(backend.name, []).append(record)
    clashes = {name: _clash(name, plugins) for name, plugins in owners.items() if len(plugins) > 1}
    return [_with_clashes(record, clashes) for record in records]


def _clash(name: str, owners: Sequence[PluginRecord]) -> str:
    labels = " and ".join(owner.label for owner in owners)
    strangers = [owner for owner in owners if owner.distribution != PROJECT] or list(owners)
    last = Selector(strangers[-1].name, strangers[-1].distribution)
    fix = f"refuse one, such as KVDOCK_BACKENDS_DENY={last}" if len(set(owners)) > 1 else "the plugin must rename one"
    return f"backend name {name!r} is brought by {labels}; none of them is used. Fix: {fix}"


def _with_clashes(record: PluginRecord, clashes: Mapping[str, str]) -> PluginRecord:
    if not any(backend.name in clashes for backend in record.backends):
        return record
    backends = tuple(
        attrs.evolve(backend, state=PluginState.CONFLICT, reason=clashes[backend.name]) if backend.name in clashes else backend
        for backend in record.backends
    )
    return summarise(attrs.evolve(record, backends=backends))
