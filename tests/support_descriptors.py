"""Descriptors that notice when they are misused, and a backend with two devices on host memory that makes them."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

import kvdock
from kvdock.descriptors.manager import DescriptorCacheManager
from kvdock.ops import entry, validate
from kvdock.ops.catalog import CATALOG
from kvdock.ops.dispatcher import OpDispatcher
from kvdock.ops.memory import unlike_memory
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock.ops.schema import OpSchema
from kvdock.ops.tracing import is_intercepted
from kvdock.plugins.registry import Registry
from support_plugins import QUIET, CallDescriptor, InProcessBackend, plugin

DEVICES = ("privateuseone:0", "privateuseone:1")
"""torch's names of the two devices: the type that torch reserves for devices it does not know."""


class Ledger:
    """What became of all descriptors: how many were made and destroyed, and everything that must not have happened."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.made: list[weakref.ref[Any]] = []
        self.destroyed: list[str] = []
        self.lock = threading.Lock()

    @property
    def alive(self) -> int:
        """How many of the descriptors that were made are still in memory."""
        return sum(reference() is not None for reference in self.made)


class Watched:
    """Something that may be used until it is destroyed, which is once, by the thread that made it, and not while it is used."""

    def __init__(self, ledger: Ledger, name: str = "", *, pinned: bool = False) -> None:
        self.ledger = ledger
        self.name = name
        self.pinned = pinned
        self.owner = threading.get_ident()
        self.uses = 0
        self.is_destroyed = False
        with ledger.lock:
            ledger.made.append(weakref.ref(self))

    def expect(self, holds: bool, fault: str) -> None:
        if not holds:
            self.ledger.faults.append(f"{self.name}: {fault}")

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        self.expect(not self.is_destroyed, "used after it was destroyed")
        self.expect(threading.get_ident() == self.owner, "used by another thread")
        self.uses += 1
        try:
            yield
        finally:
            self.uses -= 1

    def destroy(self) -> None:
        self.expect(not self.is_destroyed, "destroyed twice")
        self.expect(not self.uses, "destroyed while in use")
        self.is_destroyed = True
        self.ledger.destroyed.append(self.name)
        if threading.get_ident() != self.owner:
            self.ledger.faults.append(f"{self.name}: destroyed by another thread")


class DeviceTensor(torch.Tensor):
    """A tensor that says it is on another device, and whose memory is that of a tensor of the host."""

    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # its attributes are read like any tensor's

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: str) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), dtype=host.dtype, device=torch.device(device)
        )
        made.host = host
        return made

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} on a device that has no operations but kvdock's")


def _unlike_memory(name: str, tensor: torch.Tensor) -> tuple[str, str] | None:
    """Take a `DeviceTensor` for the plain tensor of a device that it stands for; judge all others."""
    return None if isinstance(tensor, DeviceTensor) else unlike_memory(name, tensor)


def _is_intercepted(values: tuple[Any, ...]) -> bool:
    """Show nobody the calls on a `DeviceTensor`, as nobody is shown those on the plain tensor of a device."""
    return is_intercepted(tuple(value for value in values if not isinstance(value, DeviceTensor)))


validate.unlike_memory = _unlike_memory
entry.is_intercepted = _is_intercepted


def on(device: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on a device, on the memory of this one."""
    return tensor if device == "cpu" else DeviceTensor(tensor, device)


def on_host(value: Any) -> Any:
    """Return an argument as the host sees it."""
    return value.host if isinstance(value, DeviceTensor) else value


class WatchedDescriptor(kvdock.plugin.Descriptor):
    """Runs a portable kernel on the host's view of its arguments, and notices wrong ones."""

    uses_autograd = False

    def __init__(self, request: kvdock.plugin.Request, run: kvdock.plugin.Descriptor, backend: WatchingBackend, **settings: Any) -> None:
        self.request = request
        self.run = run
        self.backend = backend
        self.watched = Watched(backend.ledger, f"{request.op} on {request.device}")
        vars(self).update(settings)

    def __call__(self, *args: Any) -> None:
        with self.watched.in_use():
            for value, (name, meta) in zip(args, self.request.args.items(), strict=True):
                if isinstance(value, torch.Tensor):
                    sizes = [size for size, fixed in zip(value.shape, meta.shape, strict=True) if fixed is not None]
                    same = (value.dtype, value.device, sizes) == (meta.dtype, self.request.device, [s for s in meta.shape if s is not None])
                    self.watched.expect(same, f"{name} is not what was prepared for")
            if self.notes_capture and self.backend.capturing:
                self.pinned = True
            self.run(*map(on_host, args))

    def destroy(self) -> None:
        self.watched.expect(self.backend.current == self.request.device, "destroyed outside of its device")
        self.watched.destroy()


@attrs.define
class WatchedKernel(kvdock.plugin.Kernel):
    """Prepares `WatchedDescriptor`."""

    run: kvdock.plugin.Kernel
    backend: WatchingBackend
    settings: dict[str, Any] = attrs.Factory(dict)
    prepared: list[kvdock.plugin.Request] = attrs.Factory(list)

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        return ()

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        self.prepared.append(request)
        same = attrs.evolve(request, device=torch.device("cpu"))
        return WatchedDescriptor(request, self.run.prepare(same), self.backend, **self.settings)


class WatchingBackend(InProcessBackend):
    """A backend for the host and the two devices, which knows which of them is current in each thread."""

    def __init__(
        self, kernels: Mapping[str, kvdock.plugin.Kernel] = PORTABLE_KERNELS, *, graph_capture: bool = False, **settings: Any
    ) -> None:
        devices = ("cpu", *DEVICES)
        super().__init__("watching", claims=("cpu", "privateuseone"), devices=devices)
        self.ledger = Ledger()
        self.capturing = False
        self.own = {op: WatchedKernel(kernel, self, settings) for op, kernel in kernels.items()}
        self._graph_capture = graph_capture
        self._local = threading.local()

    @property
    def current(self) -> torch.device | None:
        return getattr(self._local, "device", None)

    @contextlib.contextmanager
    def device_guard(self, device: torch.device) -> Iterator[None]:
        before, self._local.device = self.current, device
        try:
            yield
        finally:
            self._local.device = before

    def kernels(self) -> Mapping[str, kvdock.plugin.Kernel]:
        return self.own

    def capabilities(self) -> kvdock.plugin.Capabilities:
        return kvdock.plugin.Capabilities(graph_capture=self._graph_capture)

    def is_capturing(self, device: torch.device) -> bool:
        self.asked.append("is_capturing")
        return self.capturing


def dispatcher_of(backend: kvdock.plugin.Backend, capacity: int = 100, schemas: Mapping[str, OpSchema] | None = None) -> OpDispatcher:
    """Return a dispatcher of its own for one backend."""
    registry = Registry(QUIET, ops=schemas or CATALOG)
    registry.register(plugin(backend), "made by a test")
    names = schemas or PORTABLE_KERNELS
    descriptors = DescriptorCacheManager(dict.fromkeys(names, capacity))
    return OpDispatcher(registry, descriptors=descriptors) if schemas is None else OpDispatcher(registry, schemas, descriptors)


class Pool:
    """Small pools on a device, and calls of `paged_caching_` on them that check what was written.

    Heads and dim are in a plan's key, so that pools of other heads need another plan.
    """

    def __init__(self, device: str = "cpu", heads: int = 1, dim: int = 4) -> None:
        self.device = device
        self.memory = [torch.zeros(3, 2, heads, dim) for _ in range(2)]
        self.caches = [on(device, memory) for memory in self.memory]
        self.shape = (heads, dim)
        self._expected = [torch.zeros(6, heads, dim) for _ in range(2)]

    def write(self, dispatcher: OpDispatcher, number: float, slot: int = 3, tokens: int = 1) -> bool:
        """Write a number to the elements of some tokens; say whether it arrived, and nothing else changed."""
        new = [torch.full((tokens, *self.shape), number), torch.full((tokens, *self.shape), -number)]
        slots = torch.arange(slot, slot + tokens)
        dispatcher.op("paged_caching_").call(*self.caches, *(on(self.device, x) for x in (*new, slots)), None, None)
        for expected, rows in zip(self._expected, new, strict=True):
            expected[slot : slot + tokens] = rows
        return all(torch.equal(want, have.view_as(want)) for want, have in zip(self._expected, self.memory, strict=True))


class RowsKernel(kvdock.plugin.Kernel):
    """Writes rows with as few operations as torch allows: for many calls of which the kernel is not the point."""

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        return ()

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        return CallDescriptor(self.write)

    def write(self, k_cache: Any, v_cache: Any, k: Any, v: Any, slots: Any, *scales: Any) -> None:
        for cache, rows in ((k_cache, k), (v_cache, v)):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows)


def in_thread(work: Any, *args: Any) -> Any:
    """Run something in a thread of its own that ends with it; returns or raises what it does."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((True, work(*args)))
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            result.append((False, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(100)
    assert result, "the thread did not end"
    went_well, value = result.pop()
    if not went_well:
        raise value
    return value


class Nap(kvdock.plugin.Kernel):
    """Prepares what writes nothing, and at times never ends."""

    forever = False
    naps = threading.Event()

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        return ()

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        return CallDescriptor(self.rest)

    def rest(self, *args: Any) -> None:
        if self.forever:
            self.naps.set()
            threading.Event().wait()
