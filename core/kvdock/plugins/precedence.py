"""Who serves an op on a device: pure decisions over what discovery found. The order in which plugins load never decides.

In this order: the call's own argument, what is configured for the op, what is configured for the device (first by the
program, then by the environment), the only backend that is ready and claims the device, the highest priority. A tie is
an error. The others that claim the device come behind, by priority, for what the chosen one does not serve.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence

import attrs
import torch

from kvdock.errors import AmbiguousBackendError, BackendUnavailableError, NoBackendError
from kvdock.guarded import ask, ask_devices
from kvdock.ops.selection import Choice, Rejected
from kvdock.plugins.contract import RESERVED
from kvdock.plugins.discovery import Discovery
from kvdock.plugins.loading import LoadedBackend
from kvdock.plugins.records import PluginRecord, PluginState
from kvdock.plugins.settings import PER_DEVICE

__all__ = ["Candidate", "Configured", "behind", "candidates", "choice_of", "decide", "only_one", "require", "select", "why_unavailable"]

_Selected = tuple[LoadedBackend, str]


@attrs.frozen
class Configured:
    """Backends that the program configured: by op name, and by device type."""

    ops: Mapping[str, str] = attrs.field(factory=dict)
    devices: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen
class Candidate:
    """A backend, or a plugin that has none, in view of one device.

    Args:
        name: name of the backend, or of the plugin if it was not loaded.
        plugin: name of the plugin.
        state: state of the backend or plugin.
        claims: whether it is ready and claims the device.
        reason: why it does not, or the priority it claims it with.
    """

    name: str
    plugin: str
    state: PluginState
    claims: bool
    reason: str


def decide(known: Discovery, configured: Configured, op: str, device: torch.device, named: str | None) -> Choice:
    """Choose the backend for an op on a device.

    Raises:
        NoBackendError: no ready backend claims the device.
        BackendUnavailableError: the named or configured backend does not exist, is not ready, or does not run there.
        AmbiguousBackendError: several are ready and none is preferred.
    """
    return choice_of(*select(known, configured, op, device, named), op)


def choice_of(loaded: LoadedBackend, reason: str, op: str) -> Choice:
    """Return a selected backend, which was asked for its kernels, as the choice for an op."""
    if op in loaded.overridden:
        reason = f"{reason}; its own kernel for {op!r} was overridden by a registered one"
    return Choice(loaded.backend, loaded.kernels, loaded.capabilities, reason, loaded.api)


def select(known: Discovery, configured: Configured, op: str, device: torch.device, named: str | None) -> _Selected:
    """Return the backend for an op on a device, and why. Raises as `decide` does."""
    # What the call or the program names is not weighed against claims: if it cannot serve, that is an error and no fallback.
    if named is not None:
        return require(known, named, device, "asked for by name")
    if op in configured.ops:
        return require(known, configured.ops[op], device, f"configured for op {op!r}")
    # Sorted, so that the order in which plugins were loaded decides nothing, not even the text of an error.
    claimants = [loaded for _, loaded in sorted(known.loaded.items()) if _claims(loaded, device)[0]]
    wanted = _configured_for_device(known, configured, device, claimants)
    if wanted is not None:
        return require(known, *wanted)
    if not claimants:
        raise NoBackendError(
            f"{op}: no backend that is ready claims {device}. Installed: {_overview(known, device)}",
            fix="install a plugin for this kind of device, or repair the one listed; `kvdock doctor` shows tracebacks",
        )
    loaded, reason = _preferred(op, device, claimants)
    return loaded, "; ".join([reason, *_broken_rivals(known, device, loaded)])


def behind(known: Discovery, device: torch.device, first: str) -> list[tuple[int, list[str]]]:
    """Return who else claims a device, the highest priority first: each priority with the names of those that have it."""
    others = [
        (-loaded.capabilities.priority, name) for name, loaded in known.loaded.items() if name != first and _claims(loaded, device)[0]
    ]
    return [(-order, [name for _, name in equals]) for order, equals in itertools.groupby(sorted(others), key=operator.itemgetter(0))]


def only_one(op: str, device: torch.device, able: Sequence[Choice], priority: int, rejected: Rejected) -> Choice:
    """Return the one of some equal backends that serves a request which those before them do not.

    Raises:
        AmbiguousBackendError: several do.
    """
    if len(able) == 1:
        return able[0]
    names = ", ".join(f"{each.backend.name} (priority {priority})" for each in able)
    refused = "; ".join(f"{name} does not ({', '.join(reasons)})" for name, reasons in rejected)
    raise AmbiguousBackendError(
        f"{op}: several backends that claim {device} serve the request, and none is preferred: {names}; {refused}",
        fix="use kvdock.use_backend(name) for such calls, or leave out all but one with KVDOCK_BACKENDS_DENY",
    )


def _broken_rivals(known: Discovery, device: torch.device, chosen: LoadedBackend) -> list[str]:
    """Name the backends that might have served the device, were they not broken: nobody should fall back unknowingly."""
    kinds = {device.type, chosen.backend.device_type}
    backends = [item for record in known.records for item in record.backends]
    return [f"{item.name} is {item.state.name}: {item.reason}" for item in backends if not item.state.fine and item.device_type in kinds]


def _preferred(op: str, device: torch.device, claimants: Sequence[LoadedBackend]) -> _Selected:
    """Take the only claimant, or the one with the highest priority."""
    if len(claimants) == 1:
        return claimants[0], f"only ready backend that claims {device}"
    names = ", ".join(f"{item.backend.name} (priority {int(item.capabilities.priority)})" for item in claimants)
    highest = max(item.capabilities.priority for item in claimants)
    best = [item for item in claimants if item.capabilities.priority == highest]
    if len(best) == 1:
        return best[0], f"highest priority of the ready backends that claim {device}: {names}"
    variable = _deciding_variable(device, best)
    raise AmbiguousBackendError(
        f"{op}: several ready backends claim {device}, and none is preferred: {names}",
        fix=f"set {variable}={best[0].backend.name} (or another of them), or use kvdock.use_backend(name)",
    )


def _deciding_variable(device: torch.device, tied: Sequence[LoadedBackend]) -> str:
    """Return the variable to set: of their device type if they agree on one, else of torch's, which always counts."""
    types = {item.backend.device_type for item in tied}
    return PER_DEVICE + (types.pop() if len(types) == 1 else device.type).upper()


def _configured_for_device(
    known: Discovery, configured: Configured, device: torch.device, claimants: Sequence[LoadedBackend]
) -> tuple[str, torch.device, str] | None:
    """Return the name configured for a device, and by what: the program first, the claimants' device types before torch's."""
    own_types = sorted({item.backend.device_type for item in claimants})
    by_program = {kind: (f"the program for {kind!r}", name) for kind, name in configured.devices.items()}
    by_environ = {kind: (f"{PER_DEVICE}{kind.upper()}", name) for kind, name in known.settings.device_backends.items()}
    for source, kinds in itertools.product((by_program, by_environ), (own_types, [device.type])):
        wanted = dict(source[kind] for kind in kinds if kind in source)
        # The types that the claimants name are equals: of two that are configured differently, neither is the obvious one.
        if len(set(wanted.values())) > 1:
            raise AmbiguousBackendError(
                f"{device} is configured more than once: {', '.join(f'{by} says {name}' for by, name in wanted.items())}",
                fix="leave one of them",
            )
        for by, name in wanted.items():
            return name, device, f"configured for {device} by {by}"
    return None


def require(known: Discovery, name: str, device: torch.device, why: str) -> _Selected:
    """Return the backend of a name, which somebody asked for, so that nothing else will do, and why.

    Raises:
        BackendUnavailableError: it does not exist, is not ready, or does not run on the device.
    """
    loaded = known.loaded.get(name)
    if loaded is None:
        raise BackendUnavailableError(f"backend {name!r}, {why}: {why_unavailable(known, name)}")
    runs_on = ask_devices(loaded.backend)
    if not any(_same_device(device, other) for other in runs_on):
        raise BackendUnavailableError(
            f"backend {name!r}, {why}",
            expected=f"tensors on one of its devices ({', '.join(map(str, runs_on)) or 'none'})",
            got=str(device),
            fix="move the tensors, or ask for another backend",
        )
    return loaded, why


def _same_device(one: torch.device, other: torch.device) -> bool:
    """Compare devices; one without index stands for all of its type."""
    return one.type == other.type and (one.index == other.index or one.index is None or other.index is None)


def why_unavailable(known: Discovery, name: str) -> str:
    """Say why a backend cannot be had: its own record, that of the plugin of this name, or who else there is."""
    own = [
        f"{backend.state.name}: {backend.reason} ({record.label})"
        for record in known.records
        for backend in record.backends
        if backend.name == name
    ]
    # A backend comes before a plugin of the same name: the name of a backend was asked for.
    own = own[:1] if own else [_plugin_instead(record) for record in known.records if record.name == name]
    if own:
        return "; ".join(own)
    ready = ", ".join(sorted(known.loaded)) or "none"
    if name == RESERVED:
        return "it names kernels rather than a backend. Fix: ask for them with kvdock.use_backend, which takes this name"
    return f"there is none of this name. Ready: {ready}. Fix: ask for one of them, or install its plugin; `kvdock backends` lists them"


def _plugin_instead(record: PluginRecord) -> str:
    """Describe the plugin whose name was given instead of a backend's."""
    if not record.backends:
        return f"{record.label} is {record.verdict}"
    return f"it is the name of a plugin ({record.label}). Fix: ask for its backend, {', '.join(item.name for item in record.backends)}"


def candidates(known: Discovery, device: torch.device) -> list[Candidate]:
    """Return every backend, and every plugin that has none, with why it does or does not come into question."""
    found = []
    for record in known.records:
        if not record.backends:
            found.append(Candidate(record.name, record.name, record.state, False, record.verdict))
        for item in record.backends:
            loaded = known.loaded.get(item.name)
            claims, reason = (False, f"{item.state.name}: {item.reason}") if loaded is None else _claims(loaded, device)
            found.append(Candidate(item.name, record.name, item.state, claims, reason))
    return found


def _claims(loaded: LoadedBackend, device: torch.device) -> tuple[bool, str]:
    """Whether a ready backend claims a device, and why. One that says neither yes nor no does not, and must not break the others."""
    backend = loaded.backend
    try:
        claims: bool = ask(backend.name, f"claims({device})", lambda: backend.claims(device), "a bool", lambda yes: isinstance(yes, bool))
    except Exception as error:  # noqa: BLE001 - a plugin's bug; it is listed as the reason, and others can still serve
        return False, str(error)
    return claims, f"claims {device} with priority {int(loaded.capabilities.priority)}" if claims else f"does not claim {device}"


def _overview(known: Discovery, device: torch.device) -> str:
    return "; ".join(f"{item.name} ({item.reason})" for item in candidates(known, device)) or "nothing"
