"""Faults of plans: prepared too often, used for what they were not made for, sharing what is not theirs, ending badly."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

import kvdock
from kvdock import runtime
from kvdock.interface import TensorMeta
from kvdock_conformance.cases.every_op import OPS
from kvdock_conformance.faults.fault import Args, BackendCall, Faults, FaultyCall
from kvdock_conformance.faults.tensors import restrided

__all__ = ["FAULTS", "OwnKernel", "OwnPlan", "of_the_key_pool"]

FAULTS = Faults("descriptors")
_WRITE, _STATIC, _GATHER, _COPY = OPS


# Too many plans


@FAULTS.function(_WRITE, "desc-prepared-at-each-call", "Plans are forgotten after each call.", "KVD-DESC-001", "KVD-DESC-002")
def _prepared_at_each_call(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **scales: Any) -> Any:
        result = function(*args, **scales)
        runtime.default().dispatcher.descriptors.clear(_WRITE)
        return result

    return call


@FAULTS.function(_GATHER, "desc-a-plan-for-each-token-count", "A token count that is new makes all plans anew.", "KVD-DESC-002")
def _a_plan_for_each_count(function: Callable[..., Any]) -> Callable[..., Any]:
    counts = set()

    def call(k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, **others: Any) -> Any:
        if slot_mapping.numel() not in counts:
            counts.add(slot_mapping.numel())
            runtime.default().dispatcher.descriptors.clear(_GATHER)
        return function(k_cache, v_cache, slot_mapping, **others)

    return call


# Kernels and plans around those of the backend


class OwnKernel(kvdock.plugin.Kernel):
    """A kernel that does what the backend's own does, and has room to keep something."""

    def __init__(self, inner: kvdock.plugin.Kernel) -> None:
        self._inner = inner
        self.kept: dict[Any, Any] = {}

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        """Ask the backend."""
        return self._inner.supports(request)

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        """Prepare what the backend does, made faulty."""
        return self.faulty(request, self._inner.prepare(self.altered(request)))

    def altered(self, request: kvdock.plugin.Request) -> kvdock.plugin.Request:
        """Return what the backend is asked to prepare for."""
        return request

    def faulty(self, request: kvdock.plugin.Request, plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
        """Return a faulty plan in place of the backend's."""
        return plan


class OwnPlan(kvdock.plugin.Descriptor):
    """A plan that does what the backend's own does, and has something of its kernel's."""

    def __init__(self, inner: kvdock.plugin.Descriptor, own: Any = None) -> None:
        self.inner, self.own = inner, own

    def __call__(self, *args: Any) -> None:
        """Make the call."""
        self.inner(*args)
        self.workspace_bytes = self.inner.workspace_bytes

    def destroy(self) -> None:
        """Destroy what is inside."""
        self.inner.destroy()


# Used for what they were not made for


@FAULTS.kernel(
    _STATIC, "desc-found-by-shapes-alone", "A plan is found by the shapes of the caches, whatever their strides.", "KVD-DESC-003"
)
class _FoundByShapes(OwnKernel):
    """Keeps the strides of the first cache of each shape."""

    def _strides(self, request: kvdock.plugin.Request) -> tuple[int, ...] | None:
        """Return the strides of the first cache of this one's shape."""
        meta = request.tensor("k_cache")
        return self.kept.setdefault((meta.shape, meta.dtype), meta.strides)

    def altered(self, request: kvdock.plugin.Request) -> kvdock.plugin.Request:
        """Ask for the first strides: a plan may hold them from the start."""
        cache = attrs.evolve(request.tensor("k_cache"), strides=self._strides(request))
        return attrs.evolve(request, args={**request.args, "k_cache": cache})

    def faulty(self, request: kvdock.plugin.Request, plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
        """Show it the first strides: or it may read them at each call."""
        strides = self._strides(request)
        return plan if strides is None or 0 in strides else _OldStrides(plan, strides)


class _OldStrides(OwnPlan):
    """Sees the key cache by strides that were those of another."""

    def __call__(self, k_cache: torch.Tensor, *args: Any) -> None:
        self.inner(restrided(k_cache, self.own), *args)


@FAULTS.kernel(_WRITE, "desc-found-by-all-but-alignment", "A plan is found by all but the alignment of its tensors.", "KVD-DESC-004")
class _FoundByAllButAlignment(OwnKernel):
    """Keeps the alignment of the first request that is otherwise the same."""

    def faulty(self, request: kvdock.plugin.Request, plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
        metas = [meta for meta in request.args.values() if isinstance(meta, TensorMeta)]
        key = tuple((meta.dtype, meta.shape, meta.strides) for meta in metas)
        return _WideReads(plan, self.kept.setdefault(key, request.tensor("k").alignment))


class _WideReads(OwnPlan):
    """Reads keys from the multiple of so many bytes at or before them."""

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, *args: Any) -> None:
        past = k.data_ptr() % self.own // k.element_size()
        self.inner(k_cache, v_cache, restrided(k, k.stride(), -past), *args)


@FAULTS.kernel(_WRITE, "desc-capacity-of-the-last-plan", "Slots are checked against the pool that was prepared for last.", "KVD-DESC-003")
class _LastCapacity(OwnKernel):
    """Keeps one capacity."""

    capacity = 0

    def faulty(self, request: kvdock.plugin.Request, plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
        blocks, block, *_ = request.tensor("k_cache").shape
        self.capacity = (blocks or 0) * (block or 0)
        return _CheckedByKernel(plan, self)


class _CheckedByKernel(OwnPlan):
    def __call__(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, *args: Any
    ) -> None:
        self.inner(k_cache, v_cache, k, v, slots.masked_fill(slots >= self.own.capacity, -1), *args)


# Sharing what is not theirs


@FAULTS.kernel(
    _WRITE, "desc-one-plan-at-a-time", "Preparing a plan takes from the one before what it needs.", "KVD-DESC-003", "KVD-DESC-006"
)
class _OnePlanAtATime(OwnKernel):
    """Has room for one plan."""

    last: _Mortal | None = None

    def faulty(self, request: kvdock.plugin.Request, plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
        if self.last is not None:
            self.last.is_alive = False
        self.last = _Mortal(plan)
        return self.last


class _Mortal(OwnPlan):
    """Does nothing once it is no longer alive."""

    is_alive = True

    def __call__(self, *args: Any) -> None:
        if self.is_alive:
            self.inner(*args)


@FAULTS.kernel(_COPY, "desc-one-for-all-who-ask", "All who ask for the same get one descriptor.", "KVD-DESC-012")
class _OneForAll(OwnKernel):
    """Keeps descriptors by request."""

    def faulty(self, request: kvdock.plugin.Request, plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
        found: kvdock.plugin.Descriptor = self.kept.setdefault(repr(request), plan)
        return found


@FAULTS.kernel(
    _WRITE, "desc-arguments-shared-by-threads", "Two calls at once of two threads share one buffer of arguments.", "KVD-DESC-007"
)
class _SharedArguments(OwnKernel):
    """Has one buffer of arguments."""

    arguments: tuple[Any, ...] = ()

    def faulty(self, request: kvdock.plugin.Request, plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
        return _UsesBuffer(plan, self)


class _UsesBuffer(OwnPlan):
    """Takes its arguments by way of its kernel."""

    def __call__(self, *args: Any) -> None:
        """Make the call that is in the buffer by the time the device gets there."""
        self.own.arguments = args
        time.sleep(0.01)
        self.inner(*self.own.arguments)


@FAULTS.kernel(
    _STATIC, "desc-works-in-its-first-thread", "Kernels are loaded in the first thread that asks, and missing in others.", "KVD-DESC-007"
)
class _FirstThread(OwnKernel):
    """Knows the thread that it is for."""

    thread: int | None = None

    def faulty(self, request: kvdock.plugin.Request, plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
        """Return a plan that does nothing in another thread."""
        self.thread = self.thread or threading.get_ident()
        found = _Mortal(plan)
        found.is_alive = self.thread == threading.get_ident()
        return found


# Ending badly


@FAULTS.kernel(
    _GATHER,
    "desc-frees-what-others-use",
    "Destroying one plan frees the compiled kernel of all.",
    "KVD-DESC-005",
    "KVD-DESC-008",
    "KVD-DESC-012",
)
class _FreesAll(OwnKernel):
    """Has one compiled kernel for all plans."""

    is_loaded = True

    def faulty(self, request: kvdock.plugin.Request, plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
        return _Freeing(plan, self)


class _Freeing(OwnPlan):
    """Frees the compiled kernel when it is destroyed."""

    def __call__(self, *args: Any) -> None:
        if self.own.is_loaded:
            self.inner(*args)

    def destroy(self) -> None:
        self.own.is_loaded = False


@FAULTS.planned(
    _WRITE, "desc-destroyed-again-when-collected", "A plan is destroyed once more when it is collected.", "KVD-DESC-005", "KVD-DESC-008"
)
class _CleansUp(OwnPlan):
    """Destroys itself when it is collected, whoever did so before, and outside of any guard."""

    def __del__(self) -> None:
        self.destroy()


@FAULTS.planned(_COPY, "desc-destroy-closes-stdin", "A plan that has opened nothing closes the descriptor 0.", "KVD-DESC-005")
class _ClosesStdin(OwnPlan):
    def destroy(self) -> None:
        os.close(0)
        super().destroy()


@FAULTS.planned(_COPY, "desc-destroy-raises", "Destroying a plan raises.", "KVD-DESC-005")
class _Undestroyable(OwnPlan):
    def destroy(self) -> None:
        raise RuntimeError("invalid handle")


@FAULTS.kernel(
    _GATHER, "desc-destroyed-by-the-next-one", "Preparing a plan destroys the one before it, which may be running.", "KVD-DESC-006"
)
class _DestroysItself(OwnKernel):
    """Makes plans that end when another one begins."""

    running: OwnPlan | None = None

    def faulty(self, request: kvdock.plugin.Request, plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
        if self.running is not None:
            self.running.destroy()
        self.running = OwnPlan(plan)
        return self.running


@FAULTS.planned(_STATIC, "desc-tensors-kept", "A plan keeps the arguments of its last call.", "KVD-DESC-011")
class _Remembers(OwnPlan):
    """Keeps its arguments."""

    last: tuple[Any, ...] = ()

    def __call__(self, *args: Any) -> None:
        self.last = args
        self.inner(*args)


@FAULTS.planned(_STATIC, "desc-memory-kept", "A plan keeps views of the arguments of its last call.", "KVD-DESC-011")
class _KeepsViews(OwnPlan):
    """Keeps the memory of its arguments."""

    def __call__(self, *args: Any) -> None:
        self.inner(*args)
        self.last = [value[...] for value in args if isinstance(value, torch.Tensor)]


@FAULTS.planned(_COPY, "desc-room-of-its-own", "A plan has 2 MiB of scratch memory for good.", "KVD-DESC-011", by_address=True)
class _HasRoom(OwnPlan):
    """Has memory before it is called."""

    def __init__(self, inner: kvdock.plugin.Descriptor, own: Any = None) -> None:
        super().__init__(inner, own)
        self.room = torch.zeros(1 << 21, dtype=torch.uint8)


@FAULTS.planned(_GATHER, "desc-never-called-raises", "Destroying a plan that was never called raises.", "KVD-DESC-005", "KVD-DESC-012")
class _CountsCalls(OwnPlan):
    """Makes what it destroys when it is called."""

    def __call__(self, *args: Any) -> None:
        self.inner(*args)
        self.made = True

    def destroy(self) -> None:
        del self.made
        self.inner.destroy()


# What they say of themselves


@FAULTS.kernel(_WRITE, "desc-workspace-unknown", "A plan does not know its workspace before its first call.", "KVD-DESC-009")
class _WorkspaceUnknown(OwnKernel):
    """Makes plans that do not say how much they need."""

    def faulty(self, request: kvdock.plugin.Request, plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
        found = OwnPlan(plan)
        found.workspace_bytes = None  # type: ignore[assignment]  # that is the fault
        return found


@FAULTS.planned(_STATIC, "desc-workspace-grows-negative", "After a call, a plan says that it needs less than nothing.", "KVD-DESC-009")
class _GivesBack(OwnPlan):
    """Counts what it gives back, and not what it takes."""

    def __call__(self, *args: Any) -> None:
        self.inner(*args)
        self.workspace_bytes -= 1024


@FAULTS.kernel(_WRITE, "desc-reason-is-a-string", "supports() returns one reason, instead of a list of them.", "KVD-DESC-010")
class _ReasonIsAString(OwnKernel):
    """Says no to float16 in a word."""

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        return "no float16" if request.tensor("k_cache").dtype == torch.float16 else self._inner.supports(request)


@FAULTS.kernel(_GATHER, "desc-supports-tries-memory", "supports() fills as much memory as a pool has, up to 256 MiB.", "KVD-DESC-010")
class _TriesMemory(OwnKernel):
    """Makes a pool of its own for each question."""

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        for meta in request.args.values():
            if isinstance(meta, kvdock.plugin.TensorMeta) and None not in meta.shape:
                torch.zeros(min(math.prod(meta.shape), 1 << 28), dtype=torch.uint8)  # type: ignore[arg-type]  # sizes that are known
        return self._inner.supports(request)


@FAULTS.kernel(_STATIC, "desc-supports-changes-its-mind", "supports() says no where it said yes the last time.", "KVD-DESC-010")
class _ChangesItsMind(OwnKernel):
    """Says no to float32 every other time."""

    asked = 0

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        if request.tensor("k_cache").dtype != torch.float32:
            return self._inner.supports(request)
        self.asked += 1
        return [] if self.asked % 2 else ["no room"]


@FAULTS.kernel(
    _GATHER, "desc-supports-changes-the-request", "supports() rounds the alignment in the request that it is asked about.", "KVD-DESC-010"
)
class _ChangesTheRequest(OwnKernel):
    """Takes every tensor for one at a multiple of 16 bytes, and says so in the request."""

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        args: Any = request.args
        for name, meta in list(args.items()):
            if isinstance(meta, TensorMeta):
                args[name] = attrs.evolve(meta, alignment=32)
        return self._inner.supports(request)


@FAULTS.kernel(_WRITE, "desc-answers-known-by-shape", "supports() remembers its answers by shapes, whatever the dtypes.", "KVD-DESC-010")
class _KnownByShape(OwnKernel):
    """Keeps the first answer about each shape."""

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        shapes = str([request.tensor(name).shape for name in ("k_cache", "v_cache")])
        found: Sequence[str] = self.kept.setdefault(shapes, self._inner.supports(request))
        return found


def of_the_key_pool() -> FaultyCall:
    """Return a call that finds the pool of values by the address of that of keys."""
    kept: dict[Any, torch.Tensor] = {}

    def call(run: BackendCall, args: Args) -> None:
        keys, values = args["k_cache"], args["v_cache"]
        run({**args, "v_cache": kept.setdefault((keys.data_ptr(), values.shape, values.stride()), values)})

    return call


for _op in OPS:
    _sentence = "A plan finds the pool of values by the address of that of keys, of the first call."
    FAULTS.plan(_op, f"desc-values-by-the-keys-of-{_op.strip('_')}", _sentence, "KVD-DESC-013")(of_the_key_pool)
