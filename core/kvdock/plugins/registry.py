"""The plugins of a process: found on first use, remembered, and asked for the backend of every op."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError, BackendUnavailableError, KVDockWarning
from kvdock.interface import Backend, Kernel
from kvdock.ops.catalog import CATALOG, Op
from kvdock.ops.selection import Choice, Rejected
from kvdock.plugins.discovery import Discovery, discover
from kvdock.plugins.environment import EnvironmentWatch
from kvdock.plugins.gate import Gate
from kvdock.plugins.loading import LoadedBackend, StepWatcher, admit, unwatched
from kvdock.plugins.precedence import Candidate, Configured, behind, candidates, choice_of, only_one, select, why_unavailable
from kvdock.plugins.records import PluginRecord, PluginState
from kvdock.plugins.refusals import refuse_broken, refuse_taken, report

__all__ = ["Registry"]


class Registry:
    """Finds plugins and chooses backends. Threads may share it; it survives fork, and children of spawn make their own.

    Nothing is loaded before the first question. What was found and what was chosen is kept; `epoch` counts the changes.

    Args:
        environ: environment to read settings from; None is the process's own.
        op_backends: name of the backend to use for an op, by op name.
        device_backends: name of the backend to use for a device type, by type; before the environment's.
        ops: names of the ops that there are. A kernel for another is never called, and is warned of.
        wait_s: how long a thread waits while another one loads plugins, in seconds.
        watch: called before each step of each plugin, as `kvdock.plugins.loading.StepWatcher` describes.
    """

    epoch: int
    """Counts what was registered. Part of every descriptor's key, so that no plan outlives what it was chosen from."""

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        *,
        op_backends: Mapping[str, str] | None = None,
        device_backends: Mapping[str, str] | None = None,
        ops: Collection[str] = CATALOG,
        wait_s: float = 300.0,
        watch: StepWatcher = unwatched,
    ) -> None:
        self.epoch = 0
        self._configured = Configured(dict(op_backends or {}), dict(device_backends or {}))
        self._environment = EnvironmentWatch(environ)
        self._gate = Gate(wait_s, self._after_fork)
        self._watch = watch
        self._ops = ops
        self._known: Discovery | None = None
        self._choices: dict[tuple[str, torch.device, str | None], Choice] = {}
        self._untold: list[str] = []

    def choose(self, op: str, device: torch.device, named: str | None = None) -> Choice:
        """Return the backend for ``op`` on ``device``. See `kvdock.plugins.precedence` for the order.

        Args:
            op: name of the op.
            device: device of the tensors, with its index.
            named: backend that the caller asked for by name. It need not claim the device, but must run on it.

        Raises:
            NoBackendError: no ready backend claims the device; lists every plugin with its state and reason.
            BackendUnavailableError: the named or configured backend does not exist, is not ready, or does not run there.
            AmbiguousBackendError: several are ready and none is preferred.
            DiscoveryReentryError: called by a plugin while plugins are being loaded.
        """
        choice = self._choices.get((op, device, named))
        return choice if choice is not None else self._decide(op, device, named)

    def _decide(self, op: str, device: torch.device, named: str | None) -> Choice:
        known = self._discovery()
        self._environment.check(known.settings)
        with self._gate.held():
            # Under the lock, so that what is remembered is not older than what is registered.
            loaded, reason = select(self._discovery(), self._configured, op, device, named)
            while not loaded.is_asked:  # kernels are asked for when they are first needed: making them may take long
                known = self._ask_kernels(loaded.backend.name)
                if loaded.backend.name in known.loaded:
                    loaded = known.loaded[loaded.backend.name]
                else:
                    loaded, reason = select(known, self._configured, op, device, named)
            choice = self._choices[op, device, named] = choice_of(loaded, reason, op)
        self._tell()
        return choice

    def instead(
        self, op: str, device: torch.device, rejected: Rejected, against: Callable[[Choice], tuple[str, ...]]
    ) -> tuple[Choice | None, Rejected]:
        """Return who else serves a request, and all who were asked and do not: see `Chooser.instead`.

        Who is configured comes first, as for every call, and the others behind it. A tie is one of those that serve the request.
        """
        for priority, names in behind(self._discovery(), device, rejected[0][0]):
            asked = [(choice, against(choice)) for choice in self._with_kernels(names, op, f"claims {device} with priority {priority}")]
            rejected += tuple((choice.backend.name, reasons) for choice, reasons in asked if reasons)
            able = [choice for choice, reasons in asked if not reasons]
            if able:
                return only_one(op, device, able, priority, rejected), rejected
        return None, rejected

    def _with_kernels(self, names: Sequence[str], op: str, reason: str) -> list[Choice]:
        """Return backends as choices, once they were asked for their kernels; one that fails to bring them is not among them."""
        with self._gate.held():
            for name in names:
                if name in (known := self._discovery().loaded) and not known[name].is_asked:
                    self._ask_kernels(name)
            known = self._discovery().loaded
        self._tell()
        return [choice_of(known[name], reason, op) for name in names if name in known]

    def _ask_kernels(self, name: str) -> Discovery:
        """Ask a backend for its kernels, and return what is known then: one that fails is ready no more. Hold the lock."""
        with self._gate.loading():
            known = self._discovery()
            known, told = known.with_kernels(name, {*self._ops, *known.ops}, self._step)
        self._known = known
        self._untold += told
        return known

    def _tell(self) -> None:
        """Warn of what came out when backends were asked for kernels. Outside the lock: a warning may raise, or ask for a backend."""
        while self._untold:
            warnings.warn(f"{self._untold.pop()}. `kvdock doctor` shows details", KVDockWarning, stacklevel=5)

    def _complete(self) -> Discovery:
        """Return what is known, once every backend that is ready was asked for its kernels."""
        self._discovery()
        with self._gate.held():
            for name in [name for name, loaded in self._discovery().loaded.items() if not loaded.is_asked]:
                self._ask_kernels(name)
            known = self._discovery()
        self._tell()
        return known

    def _discovery(self) -> Discovery:
        """Return what is known, loading plugins the first time."""
        if self._known is not None:
            return self._known
        with self._gate.held():
            if self._known is not None:
                return self._known
            settings = self._environment.settings()
            with self._gate.loading():
                known = self._known = discover(settings, self._step)
        self._environment.loaded_with(settings)
        # Outside the lock: a warning may raise, or run code that asks for a backend.
        report(known)
        return known

    def _step(self, step: str, subject: str) -> None:
        self._gate.watch(step, subject)
        self._watch(step, subject)

    def records(self) -> tuple[PluginRecord, ...]:
        """Return what became of each plugin, sorted by name; those registered in this process come last."""
        known = self._complete()
        self._environment.check(known.settings)
        return known.records

    def notes(self) -> tuple[str, ...]:
        """Return what there is to tell beside the records, such as an allowed name that is not installed."""
        return self._discovery().notes

    def candidates(self, device: torch.device) -> list[Candidate]:
        """Return every backend, and every plugin without one, with why it does or does not come into question for a device."""
        return candidates(self._discovery(), device)

    def claimants(self, device: torch.device) -> list[Backend]:
        """Return the backends that are ready and claim a device, sorted by name."""
        return [self.backend(item.name) for item in sorted(self.candidates(device), key=lambda item: item.name) if item.claims]

    def loaded(self) -> Mapping[str, LoadedBackend]:
        """Return the backends that are ready, by name, with their kernels and capabilities."""
        return self._complete().loaded

    def prefix_caches(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the prefix caches that plugins bring: classes by name, by plugin."""
        return self._discovery().prefix_caches

    def transports(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the transports that plugins bring: classes by name, by plugin."""
        return self._discovery().transports

    def brought_ops(self) -> Mapping[str, Op]:
        """Return the ops that plugins bring, by name."""
        return self._discovery().ops

    def backend(self, name: str) -> Backend:
        """Return a backend that is ready.

        Raises:
            BackendUnavailableError: it does not exist or is not ready; says its state and reason.
        """
        return self._ready(name).backend

    def _ready(self, name: str, known: Discovery | None = None) -> LoadedBackend:
        known = known or self._discovery()
        try:
            return known.loaded[name]
        except KeyError:
            raise BackendUnavailableError(f"backend {name!r}: {why_unavailable(known, name)}") from None

    def register(self, plugin: object, name: str) -> PluginRecord:
        """Register a plugin of this process: the same door as an entry point's, without the entry point.

        The lists in the environment do not apply: they decide what is loaded unasked.

        Args:
            plugin: module or object with the hooks and KVDOCK_API.
            name: name of the plugin.

        Raises:
            ArgumentValueError: the name, or the name of one of its backends, is taken.
            PluginError: the plugin does not keep to the contract, or raised; nothing of it stays.
        """
        self._discovery()
        value = getattr(plugin, "__name__", None) or type(plugin).__name__
        with self._gate.held():
            contribution = admit(plugin, PluginRecord(name, value, None, None, PluginState.READY), self._watch)
            known = self._discovery()
            refuse_broken(contribution.record)
            refuse_taken(contribution.record, contribution.ops, known)
            new = known.plus(contribution)
            for loaded in contribution.backends:  # it is needed, or nobody would register it
                new, told = new.with_kernels(loaded.backend.name, {*self._ops, *new.ops}, self._watch)
                self._untold += told
            record = new.records[-1]
            refuse_broken(record)
            self._change(new)
        self._tell()
        return record

    def register_kernel(self, backend: str, op: str, kernel: Kernel, *, override: bool = False) -> None:
        """Give a backend a kernel for an op, or replace the one it has.

        Args:
            backend: name of a backend that is ready.
            op: name of the op.
            kernel: the kernel.
            override: allow it to replace a kernel; `explain` then says so.

        Raises:
            BackendUnavailableError: the backend does not exist or is not ready.
            ArgumentTypeError: ``kernel`` is no `Kernel`.
            ArgumentValueError: there is no such op; or there is a kernel already, and ``override`` is False.
        """
        if not isinstance(kernel, Kernel):
            raise ArgumentTypeError("register_kernel: kernel", expected="a kvdock.plugin.Kernel object", got=repr(kernel))
        self._discovery()
        with self._gate.held():
            known = self._complete()
            old = self._ready(backend, known)
            if op not in (ops := {*self._ops, *known.ops}):
                raise ArgumentValueError("register_kernel: op", expected=f"one of {', '.join(sorted(ops))}", got=repr(op))
            kernels = old.kernels
            if op in kernels and not override:
                raise ArgumentValueError(
                    f"register_kernel: op {op!r} of backend {backend!r}",
                    expected="an op without a kernel",
                    got=f"one served by {type(kernels[op]).__name__}",
                    fix="pass override=True to replace it",
                )
            overridden = old.overridden | ({op} if op in kernels else set())
            new = attrs.evolve(old, kernels={**kernels, op: kernel}, overridden=overridden)
            self._change(self._discovery().with_backend(new))

    def choose_anew(self) -> None:
        """Forget what was chosen, as at every change: the next call of each op asks again, and finds no older plan."""
        self._discovery()
        with self._gate.held():
            self._change(self._discovery())

    def _change(self, known: Discovery) -> None:
        """Take over a change, and forget what was chosen before it."""
        self._known = known
        self._choices.clear()
        # Last: whoever sees the new number finds no old choice.
        self.epoch += 1

    def _after_fork(self) -> None:
        """Choose anew in a forked child, so that an environment that its parent did not have is noticed."""
        self._choices = {}
