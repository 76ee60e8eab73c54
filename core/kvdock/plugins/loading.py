"""One plugin, from its entry point to backends that are probed. Whatever it does, the outcome is a record.

The steps are import, contract (`kvdock.plugins.contract`), hooks, and for each backend its probe; kernels when they are first
needed, since making them may take long. The first that fails decides the state; nothing of what came before stays.
"""

from __future__ import annotations

import functools
import importlib
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any, TypeVar

import attrs

from kvdock.errors import DiscoveryReentryError
from kvdock.interface import Backend, Capabilities, Kernel
from kvdock.ops.catalog import Op
from kvdock.plugins import contract
from kvdock.plugins.entry_points import FoundEntryPoint
from kvdock.plugins.records import BackendRecord, PluginRecord, PluginState, summarise

__all__ = ["Contribution", "LoadedBackend", "StepWatcher", "admit", "ask_kernels", "is_half_imported", "load", "unwatched"]

StepWatcher = Callable[[str, str], None]
"""Called with each step before it is taken: ``"import"``, ``"hooks"``, ``"probe"`` or ``"kernels"``, and what it is about."""

_T = TypeVar("_T")


@attrs.frozen
class LoadedBackend:
    """A backend that is ready, with what it was asked for once.

    Args:
        backend: the object that the plugin returned.
        kernels: its kernels by op name, with what was registered over them; never changed in place. None
            until `is_asked`.
        capabilities: what it said it can do.
        api: version of the contract that its plugin was made for.
        overridden: ops whose kernel of the plugin was replaced.
        is_asked: whether it was asked for its kernels, which may take long.
    """

    backend: Backend
    kernels: Mapping[str, Kernel]
    capabilities: Capabilities
    api: tuple[int, int]
    overridden: frozenset[str] = frozenset()
    is_asked: bool = False


@attrs.frozen
class Contribution:
    """What one plugin brings: its record, its ready backends, and its prefix caches, transports and ops by name."""

    record: PluginRecord
    backends: tuple[LoadedBackend, ...] = ()
    prefix_caches: Mapping[str, Any] = attrs.field(factory=dict)
    transports: Mapping[str, Any] = attrs.field(factory=dict)
    ops: Mapping[str, Op] = attrs.field(factory=dict)


class _RefusedError(Exception):
    """Ends the loading of a plugin, or of one backend, with a state."""

    def __init__(self, state: PluginState, reason: str, trace: str = "") -> None:
        super().__init__(reason)
        self.state = state
        self.reason = reason
        self.trace = trace


class _HalfImportedError(Exception):
    """The module is being imported by the very thread that asks for it."""


def unwatched(step: str, subject: str) -> None:
    """Watch nothing."""


def load(found: FoundEntryPoint, watch: StepWatcher = unwatched) -> Contribution:
    """Import an entry point and admit what it names. Whatever the plugin raises ends up in the record.

    Raises:
        DiscoveryReentryError: the plugin is being imported right now, further up in this thread.
    """
    watch("import", found.value)
    try:
        plugin = _attempt(PluginState.LOAD_FAILED, f"importing {found.value}", lambda: _import(found))
    except _HalfImportedError as half:
        raise DiscoveryReentryError(
            f"backends were asked for while {str(half)!r}, which belongs to plugin {found.name!r}, is being imported",
            fix="do not call ops, create caches or ask for backends when a module is imported; do it in a function",
        ) from None
    except _RefusedError as refused:
        return Contribution(found.record(refused.state, refused.reason, refused.trace))
    return admit(plugin, found.record(PluginState.READY, ""), watch)


def _attempt(state: PluginState, doing: str, call: Callable[[], _T]) -> _T:
    """Run a step of a plugin; whatever it raises refuses the plugin with ``state``."""
    try:
        return call()
    # Ctrl-C is no fault of the plugin, and the others are already what they should be.
    except (KeyboardInterrupt, _RefusedError, _HalfImportedError):
        raise
    except contract.BrokenContractError as error:
        raise _RefusedError(PluginState.INCOMPATIBLE, str(error)) from error
    except BaseException as error:  # a plugin may raise anything, and its sys.exit() must not end the process
        text = "".join(traceback.format_exception(error))
        raise _RefusedError(state, f"{doing} raised {type(error).__name__}: {error}", text) from error


def is_half_imported(module: ModuleType) -> bool:
    """Whether a module is still executing its body. After an import that returned, only the own thread can be doing that."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _import(found: FoundEntryPoint) -> object:
    """Import what an entry point names, package by package, so that none of them is used half imported."""
    name, attributes = found.target
    parts = name.split(".")
    try:
        for end in range(1, len(parts) + 1):
            module = importlib.import_module(".".join(parts[:end]))
            if is_half_imported(module):
                raise _HalfImportedError(module.__name__)
    except ModuleNotFoundError as error:
        # Only where the plugin's own module is gone: a dependency that it lacks is another mistake, and keeps its own error.
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise _stale(found, error) from error
        raise
    return functools.reduce(getattr, attributes, sys.modules[name])


def _stale(found: FoundEntryPoint, error: ModuleNotFoundError) -> _RefusedError:
    """Explain an entry point whose module is gone."""
    return _RefusedError(
        PluginState.LOAD_FAILED,
        f"there is no module {error.name!r}, which the metadata of {found.distribution} {found.version} names: it is stale. "
        f"Fix: pip uninstall {found.distribution}, or install it again",
        "".join(traceback.format_exception(error)),
    )


def admit(plugin: object, record: PluginRecord, watch: StepWatcher = unwatched) -> Contribution:
    """Verify an imported plugin and probe its backends; the door for entry points and for plugins of this process. Asks for no kernels.

    Args:
        plugin: the module or object that carries the hooks.
        record: name and origin; state, reason, traceback and backends are filled in.
        watch: called before each step.
    """
    try:
        api = _attempt(PluginState.INCOMPATIBLE, "reading KVDOCK_API", lambda: contract.check_api(plugin))
        hooks = _attempt(PluginState.INCOMPATIBLE, "reading the hooks", lambda: contract.find_hooks(plugin, record.name))
        watch("hooks", record.name)
        backends = [backend for hook in hooks.get("kvdock_backends", ()) for backend in _backends(hook)]
        caches, transports = (_classes(hooks, name) for name in ("kvdock_prefix_caches", "kvdock_transports"))
        ops = {name: op for hook in hooks.get("kvdock_ops", ()) for name, op in _ops(hook).items()}
    except _RefusedError as refused:
        return Contribution(attrs.evolve(record, state=refused.state, reason=refused.reason, traceback=refused.trace))
    # Backend by backend: one that fails does not take the others of its plugin with it.
    loaded, records, traces = [], [], []
    for backend in backends:
        ready, outcome, trace = _probe(backend, api, watch)
        loaded += ready
        records.append(outcome)
        traces += [trace] if trace else []
    if not backends:
        record = _without_backends(record, {"prefix caches": caches, "transports": transports, "ops": ops})
    record = attrs.evolve(record, backends=tuple(records), traceback="\n".join(traces), ops=tuple(ops))
    return Contribution(summarise(record), tuple(loaded), caches, transports, ops)


def _backends(hook: Callable[[], Any]) -> list[Backend]:
    return _attempt(PluginState.LOAD_FAILED, "kvdock_backends()", lambda: contract.check_backends(hook()))


def _classes(hooks: contract.Hooks, name: str) -> dict[str, Any]:
    """Return the classes that all implementations of a hook return."""

    def returned(hook: Callable[[], Any]) -> dict[str, Any]:
        return _attempt(PluginState.LOAD_FAILED, f"{name}()", lambda: contract.check_classes(hook(), name))

    return {key: found for hook in hooks.get(name, ()) for key, found in returned(hook).items()}


def _ops(hook: Callable[[], Any]) -> dict[str, Op]:
    return _attempt(PluginState.LOAD_FAILED, "kvdock_ops()", lambda: contract.check_ops(hook()))


def _without_backends(record: PluginRecord, brought: Mapping[str, Mapping[str, Any]]) -> PluginRecord:
    """Describe a plugin that brings no backend: one for something else, or one that found nothing to do here."""
    if brings := [f"brings {what}: {', '.join(names)}" for what, names in brought.items() if names]:
        return attrs.evolve(record, state=PluginState.READY, reason="; ".join(brings))
    return attrs.evolve(record, state=PluginState.ABSENT, reason="kvdock_backends() returned no backend")


def _probe(backend: Backend, api: tuple[int, int], watch: StepWatcher) -> tuple[list[LoadedBackend], BackendRecord, str]:
    """Probe one backend, and if it is ready ask for its capabilities. Returns it if usable, its record, a traceback."""
    name = backend.name
    watch("probe", name)
    try:
        probe = _attempt(PluginState.UNUSABLE, "probe()", lambda: contract.check_probe(backend.probe(), name))
        outcome = BackendRecord(name, backend.device_type, PluginState.of_probe(probe.state), probe.reason)
        if outcome.state is not PluginState.READY:
            return [], outcome, ""
        able = _attempt(PluginState.UNUSABLE, "capabilities()", lambda: contract.check_capabilities(backend.capabilities(), name))
    except _RefusedError as refused:
        return [], BackendRecord(name, backend.device_type, refused.state, refused.reason), refused.trace
    return [LoadedBackend(backend, {}, able, api)], outcome, ""


def ask_kernels(
    loaded: LoadedBackend, record: BackendRecord, ops: Collection[str], watch: StepWatcher = unwatched
) -> tuple[LoadedBackend | None, BackendRecord, str]:
    """Ask a ready backend for its kernels. Returns it if it is still usable, its record, and a traceback.

    Args:
        loaded: the backend.
        record: what became of it so far.
        ops: names of the ops that there are. A kernel for another is never called, and the record says so.
        watch: called before it is asked.
    """
    backend, name = loaded.backend, record.name
    watch("kernels", name)
    try:
        kernels = _attempt(PluginState.UNUSABLE, "kernels()", lambda: contract.check_kernels(backend.kernels(), name))
    except _RefusedError as refused:
        return None, attrs.evolve(record, state=refused.state, reason=refused.reason), refused.trace
    doubts = tuple(contract.unknown_op(op, ops) for op in kernels if op not in ops)
    return attrs.evolve(loaded, kernels=kernels, is_asked=True), attrs.evolve(record, doubts=doubts), ""
