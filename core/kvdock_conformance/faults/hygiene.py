"""Faults of a backend as a plugin: in its module's import, in forked and spawned processes, and in what it says of itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import attrs
import torch

import kvdock
from kvdock_conformance.checking import fresh
from kvdock_conformance.checking.target import Target
from kvdock_conformance.faults.fault import Fault, Faults
from kvdock_conformance.faults.seeds import HostSeed

__all__ = ["FAULTS"]

_AREA = "hygiene"
FAULTS = Faults(_AREA)


@attrs.frozen
class _FreshSeed:
    """Lines that fresh interpreters run before they import the backend's module.

    Args:
        lines: the lines; ``MODULE`` is its name.
    """

    lines: tuple[str, ...]

    def why_not(self, target: Target) -> str:
        return ""

    def seeded(self, target: Target) -> AbstractContextManager[Any]:
        return mock.patch.object(fresh, "SEEDED", list(self.lines))


def _fresh(name: str, sentence: str, killer: str, *lines: str, only_host: bool = False, in_errors: bool = False) -> None:
    seed = HostSeed(_FreshSeed(lines)) if only_host else _FreshSeed(lines)
    FAULTS.append(Fault(f"hygiene-{name}", sentence, _AREA, (killer,), seed, host_only=(killer,) if in_errors else ()))


_AT_IMPORT = (
    "own_import = importlib.import_module",
    "def faulty_import(name, *args):",
    "    if name == MODULE: at_import()",
    "    return own_import(name, *args)",
    "importlib.import_module = faulty_import",
)
"""Calls ``at_import`` when the backend's module is imported."""

_fresh(
    "imports-a-compiler",
    "The module imports a compiler.",
    "KVD-HYGIENE-001",
    "def at_import(): sys.modules.setdefault('torch._inductor.codecache', sys)",
    *_AT_IMPORT,
)
_fresh(
    "slow-import",
    "The module works while it is imported.",
    "KVD-HYGIENE-002",
    "def at_import():",
    "    end = time.process_time() + 0.2 + cost_of_kvdock",
    "    while time.process_time() < end: pass",
    *_AT_IMPORT,
)
_fresh(
    "context-at-import",
    "The module opens a context on a device.",
    "KVD-HYGIENE-003",
    "def at_import(): torch.acme = types.SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 0)",
    *_AT_IMPORT,
)
for _number, (_what, _line) in enumerate(
    {
        "dtype": "torch.set_default_dtype(torch.bfloat16)",
        "environment": "os.environ['OMP_NUM_THREADS'] = '3'",
        "random numbers": "random.seed(0)",
        "filters of warnings": "warnings.simplefilter('ignore')",
        "copy_blocks_ of kvdock": "kvdock.ops.copy_blocks_ = lambda *args: None",
        "floating-point mode": "torch.set_flush_denormal(True)",
        "locale": "locale.setlocale(locale.LC_ALL, 'C' if locale.setlocale(locale.LC_ALL) != 'C' else 'C.UTF-8')",
        "garbage collector": "gc.disable()",
        "threads": "threading.Thread(target=time.sleep, args=(20,), daemon=True).start()",
    }.items()
):
    _fresh(
        f"import-changes-{_number}",
        f"The module changes the {_what} of the process.",
        "KVD-HYGIENE-012",
        f"def at_import(): {_line}",
        *_AT_IMPORT,
    )

_fresh(
    "prints-at-import",
    "The module prints its version when it is imported, past Python's own stdout.",
    "KVD-HYGIENE-016",
    "def at_import(): os.write(1, b'Acme runtime 3.1\\n')",
    *_AT_IMPORT,
)
_fresh("error-at-exit", "A process that has used it ends with an error.", "KVD-HYGIENE-014", "atexit.register(os._exit, 3)")
_fresh(
    "process-left-behind",
    "A process that has used it leaves another one behind.",
    "KVD-HYGIENE-014",
    "if __name__ == '__main__': subprocess.Popen(['sleep', '30'], start_new_session=True)",
)
_fresh(
    "context-for-notes",
    "Notes tell of the device, which is opened for them.",
    "KVD-HYGIENE-015",
    "from kvdock.plugins.registry import Registry",
    "own_backend = Registry.backend",
    "def notes():",
    "    torch.acme = types.SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 0)",
    "    return []",
    "def backend(self, name):",
    "    found = own_backend(self, name)",
    "    found.notes = notes",
    "    return found",
    "Registry.backend = backend",
)
_IN_FORK, _IN_SPAWN = "multiprocessing.parent_process() and __name__ == '__main__'", "__name__ == '__mp_main__'"
for _method, _where, _killer in (("forked", _IN_FORK, "KVD-HYGIENE-004"), ("spawned", _IN_SPAWN, "KVD-HYGIENE-005")):
    _PATCH = ("own_write = kvdock.ops.paged_caching_", "def faulty(*args, **settings):")
    _END = ("    return own_write(*args, **settings)", "kvdock.ops.paged_caching_ = faulty")
    _fresh(
        f"crash-in-a-{_method}-process",
        f"A {_method} process crashes at its first call.",
        _killer,
        *_PATCH,
        f"    if {_where}: os.abort()",
        *_END,
    )
    _fresh(
        f"error-in-a-{_method}-process",
        f"A {_method} process gets an error that says nothing about kvdock.",
        _killer,
        *_PATCH,
        f"    if {_where}: raise RuntimeError('invalid context')",
        *_END,
    )

_fresh(
    "indices-checked-by-assertions",
    "An assertion checks indices, and without it those out of range are left.",
    "KVD-HYGIENE-019",
    "own_gather = kvdock.ops.gather_paged",
    "def faulty_gather(k_cache, v_cache, slots, **settings):",
    "    return own_gather(k_cache, v_cache, slots if __debug__ else slots.clamp(max=7), **settings)",
    "kvdock.ops.gather_paged = faulty_gather",
    in_errors=True,
)

_fresh(
    "library-loaded-by-the-first",
    "The first call loads a library, and those that come meanwhile find none.",
    "KVD-HYGIENE-020",
    "own_write, library = kvdock.ops.paged_caching_, []",
    "def faulty(*args, **settings):",
    "    if not library:",
    "        library[:] = [None]; time.sleep(0.05); library[:] = [own_write]",
    "    return library[0](*args, **settings)",
    "kvdock.ops.paged_caching_ = faulty",
)

for _op in ("gather_paged", "static_update_", "copy_blocks_"):
    _fresh(
        f"workers-of-{_op.rstrip('_').replace('_', '-')}-lost-in-a-fork",
        "Calls need workers that a forked process has lost.",
        "KVD-HYGIENE-018",
        f"own_op, crew = kvdock.ops.{_op}, []",
        "def faulty(*args, **settings):",
        "    if (crew or [os.getpid()])[0] != os.getpid(): raise RuntimeError('the workers are gone')",
        "    crew[:] = [os.getpid()]",
        "    return own_op(*args, **settings)",
        f"kvdock.ops.{_op} = faulty",
        only_host=True,  # torch itself refuses a forked process a device that is in use
    )


@FAULTS.backend(_AREA, "probe", "hygiene-probe-changes", "Each probe finds something else.", "KVD-HYGIENE-006")
def _probe_changes(inner: Callable[[], kvdock.plugin.Probe]) -> Callable[[], kvdock.plugin.Probe]:
    count = itertools.count()
    return lambda: kvdock.plugin.Probe.ready(f"looked {next(count)} times")


@FAULTS.backend(_AREA, "device_type", "hygiene-device-type-in-capitals", "The device type is written in capitals.", "KVD-HYGIENE-007")
def _in_capitals(inner: str) -> str:
    return inner.upper()


@FAULTS.backend(_AREA, "claims", "hygiene-claims-everything", "Every device is claimed.", "KVD-HYGIENE-008")
def _claims_everything(inner: Callable[..., bool]) -> Callable[..., bool]:
    return lambda device: True


@FAULTS.backend(_AREA, "claims", "hygiene-claims-change", "A device is claimed the first time only.", "KVD-HYGIENE-008")
def _claims_change(inner: Callable[..., bool]) -> Callable[..., bool]:
    asked: set[torch.device] = set()

    def claims(device: torch.device) -> bool:
        is_new = device not in asked
        asked.add(device)
        return is_new

    return claims


@FAULTS.backend(_AREA, "claims", "hygiene-claims-are-no-bools", "A claim is a text.", "KVD-HYGIENE-008")
def _claims_text(inner: Callable[..., bool]) -> Callable[..., Any]:
    return lambda device: "yes" if inner(device) else ""


@FAULTS.backend(_AREA, "devices", "hygiene-device-twice", "A device is listed twice.", "KVD-HYGIENE-009")
def _device_twice(inner: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: [*inner(), *inner()]


@FAULTS.backend(_AREA, "devices", "hygiene-device-that-holds-nothing", "A device is listed that holds no values.", "KVD-HYGIENE-009")
def _device_meta(inner: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: [*inner(), torch.device("meta")]


@FAULTS.backend(_AREA, "capabilities", "hygiene-dtype-without-a-kernel", "A dtype is declared that no kernel takes.", "KVD-HYGIENE-010")
def _dtype_without_kernel(inner: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: attrs.evolve(inner(), dtypes=(torch.float32, torch.float8_e4m3fn, torch.complex64))


@FAULTS.backend(_AREA, "kernels", "hygiene-kernel-is-none", "One of its kernels is none.", "KVD-HYGIENE-010")
def _kernel_is_none(inner: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: {**inner(), "paged_caching_": object()}


@FAULTS.backend(_AREA, "kernels", "hygiene-no-kernel", "It brings no kernel.", "KVD-HYGIENE-011")
def _no_kernel(inner: Callable[[], Any]) -> Callable[[], Any]:
    return dict


@FAULTS.backend(_AREA, "notes", "hygiene-notes-are-a-text", "Notes are one text.", "KVD-HYGIENE-015")
def _notes_text(inner: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: "launched by hand"
