"""Watching the plans of a backend: how they are prepared, called and destroyed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

import kvdock
from kvdock.interface import TensorMeta
from kvdock.ops.validate import validate
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.meaning import kernels_over, schema_of
from kvdock_conformance.checking.target import Target

__all__ = ["KernelWatch", "WatchedKernel", "WatchedPlan", "misfit", "watched"]


class KernelWatch:
    """What happened to the plans of one op while it was watched."""

    def __init__(self) -> None:
        self.prepared: list[WatchedPlan] = []
        """Every plan that was prepared."""
        self.before_call: Callable[[WatchedPlan], None] = lambda plan: None
        """Called with a plan before each of its calls."""
        self._guards = threading.local()

    @property
    def guarded(self) -> list[torch.device]:
        """Devices whose `Backend.device_guard` the calling thread has entered."""
        entered: list[torch.device] = self._guards.__dict__.setdefault("entered", [])
        return entered

    @contextlib.contextmanager
    def guard(self, inner: Callable[[torch.device], AbstractContextManager[Any]], device: torch.device) -> Iterator[None]:
        """Enter the backend's guard of a device, and note it."""
        with inner(device):
            self.guarded.append(device)
            try:
                yield
            finally:
                self.guarded.pop()

    def check_ends(self, op: str) -> None:
        """Check how the plans that should be gone by now have ended.

        Raises:
            NonconformanceError: one was not destroyed once, or not under its device.
        """
        for number, plan in enumerate(self.prepared):
            if len(plan.ends) != 1:
                raise NonconformanceError(f"{op}: destroy() of plan {number}", expected="called once", got=f"{len(plan.ends)} calls")
            if plan.request.device not in plan.ends[0]:
                raise NonconformanceError(
                    f"{op}: destroy() of plan {number}", expected=f"under device_guard({plan.request.device})", got=f"under {plan.ends[0]}"
                )


class WatchedPlan(kvdock.plugin.Descriptor):
    """A plan of the backend, watched."""

    def __init__(self, watch: KernelWatch, request: kvdock.plugin.Request, inner: kvdock.plugin.Descriptor) -> None:
        self.request = request
        self.ends: list[list[torch.device]] = []
        """For each time that it was destroyed, the devices whose guard was entered."""
        self._watch = watch
        self._inner: kvdock.plugin.Descriptor | None = inner
        self.uses_autograd = inner.uses_autograd
        self.notes_capture = inner.notes_capture
        ends, destroy = self.ends, inner.destroy

        def noting() -> None:
            ends.append(list(watch.guarded))
            destroy()

        self._destroy = noting
        with contextlib.suppress(AttributeError):  # it has slots: then what it does by itself is not seen
            inner.destroy = noting  # type: ignore[method-assign]  # so that it is seen, whoever calls it

    def __call__(self, *args: Any) -> None:
        """Make the call, if the plan fits it and is still there."""
        # Refused here and not by the plan: a kernel whose plans survive destroy() would hide the mistake.
        if self._inner is None:
            raise NonconformanceError(f"{self.request.op}: a plan", expected="no call after destroy()", got="a call")
        wrong = misfit(self.request, validate(schema_of(self.request.op), args))
        if wrong:
            raise NonconformanceError(f"{self.request.op}: a plan", expected="calls that it was prepared for", got=wrong)
        self._watch.before_call(self)
        self._inner(*args)

    def destroy(self) -> None:
        """Destroy what is watched, and release it."""
        self._inner = None
        self._destroy()
        del self._destroy


class WatchedKernel(kvdock.plugin.Kernel):
    """The backend's own kernel, its plans watched."""

    def __init__(self, watch: KernelWatch, inner: kvdock.plugin.Kernel) -> None:
        self._watch = watch
        self._inner = inner

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        """Ask the backend."""
        return self._inner.supports(request)

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        """Prepare what the backend prepares, and note it."""
        plan = WatchedPlan(self._watch, request, self._inner.prepare(request))
        self._watch.prepared.append(plan)
        return plan


def misfit(planned: kvdock.plugin.Request, actual: kvdock.plugin.Request) -> str:
    """Return what of a call does not fit the request that its plan was made for; empty when all does."""
    for name, meta in planned.args.items():
        came = actual.args[name]
        if not isinstance(meta, TensorMeta) or not isinstance(came, TensorMeta):
            if meta != came:
                return f"{name} is {came}, not {meta}"
        elif (meta.dtype, meta.shape, meta.strides) != (came.dtype, came.shape, came.strides):
            return f"{name} is {came}, not {meta}"
        elif came.alignment % meta.alignment:
            return f"{name} is aligned to {came.alignment} bytes, not to {meta.alignment}"
    return ""


@contextlib.contextmanager
def watched(target: Target, op: str) -> Iterator[KernelWatch]:
    """Watch the kernels that serve an op in a block. Plans from before are not found in it, nor those of it later."""
    watch, guard = KernelWatch(), target.backend.device_guard
    with (
        kernels_over(target, op, lambda inner: WatchedKernel(watch, inner)),
        mock.patch.object(target.backend, "device_guard", lambda device: watch.guard(guard, device)),
    ):
        yield watch
