"""What a backend says of itself, asked in this process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import kvdock
from kvdock import runtime
from kvdock.interface import Priority
from kvdock.ops.catalog import CATALOG
from kvdock.plugins.contract import unknown_op
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.target import Target

__all__ = [
    "check_capabilities",
    "check_claims",
    "check_count",
    "check_devices",
    "check_guard",
    "check_guard_again",
    "check_kernels",
    "check_names",
    "check_probe",
    "current_of",
    "expect",
]


def expect(what: str, is_so: bool, expected: object, got: object) -> None:
    """Raise unless something is so."""
    if not is_so:
        raise NonconformanceError(what, expected=expected, got=got)


def check_probe(target: Target, data: Mapping[str, Any]) -> None:
    """Probe three times."""
    first, *others = [target.backend.probe() for _ in range(3)]
    expect("probe()", isinstance(first, kvdock.plugin.Probe), "a kvdock.plugin.Probe", repr(first))
    expect("probe() again", all(other == first for other in others), first, others)


def check_names(target: Target, data: Mapping[str, Any]) -> None:
    """Look at name and device type: words that can stand in a variable's name and on a command line."""
    for what, word in (("name", target.backend.name), ("device_type", target.backend.device_type)):
        is_word = isinstance(word, str) and word == word.lower() and word.replace("-", "").replace("_", "").isalnum()
        expect(what, is_word and word.isascii(), "a word in lower case", repr(word))


def check_claims(target: Target, data: Mapping[str, Any]) -> None:
    """Ask about devices of every type, forwards and backwards: only types that it runs on may be claimed."""
    own = {device.type for device in target.backend.devices()}
    asked = [torch.device(kind) for kind in data["types"]]
    first = [target.backend.claims(device) for device in asked]
    second = [target.backend.claims(device) for device in reversed(asked)][::-1]
    for device, claim, again in zip(asked, first, second, strict=True):
        expect(f"claims({device})", claim is True or claim is False, "True or False", repr(claim))
        expect(f"claims({device}), asked again", claim == again, claim, again)
        expect(f"claims({device})", not claim or device.type in own, f"False: it runs on {', '.join(sorted(own))}", claim)


def check_devices(target: Target, data: Mapping[str, Any]) -> None:
    """Put a tensor on each device that is listed."""
    listed = list(target.backend.devices())
    expect("devices()", bool(listed) and len(set(listed)) == len(listed), "devices, each once", listed)
    for device in listed:
        expect("devices()", isinstance(device, torch.device), "torch.device objects", repr(device))
        made = torch.zeros(1, device=device)
        expect(f"the value of a tensor on {device}", made.cpu().item() == 0, 0, made)
        expect("devices()", made.device == device, f"{made.device}, with its index", device)
    expect("devices() again", listed == list(target.backend.devices()), listed, list(target.backend.devices()))


def check_capabilities(target: Target, data: Mapping[str, Any]) -> None:
    """Hold what it says it can do against the kernels that it returns."""
    claimed, kernels = target.backend.capabilities(), target.backend.kernels()
    expect("capabilities()", isinstance(claimed, kvdock.plugin.Capabilities), "kvdock.plugin.Capabilities", repr(claimed))
    expect("capabilities() again", claimed == target.backend.capabilities(), claimed, target.backend.capabilities())
    expect("kernels() again", set(kernels) == set(target.backend.kernels()), sorted(kernels), sorted(target.backend.kernels()))
    for op, kernel in kernels.items():
        expect(f"kernels()[{op!r}]", isinstance(kernel, kvdock.plugin.Kernel), "a kvdock.plugin.Kernel", repr(kernel))
    expect("capabilities(): priority", isinstance(claimed.priority, Priority), "a kvdock.plugin.Priority", repr(claimed.priority))
    for dtype in claimed.dtypes or ():
        reasons = _reasons_against(target, dtype) if kernels else ["it has no kernel"]
        expect(f"kernels of {target.name} for {dtype}, which it declares", not reasons, "one that takes it", "; ".join(reasons))


def check_kernels(target: Target, data: Mapping[str, Any]) -> None:
    """Look for a kernel of its own for an op that there is, and for none that there is not."""
    kernels = target.backend.kernels()
    ops = {*CATALOG, *runtime.default().registry.brought_ops()}
    unknown = [unknown_op(op, ops) for op in kernels if op not in ops]
    expect(f"kernels() of {target.name}", not unknown, "names of ops that there are", "; ".join(unknown))
    own = sorted(CATALOG.keys() & kernels.keys())
    expect(f"kernels() of {target.name}", bool(own), f"one for at least one of {', '.join(CATALOG)}", "none: portable kernels serve all")


def _reasons_against(target: Target, dtype: Any) -> list[str]:
    """Return why no kernel takes pools of a dtype; empty when one does."""
    pool = torch.zeros(1, 1, 1, 16, dtype=torch.int8, device=target.device).to(dtype)
    slots, row = torch.zeros(1, dtype=torch.int64, device=target.device), pool[0].clone()
    scale = torch.ones((), device=target.device) if dtype in kvdock.plugin.QUANTISED_DTYPES else None
    rows = row.float() if scale is not None else row
    said = [*target.reasons_against("paged_caching_", (pool, pool.clone(), rows, rows, slots, scale, scale))]
    return said and [*said, *target.reasons_against("gather_paged", (pool, pool.clone(), slots, scale, scale, row.clone(), row.clone()))]


def check_guard(target: Target, data: Mapping[str, Any]) -> None:
    """Enter the guard of each device, and leave it by an error too."""
    for device in target.backend.devices():
        for error in (None, RuntimeError("left by an error")):
            try:
                with target.backend.device_guard(device):
                    if error is not None:
                        raise error
            except RuntimeError as caught:
                if caught is not error:
                    raise
                continue
            expect(f"device_guard({device})", error is None, "the error that was raised in it", "no error")


def current_of(device: torch.device) -> object:
    """Return the index of the current device of a type; None where torch knows of none."""
    asked = getattr(getattr(torch, device.type, None), "current_device", None)
    found: object = asked() if asked is not None and device.index is not None else None
    return found


def check_guard_again(target: Target, data: Mapping[str, Any]) -> None:
    """Enter guards inside each other, and by two threads at once, each of which waits in it for the other."""
    devices = list(target.backend.devices())
    for outer, inner in [(a, b) for a in devices for b in devices][:16]:
        with target.backend.device_guard(outer):
            with target.backend.device_guard(inner):
                expect(f"the current device in device_guard({inner})", current_of(inner) == inner.index, inner.index, current_of(inner))
            expect(f"the current device behind device_guard({inner})", current_of(outer) == outer.index, outer.index, current_of(outer))
    meeting = threading.Barrier(2)

    def enter(device: torch.device) -> object:
        with target.backend.device_guard(device):
            meeting.wait(10)
            return current_of(device)

    with ThreadPoolExecutor(2) as threads:
        for device, met in [(device, threads.submit(enter, device)) for device in (devices[0], devices[-1])]:
            expect(f"the current device of a thread in device_guard({device})", met.result() == device.index, device.index, met.result())


def check_count(target: Target, data: Mapping[str, Any]) -> None:
    """Ask each device for its count of skipped writes, again and again."""
    for device in target.backend.devices():
        first, *others = [target.backend.skipped_writes(device) for _ in range(3)]
        is_count = isinstance(first, int) and not isinstance(first, bool) and first >= 0
        expect(f"skipped_writes({device})", is_count, "a non-negative int", repr(first))
        expect(f"skipped_writes({device}), asked again", others == [first] * 2, first, others)
