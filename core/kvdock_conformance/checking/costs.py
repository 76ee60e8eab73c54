"""What a backend serves of what it brings kernels for, and how long questions and calls that are new may take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from kvdock.interface import TensorMeta
from kvdock.ops.catalog import CATALOG
from kvdock.ops.validate import validate
from kvdock.plugin import Request
from kvdock.spec import COPY_DTYPES
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.growth import seconds
from kvdock_conformance.checking.meaning import in_order
from kvdock_conformance.checking.memory import Arenas
from kvdock_conformance.checking.plans import check_calls_of_others
from kvdock_conformance.checking.resources import made_calls, requested_calls
from kvdock_conformance.checking.target import Target
from kvdock_conformance.requirement import Capability

__all__ = ["OWN_KERNEL", "check_destroy_time", "check_new_counts", "check_serves", "check_supports_time", "why_no_kernel"]

_TRIES = 3  # what takes long takes long each time; what else the machine does comes and goes
_SUPPORTS_LIMIT = 20
_COUNT_LIMIT = 8
_DESTROY_LIMIT = 100
_COUNTS = 7


def why_no_kernel(target: Target, data: Mapping[str, Any]) -> Sequence[str]:
    """Return the reason against asking about the backend's own kernel: it has none for the op."""
    op = data["calls"][0]["op"]
    return [] if op in target.kernels else [f"{target.name} has no kernel for {op}"]


OWN_KERNEL = Capability("brings a kernel for the op", why_no_kernel, check_calls_of_others)


def _with_dtype(request: Request, dtype: torch.dtype) -> Request:
    """Return a request whose pools, and what has their dtype, have another."""
    own = request.tensor("k_cache").dtype
    args = {
        name: attrs.evolve(meta, dtype=dtype) if isinstance(meta, TensorMeta) and meta.dtype == own else meta
        for name, meta in request.args.items()
    }
    return attrs.evolve(request, args=args)


def check_serves(target: Target, data: Mapping[str, Any]) -> None:
    """Ask the kernel of an op about a plain call, in each dtype that is stored as it comes.

    Raises:
        NonconformanceError: it takes none of them.
    """
    memory, op = Arenas(data["arenas"], target.device), data["calls"][0]["op"]
    request = validate(CATALOG[op], in_order(op, made_calls(memory, data)[0]))
    claimed = target.backend.capabilities().dtypes
    asked = [dtype for dtype in COPY_DTYPES if claimed is None or dtype in claimed]
    said = [list(target.kernels[op].supports(_with_dtype(request, dtype))) for dtype in asked]
    if said and all(said):
        got = f"reasons against {', '.join(map(str, asked))}: {'; '.join(map(str, said[0]))}"
        raise NonconformanceError(f"{op}: supports() of a plain call", expected="nothing against it in one dtype at least", got=got)


def _retried(what: str, limit: int, ratio: Callable[[int], float]) -> None:
    """Measure a ratio, and once more where it is beyond its limit."""
    found = []
    for attempt in range(_TRIES):
        found.append(ratio(attempt))
        if found[-1] <= limit:
            return
    raise NonconformanceError(what, expected=f"at most {limit} times that of a repeated call", got=f"{min(found):.0f} times")


def check_supports_time(target: Target, data: Mapping[str, Any]) -> None:
    """Compare the time that `supports` takes for requests that are new with that of a call that is repeated.

    Raises:
        NonconformanceError: it takes more than 20 times as long.
    """
    memory, op = Arenas(data["arenas"], target.device), data["calls"][0]["op"]
    every = made_calls(memory, data)
    requests = [validate(CATALOG[op], in_order(op, args)) for args in every]
    kernel, share = target.kernels[op], -(-len(requests) // _TRIES)

    def ratio(attempt: int) -> float:
        calls = [seconds(lambda: target.call(op, every[0])) for _ in range(32)]
        asked = [seconds(lambda r=request: kernel.supports(r)) for request in requests[attempt * share : (attempt + 1) * share]]  # type: ignore[misc]  # a default binds it
        return sorted(asked)[-2] / statistics.median(calls[8:])  # few kinds of requests may be slow; one may be a chance

    _retried(f"{op}: time of supports()", _SUPPORTS_LIMIT, ratio)


def check_destroy_time(target: Target, data: Mapping[str, Any]) -> None:
    """Compare the time that plans take to be destroyed, once called, with that of a call that is repeated.

    Raises:
        NonconformanceError: it takes more than 100 times as long, for two plans or more.
    """
    calls, args = requested_calls(target, data), made_calls(Arenas(data["arenas"], target.device), data)[0]
    op = data["calls"][0]["op"]

    def ended(request: Request, values: tuple[Any, ...]) -> float:
        with target.backend.device_guard(target.device):
            plan = target.kernels[op].prepare(request)
            plan(*values)
            return seconds(plan.destroy)

    def ratio(attempt: int) -> float:
        repeated = [seconds(lambda: target.call(op, args)) for _ in range(32)]
        return sorted(ended(*call) for call in calls * 2)[-2] / statistics.median(repeated[8:])

    _retried(f"{op}: time of destroy()", _DESTROY_LIMIT, ratio)


def check_new_counts(target: Target, data: Mapping[str, Any]) -> None:
    """Compare the time of the first call with a number of tokens, behind ``data["warm"]`` others, with that of the calls after it.

    Raises:
        NonconformanceError: the first takes more than 8 times as long, for half of the numbers or more.
    """
    op = data["calls"][0]["op"]
    every = made_calls(Arenas(data["arenas"], target.device), data)
    for args in every[: data["warm"]] * 3:
        target.call(op, args)
    new = every[data["warm"] :]

    def ratio(attempt: int) -> float:
        ratios = []
        for args in new[attempt::_TRIES][:_COUNTS]:
            first, *again = (seconds(lambda: target.call(op, args)) for _ in range(3))  # noqa: B023 - called at once
            ratios.append(first / statistics.median(again))
        return statistics.median(ratios)

    _retried(f"{op}: time of the first call with a number of tokens", _COUNT_LIMIT, ratio)
