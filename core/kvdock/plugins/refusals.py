"""What a registry does not take, and what it tells the user about what it took."""

from __future__ import annotations

import warnings
from collections.abc import Collection

from kvdock.errors import ArgumentValueError, KVDockWarning, PluginError
from kvdock.plugins.discovery import Discovery
from kvdock.plugins.records import PluginRecord, PluginState

__all__ = ["refuse_broken", "refuse_taken", "report"]


def refuse_broken(record: PluginRecord) -> None:
    """Refuse to register a plugin that is no good in any environment."""
    if record.state in (PluginState.INCOMPATIBLE, PluginState.LOAD_FAILED):
        raise PluginError(f"register: {record.label} is {record.verdict}\n{record.traceback}".rstrip())


def refuse_taken(record: PluginRecord, ops: Collection[str], known: Discovery) -> None:
    """Refuse to register a plugin whose name, or the name of one of whose backends, somebody has."""
    own = [backend.name for backend in record.backends]
    taken = {backend.name: other for other in known.records for backend in other.backends}
    taken.update({name: record for name in own if own.count(name) > 1})
    clashes = [("plugin", record.name, other) for other in known.records if other.name == record.name]
    clashes += [("backend", name, taken[name]) for name in own if name in taken]
    clashes += [("op", name, other) for other in known.records for name in other.ops if name in ops]
    for kind, name, owner in clashes:
        raise ArgumentValueError(
            f"register: {kind} name {name!r}", expected="a name that nobody uses", got=f"that of {owner.label}", fix="choose another name"
        )


def report(known: Discovery) -> None:
    """Warn of what is broken. What is merely not here, or switched off, is quiet."""
    broken = [f"{record.label} is {record.verdict}" for record in known.records if not record.state.fine]
    for text in (*broken, *known.notes):
        warnings.warn(f"{text}. `kvdock doctor` shows details", KVDockWarning, stacklevel=4)
