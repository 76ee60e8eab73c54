"""Devices, streams and graphs: where calls go, what they wait for, and what can be recorded and replayed."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

import kvdock
from kvdock import runtime
from kvdock_conformance.checking.claims import current_of
from kvdock_conformance.checking.computed_calls import ComputedCall
from kvdock_conformance.checking.device_calls import CALLS, DeviceCall, WriteCall
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.target import HOST, Target
from kvdock_conformance.requirement import Capability, Check

__all__ = [
    "DELAY_CYCLES",
    "GRAPHS",
    "STREAMS",
    "SYNC_DEBUG",
    "TWO_DEVICES",
    "check_captured",
    "check_done_at_once",
    "check_foreign_tensor",
    "check_miss_under_capture",
    "check_no_graphs",
    "check_no_sync",
    "check_not_capturing",
    "check_one_device",
    "check_other_device",
    "check_replay",
    "check_stream",
    "check_threads_on_devices",
    "graph_of",
    "made",
    "module_of",
    "why_no_graphs",
    "why_no_streams",
    "why_no_sync_debug",
    "why_one_device",
]

DELAY_CYCLES = 200_000_000
"""About 0.1 s on a GPU."""


def made(device: torch.device, data: Mapping[str, Any], slots: Sequence[int] | None = None, heads: int = 2) -> DeviceCall:
    """Return the call of a case on a device, of its op and its slots."""
    slots = data["slots"] if slots is None else slots
    return ComputedCall(data, device, slots, heads) if "by_heads" in data else CALLS[data["op"]](device, slots, heads)


def module_of(device: torch.device) -> Any:
    """Return torch's module for a type of device, ``torch.<type>``; None where there is none."""
    return getattr(torch, device.type, None)


def why_one_device(target: Target, data: Mapping[str, Any]) -> Sequence[str]:
    """Return the reason against asking about two devices: one is listed."""
    listed = list(target.backend.devices())
    return [] if len(listed) > 1 else [f"{target.name} lists one device, {', '.join(map(str, listed))}"]


def check_one_device(target: Target, data: Mapping[str, Any], reasons: Sequence[str], check: Check) -> None:
    """Check that a device that is not listed is refused, with the listed one named.

    Raises:
        NonconformanceError: it is not, or by another error.
    """
    write = WriteCall(torch.device("meta"), [1])
    try:
        write.call(target)
    except kvdock.BackendUnavailableError as error:
        if target.name not in str(error) or target.device.type not in str(error):
            raise NonconformanceError(
                "the error for a device that is not listed", expected=f"{target.name}, {target.device}", got=error
            ) from error
    else:
        raise NonconformanceError("a call on meta, which is not listed", expected="BackendUnavailableError", got="no error")


TWO_DEVICES = Capability("lists two devices", why_one_device, check_one_device)


def why_no_streams(target: Target, data: Mapping[str, Any]) -> Sequence[str]:
    """Return the reasons against asking about streams: calls on the host are made at once; or torch has no delay to show order with."""
    if target.device == HOST:
        return ["calls on the host are made at once: torch has no streams there"]
    missing = [name for name in ("Stream", "stream", "_sleep") if not hasattr(module_of(target.device), name)]
    return [f"torch.{target.device.type} has no {name}" for name in missing]


def check_done_at_once(target: Target, data: Mapping[str, Any], reasons: Sequence[str], check: Check) -> None:
    """Check that without streams a call is done when it returns: its sources may be overwritten, and the pool read.

    Raises:
        NonconformanceError: the pool is not what it must be.
    """
    call = made(target.device, data)
    for _ in range(3):
        call.take(data["slots"])
        call.call(target)
        right = call.right()
        for rows in call.sources:
            rows.fill_(-1)
        call.check("a call that has returned", right)
        call.refill()


STREAMS = Capability("runs in streams", why_no_streams, check_done_at_once)


def why_no_sync_debug(target: Target, data: Mapping[str, Any]) -> Sequence[str]:
    """Return the reason against looking for synchronisation: torch cannot tell."""
    has = hasattr(module_of(target.device), "set_sync_debug_mode")
    return [] if has else [f"torch.{target.device.type} has no set_sync_debug_mode: nothing there is waited for, or torch cannot tell"]


SYNC_DEBUG = Capability("can be seen to synchronise", why_no_sync_debug, check_done_at_once)


def why_no_graphs(target: Target, data: Mapping[str, Any]) -> Sequence[str]:
    """Return the reason against recording graphs: it is not claimed."""
    return [] if target.backend.capabilities().graph_capture else [f"{target.name} does not claim graph_capture"]


def check_no_graphs(target: Target, data: Mapping[str, Any], reasons: Sequence[str], check: Check) -> None:
    """Check that what claims no graphs is never capturing.

    Raises:
        NonconformanceError: it says that it is.
    """
    check_not_capturing(target, data)


GRAPHS = Capability("records graphs", why_no_graphs, check_no_graphs)


def check_not_capturing(target: Target, data: Mapping[str, Any]) -> None:
    """Ask each device, before and after a call, whether it records: nobody does.

    Raises:
        NonconformanceError: it says that it does, or answers no bool.
    """
    for device in target.backend.devices():
        for moment in ("before a call", "after it"):
            answer = target.backend.is_capturing(device)
            if answer is not False:
                raise NonconformanceError(f"is_capturing({device}) {moment}, while no graph is recorded", expected=False, got=repr(answer))
            WriteCall(device, [1]).call(target)


def check_other_device(target: Target, data: Mapping[str, Any]) -> None:
    """Call with tensors on each device while each other one is current.

    Raises:
        NonconformanceError: bytes are wrong, or another device is current afterwards.
    """
    devices = list(target.backend.devices())
    for current, other in [(a, b) for a in devices for b in devices if a != b][:12]:
        with target.backend.device_guard(current):
            call = made(other, data)
            for _ in range(4):  # the plan is prepared, found, and remembered
                call.call(target)
                now = current_of(current)  # of the host, which has no index, there is no other
                if now != current.index:
                    raise NonconformanceError(f"current device after a call on {other}", expected=current.index, got=now)
        call.check(f"a call on {other} while {current} is current")


def check_stream(target: Target, data: Mapping[str, Any]) -> None:
    """Call in a side stream behind a delay and a change of the source: what is written is the changed one.

    Its plan is forgotten, and another one made, while the call waits in the stream.

    Raises:
        NonconformanceError: the call did not wait for its stream, or made the host wait.
    """
    module, call = module_of(target.device), made(target.device, data)
    call.call(target)
    call.take(data["slots"])
    new = [call.values(rows.shape).to(target.device) for rows in call.sources]
    module.synchronize(target.device)
    with target.backend.device_guard(target.device):
        side = module.Stream(target.device)
        with module.stream(side):
            module._sleep(DELAY_CYCLES)
            for rows, changed in zip(call.sources, new, strict=True):
                rows.copy_(changed)
            call.call(target)
            is_done = side.query()
        runtime.default().dispatcher.descriptors.clear()
        made(target.device, data, heads=3).call(target)
        side.synchronize()
    call.check("a call in a side stream, behind a change of its source")
    if is_done:
        raise NonconformanceError("a call in a side stream behind a delay", expected="to return before it is done", got="the host waited")


def check_no_sync(target: Target, data: Mapping[str, Any]) -> None:
    """Call with torch raising at whatever synchronises; what was prepared before is not asked about.

    Raises:
        NonconformanceError: something synchronises.
    """
    module, call = module_of(target.device), made(target.device, data)
    call.call(target)
    module.synchronize(target.device)
    mode = module.get_sync_debug_mode()
    try:
        module.set_sync_debug_mode("error")
        for _ in range(4):
            call.call(target)
    except RuntimeError as error:
        if isinstance(error, kvdock.KVDockError):
            raise
        raise NonconformanceError("a call, with torch looking for synchronisation", expected="none", got=error) from error
    finally:
        module.set_sync_debug_mode(mode)
    call.check("a call that must not synchronise")


def graph_of(target: Target) -> tuple[Any, Any]:
    """Return a new graph, and torch's context that records into it.

    Raises:
        NonconformanceError: torch cannot record on this device, though the backend claims it can.
    """
    module = module_of(target.device)
    kind = next((kind for name, kind in vars(module).items() if name.endswith("Graph") and not name.startswith("_")), None)
    if kind is None or not hasattr(module, "graph"):
        raise NonconformanceError(
            f"capabilities() of {target.name}: graph_capture", expected=f"False: torch records no graphs on {target.device.type}", got=True
        )
    graph = kind()
    return graph, module.graph(graph)


def check_replay(target: Target, data: Mapping[str, Any]) -> None:
    """Record a call, forget its plan, and replay with other slots, padding, slots out of range and values.

    Raises:
        NonconformanceError: torch records nothing there, a replay writes something else, or does not count what it skips.
    """
    graph, recording = graph_of(target)
    call = made(target.device, data)
    call.call(target)
    with recording:
        if not target.backend.is_capturing(target.device):
            raise NonconformanceError("is_capturing() while a graph is recorded", expected=True, got=False)
        call.call(target)
    runtime.default().dispatcher.descriptors.clear()
    made(target.device, data, heads=3).call(target)  # another plan takes its place
    for slots in data["replays"]:
        call.take(slots)
        call.refill()
        before = target.skipped()
        graph.replay()
        module_of(target.device).synchronize(target.device)
        call.check(f"a replay with slots {slots}")
        if target.skipped() - before != call.skips():
            raise NonconformanceError(f"skipped writes of a replay with {slots}", expected=call.skips(), got=target.skipped() - before)


def check_captured(target: Target, data: Mapping[str, Any]) -> None:
    """Have two steps captured, and repeat each in turn with other slots and values.

    Raises:
        NonconformanceError: there is not a function for each, one does not do what its step does, or returns something else.
    """
    calls = [made(target.device, data, heads=heads) for heads in (3, 2)]  # the one that takes more memory first

    def step(call: DeviceCall) -> torch.Tensor:
        call.call(target)
        return call.written[0]

    steps = [partial(step, call) for call in calls]
    for first in steps:
        first()
    with target.backend.device_guard(target.device):
        repeats = target.backend.capture(target.device, steps)
    if not isinstance(repeats, Sequence) or len(repeats) != len(steps) or not all(map(callable, repeats)):
        raise NonconformanceError(f"capture() of {target.name}", expected=f"{len(steps)} functions", got=repr(repeats)[:80])
    for slots in data["replays"]:
        for call, repeat in zip(calls, repeats, strict=True):
            call.take(slots)
            call.refill()
            result = repeat()
            call.check(f"a captured step with slots {slots}")
            if not isinstance(result, torch.Tensor) or result.data_ptr() != call.written[0].data_ptr():
                raise NonconformanceError("what a captured step returns", expected="what the step returned", got=repr(result)[:80])


def check_miss_under_capture(target: Target, data: Mapping[str, Any]) -> None:
    """Record a call that was never made before: it must say to warm up, and the graph must go on.

    Raises:
        NonconformanceError: it does not raise, says something else, writes, or spoils the graph.
    """
    graph, recording = graph_of(target)
    cold, other = made(target.device, data, heads=5), torch.zeros(1, device=target.device)
    said = "no error"
    with recording:
        other.add_(1)
        try:
            cold.call(target)
        except kvdock.BackendError as error:
            said = str(error)
    if "warm up first" not in said:
        raise NonconformanceError(
            "a call that has no plan yet, while a graph is recorded", expected="BackendError: warm up first", got=said
        )
    graph.replay()
    module_of(target.device).synchronize(target.device)
    is_written = any(bool(rows.any()) for rows in cold.written)
    if other.item() != 1 or is_written:
        raise NonconformanceError("the graph around the refused call", expected="to run without it", got=(other.item(), is_written))


def check_foreign_tensor(target: Target, data: Mapping[str, Any]) -> None:
    """Pass one tensor of another device: an error that names it, and nothing is written, at first and once the call is known.

    Raises:
        NonconformanceError: no error, another error, or something was written.
    """
    device = torch.device(data["device"])
    if device == target.device:
        device = torch.device("meta")
    for is_known in (False, True):
        write = WriteCall(target.device, [1, 5, 2], heads=4)
        if is_known:
            for _ in range(4):
                write.call(target)
            write.k_cache.zero_()
        setattr(write, data["attribute"], getattr(write, data["attribute"]).to(device))
        try:
            write.call(target)
        except kvdock.ArgumentValueError as error:
            if data["argument"] not in str(error) or str(target.device) not in str(error):
                raise NonconformanceError("text of the error", expected=f"{data['argument']} and {target.device}", got=error) from error
        else:
            raise NonconformanceError(
                f"{data['argument']} on {device}, the pools on {target.device}", expected="ArgumentValueError", got="no error"
            )
        if bool(write.k_cache.any()):
            raise NonconformanceError("the pool after the error", expected="zeros", got="something was written")


def check_threads_on_devices(target: Target, data: Mapping[str, Any]) -> None:
    """Let threads call at once, each on the next of the devices, with plans that nobody has made yet.

    Raises:
        NonconformanceError: a thread got an error, or wrote something wrong.
    """
    devices, errors, start = list(target.backend.devices()), list[BaseException](), threading.Barrier(data["threads"])

    def work(number: int) -> None:
        try:
            start.wait(30)
            for heads in data["heads"]:
                slots = [(7 * number + 3 * at) % 32 for at in range(6)]
                call = made(devices[number % len(devices)], data, slots, heads)
                for _ in range(5):
                    call.call(target)
                call.check(f"thread {number}, {heads} heads")
                time.sleep(0)
        except BaseException as error:  # noqa: BLE001 - carried to the thread that asks
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(data["threads"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
