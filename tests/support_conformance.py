"""Backends that are wrong in known ways, for tests of the kit: in a child of this process, and as an installed plugin."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock_conformance import reports
from kvdock_conformance.requirement import Case, Requirement, Requirements
from kvdock_conformance.session import ConformancePlan
from kvdock_conformance.stand_ins import StandIn, register_backend
from support_plugins import CallKernel

TESTS = Path(__file__).parent

SCHEMA = json.loads(Path(reports.__file__).with_name("report.schema.json").read_text(encoding="utf-8"))
"""What a report in JSON looks like: it lies beside what writes it, so that it is in the wheel."""

CHILD = (sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(TESTS)!r}); from kvdock_conformance.worker import main; main()")
"""A child that finds the modules of this folder."""


class BadKernel(CallKernel):
    """Does what it is told, and refuses what the portable kernel refuses."""

    def supports(self, request: Any) -> Sequence[str]:
        return PORTABLE_KERNELS["paged_caching_"].supports(request)


class BadBackend(StandIn):
    """A backend whose one kernel does what `BAD` says by its name; all else is the portable kernels'."""

    def __init__(self, name: str) -> None:
        kernels = {**PORTABLE_KERNELS, "paged_caching_": BadKernel(BAD[name])} if name in BAD else PORTABLE_KERNELS
        super().__init__(name, kernels)


class DenseKernel(CallKernel):
    """The portable kernel, for dense pools."""

    def __init__(self) -> None:
        super().__init__(lambda *args: None)

    def supports(self, request: Any) -> Sequence[str]:
        pools = [request.tensor(name) for name in ("k_cache", "v_cache")]
        dense = [torch.empty([1 if size is None else size for size in pool.shape], device="meta").stride() for pool in pools]
        odd = [f"strides {pool.strides}" for pool, strides in zip(pools, dense, strict=True) if pool.strides != strides]
        return [*PORTABLE_KERNELS["paged_caching_"].supports(request), *odd]

    def prepare(self, request: Any) -> Any:
        return PORTABLE_KERNELS["paged_caching_"].prepare(request)


def _crash(*args: Any) -> None:
    print("about to crash")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang(*args: Any) -> None:
    time.sleep(600)


def _exit(*args: Any) -> None:
    os._exit(7)


def _raise(*args: Any) -> None:
    raise RuntimeError("no memory left on acme0")


def _print(*args: Any) -> None:
    os.write(1, b'{"verdict": "passed"}\n')
    print("chatter")


def _lost(*args: Any, **others: Any) -> Any:
    raise RuntimeError("acme error 700: the device is lost\nsee the manual")


def _spoil(*args: Any) -> None:
    """Fail as an accelerator does that nothing can use afterwards, until the process ends."""
    for name in ("ones", "empty", "from_numpy"):
        vars(torch)[name] = _lost
    _lost()


BAD: Mapping[str, Callable[..., None]] = {
    "crashes": _crash,
    "hangs": _hang,
    "exits": _exit,
    "raises": _raise,
    "prints": _print,
    "spoils": _spoil,
}


def register() -> None:
    """Put every bad backend, and a good one, into the child's registry."""
    for name in (*BAD, "good"):
        register_backend(BadBackend(name))
    register_backend(StandIn("dense-only", {**PORTABLE_KERNELS, "paged_caching_": DenseKernel()}))


def register_skipping() -> None:
    """Put a backend into the child's registry that skips indices out of range, in host memory too, as one on a device does."""
    from kvdock.ops.portable import rows

    vars(rows)["HOST"] = torch.device("meta")
    register_backend(StandIn("skips", PORTABLE_KERNELS))


def crash() -> None:
    """Crash the child before it has opened anything."""
    os.kill(os.getpid(), signal.SIGKILL)


def plan(backend: str, requirements: Requirements, **settings: Any) -> ConformancePlan:
    """Return a plan for one of the backends above."""
    return ConformancePlan(backend, requirements, setup="support_conformance:register", **{"command": CHILD, **settings})


def requirement(number: int = 1, area: str = "paged_caching_", **settings: Any) -> Requirement:
    """Return a requirement that nobody runs."""
    given = {"sentence": "It is so.", "check": never, "cases": lambda: [Case("one", {})], **settings}
    return Requirement(f"KVD-TEST-{number:03}", area=area, **given)


def never(target: Any, data: Mapping[str, Any]) -> None:
    """Fail: a check that must not be made."""
    raise AssertionError("nobody asked for this check")


def chosen(ids: Iterable[str]) -> Requirements:
    """Return some of the kit's requirements."""
    from kvdock_conformance.requirements import load

    return Requirements(load()[name] for name in ids)


PLUGIN = """
import os
import kvdock
import torch

KVDOCK_API = (1, 0)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Write(kvdock.plugin.Descriptor):
    def __call__(self, k_cache, v_cache, k, v, slots, *scales):
        capacity, block = k_cache.shape[0] * k_cache.shape[1], k_cache.shape[1]
        beyond = (slots >= capacity).nonzero()
        if len(beyond):
            where, slot = beyond[0].tolist(), slots[tuple(beyond[0])].item()
            raise kvdock.IndexRangeError(f"paged_caching_: slot_mapping{where}", expected="a slot of the pool", got=slot, fix="pass -1")
        if "MENDED" not in os.environ:
            slots = torch.where(slots < 0, slots % capacity, slots)
        keep = slots >= 0
        slots = slots[keep].long()
        for cache, rows in ((k_cache, k), (v_cache, v)):
            bits = BITS[cache.element_size()]
            cache.view(bits)[slots // block, slots % block] = rows.view(bits)[keep]


class Kernel(kvdock.plugin.Kernel):
    def supports(self, request):
        return ["8-bit caches are for version 2"] if request.tensor("k_cache").dtype.itemsize == 1 else []

    def prepare(self, request):
        return Write()


class Backend(kvdock.plugin.Backend):
    name = "wrapping"
    device_type = "acme"

    def probe(self):
        return kvdock.plugin.Probe.ready()

    def claims(self, device):
        return False

    def devices(self):
        return [torch.device("cpu")]

    def kernels(self):
        return {"paged_caching_": Kernel()}


@kvdock.plugin.hookimpl
def kvdock_backends():
    return [Backend()]
"""
"""A plugin whose negative slots wrap, unless MENDED is set."""


def install(folder: Path, name: str = "wrapping", source: str = PLUGIN) -> dict[str, str]:
    """Write a plugin with its metadata into a folder, and return an environment in which it is installed."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvdock.backends]\n{name} = kvdock_{name}\n")
    (folder / f"kvdock_{name}.py").write_text(source)
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(folder)])
    return {**os.environ, "PYTHONPATH": path}
