"""Faults in devices, streams, threads and graphs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import attrs
import torch

from kvdock_conformance.cases.attention import OP as ATTENTION
from kvdock_conformance.cases.every_op import OPS
from kvdock_conformance.checking.devices import GRAPHS, STREAMS, SYNC_DEBUG, TWO_DEVICES, module_of
from kvdock_conformance.checking.target import Target
from kvdock_conformance.faults.fault import Args, BackendCall, Fault, Faults, FaultyCall, Seed
from kvdock_conformance.requirement import Capability

__all__ = ["FAULTS"]

FAULTS = Faults()
_AREA = "devices"
_OP, _STATIC, _GATHER, _COPY = OPS


@attrs.frozen
class _Where:
    """A seed that makes sense only where a backend claims something, or only where it does not.

    Args:
        seed: the seed.
        capability: what it is about.
        claimed: whether the backend must claim it.
    """

    seed: Seed
    capability: Capability
    claimed: bool

    def why_not(self, target: Target) -> str:
        reasons = self.capability.reasons(target, {})
        if self.claimed and reasons:
            return "; ".join(reasons)
        if not self.claimed and not reasons:
            return f"{target.name} {self.capability.name}"
        return self.seed.why_not(target)

    def seeded(self, target: Target) -> AbstractContextManager[None]:
        return self.seed.seeded(target)


def _call(
    name: str, sentence: str, *killers: str, needs: Capability | None = None, claimed: bool = True, op: str = _OP
) -> Callable[[FaultyCall], FaultyCall]:
    """Add a fault of a call to this area, for backends that claim something, or that do not."""

    def add(call: FaultyCall) -> FaultyCall:
        _plan(name, sentence, *killers, needs=needs, claimed=claimed, op=op)(lambda: call)
        return call

    return add


def _plan(
    name: str, sentence: str, *killers: str, needs: Capability | None = None, claimed: bool = True, op: str = _OP
) -> Callable[[Callable[[], FaultyCall]], Callable[[], FaultyCall]]:
    """Add a fault that keeps something from call to call."""

    def add(make_call: Callable[[], FaultyCall]) -> Callable[[], FaultyCall]:
        made = Faults()
        made.plan(op, f"device-{name}", sentence, *(f"KVD-DEVICE-{killer}" for killer in killers))(make_call)
        (fault,) = made
        seed = fault.seed if needs is None else _Where(fault.seed, needs, claimed)
        FAULTS.append(attrs.evolve(fault, area=_AREA, seed=seed))
        return make_call

    return add


# On any machine


@FAULTS.backend(_AREA, "devices", "device-second-one-is-none", "A second device is listed that is none.", "KVD-DEVICE-001")
def _second_is_none(inner: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: [*inner(), torch.device("meta")]


def _later() -> FaultyCall:
    waiting: list[Args] = []

    def call(run: BackendCall, args: Args) -> None:
        for earlier in waiting:
            run(earlier)
        waiting[:] = [args]

    return call


for _name, _by in (("", _OP), ("update-", _STATIC), ("gather-", _GATHER), ("copy-", _COPY)):
    _plan(f"{_name}call-done-later", "A call is made when the next one comes.", "002", "003", needs=STREAMS, claimed=False, op=_by)(_later)


@_call("call-done-in-a-thread", "A call is made by another thread, for which nobody waits.", "002", "003", needs=STREAMS, claimed=False)
def _in_a_thread(run: BackendCall, args: Args) -> None:
    threading.Timer(0.05, run, (args,)).start()


@FAULTS.backend(
    _AREA, "capabilities", "device-graphs-claimed", "Graphs are claimed where there are none.", "KVD-DEVICE-004", "KVD-DEVICE-005"
)
def _graphs_claimed(inner: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: attrs.evolve(inner(), graph_capture=True)


FAULTS[-1] = attrs.evolve(FAULTS[-1], seed=_Where(FAULTS[-1].seed, GRAPHS, False))


@FAULTS.backend(_AREA, "is_capturing", "device-always-capturing", "A device says that it records though nobody asked.", "KVD-DEVICE-006")
def _always_capturing(inner: Callable[..., bool]) -> Callable[..., bool]:
    return lambda device: True


@FAULTS.backend(_AREA, "capture", "captured-steps-are-the-first", "Captured steps repeat the first.", "KVD-DEVICE-012")
def _all_the_first(inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda device, steps: [inner(device, steps)[0]] * len(steps)


@FAULTS.backend(_AREA, "capture", "captured-steps-do-nothing", "A captured step does nothing.", "KVD-DEVICE-012")
def _captured_nothing(inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda device, steps: [partial(lambda result: result, step()) for step in steps]


@FAULTS.function(_OP, "device-foreign-tensor-ignored", "A call with a tensor of another device does nothing.", "KVD-DEVICE-007")
def _foreign_ignored(inner: Callable[..., None]) -> Callable[..., None]:
    def call(k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, **scales: Any) -> None:
        if {k.device, v.device, slots.device} == {k_cache.device}:
            inner(k_cache, v_cache, k, v, slots, **scales)

    return call


FAULTS[-1] = attrs.evolve(FAULTS[-1], area=_AREA)
_SHARED: dict[str, Args] = {}


@_call("threads-share-slots", "The slots of a call are kept where other threads overwrite them.", "008")
def _shared(run: BackendCall, args: Args) -> None:
    _SHARED["args"] = args
    time.sleep(0.002)
    run({**args, "slot_mapping": _SHARED["args"]["slot_mapping"]})


# On a machine that has what they are about


@_call("launch-on-the-default-stream", "A call goes to the default stream.", "002", needs=STREAMS)
def _default_stream(run: BackendCall, args: Args) -> None:
    device = args["k_cache"].device
    module = module_of(device)
    with module.stream(module.default_stream(device)):
        run(args)


_call("copy-on-the-default-stream", "A copy goes to the default stream.", "002", needs=STREAMS, op=_COPY)(_default_stream)


@_call("waits-for-the-device", "A call waits until it is done.", "002", "003", needs=SYNC_DEBUG)
def _waits(run: BackendCall, args: Args) -> None:
    run(args)
    args["slot_mapping"].max().item()


_call("gather-waits-for-the-device", "A read waits until it is done.", "002", "003", needs=SYNC_DEBUG, op=_GATHER)(_waits)


def _recorded(name: str) -> FaultyCall:
    """Return a call that keeps the indices of the first one of its shape."""

    def call(run: BackendCall, args: Args) -> None:
        key = f"{name} {args[name].shape}"
        kept = _SHARED.setdefault(key, {"index": args[name].clone()})
        run({**args, name: kept["index"]})

    return call


_call("slots-of-the-recording", "A replay writes to the slots of the recording.", "004", needs=GRAPHS)(_recorded("slot_mapping"))
_call("lengths-of-the-recording", "A replay writes behind the lengths of the recording.", "004", needs=GRAPHS, op=_STATIC)(
    _recorded("cache_lengths")
)


@FAULTS.backend(_AREA, "is_capturing", "device-never-capturing", "A device that records says that it does not.", "KVD-DEVICE-004")
def _never_capturing(inner: Callable[..., bool]) -> Callable[..., bool]:
    return lambda device: False


FAULTS[-1] = attrs.evolve(FAULTS[-1], seed=_Where(FAULTS[-1].seed, GRAPHS, True))


@FAULTS.function(_OP, "device-current-one-changed", "A call leaves the device of its tensors current.", "KVD-DEVICE-001")
def _current_changed(inner: Callable[..., None]) -> Callable[..., None]:
    def call(k_cache: torch.Tensor, *others: Any, **scales: Any) -> None:
        inner(k_cache, *others, **scales)
        module_of(k_cache.device).set_device(k_cache.device)

    return call


_ONE: Fault = FAULTS[-1]
FAULTS[-1] = attrs.evolve(_ONE, area=_AREA, seed=_Where(_ONE.seed, TWO_DEVICES, True))


@FAULTS.call(ATTENTION, "device-attends-in-the-main-thread", "Attention of three heads is made in the main thread alone.", "KVD-DEVICE-008")
def _attends_in_the_main_thread(run: BackendCall, args: Args) -> None:
    if args["k_cache"].shape[2] != 3 or threading.current_thread() is threading.main_thread():
        run(args)


FAULTS[-1] = attrs.evolve(FAULTS[-1], area=_AREA)
