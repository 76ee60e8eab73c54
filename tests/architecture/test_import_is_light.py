"""`import kvdock` loads no plugin and no client, and touches no device."""

from __future__ import annotations

import pytest

from support_isolated import answer

# Audit hooks see every file that is opened, every library that is loaded and every process that is started, whoever does it.
CODE = """
import json, sys, threading
import torch
before, touched = set(sys.modules), []
def audit(event, args):
    device = event == "open" and str(args[0]).startswith("/dev/")
    if device or event in ("ctypes.dlopen", "subprocess.Popen", "os.fork", "socket.connect"):
        touched.append([event, str(args[0]) if args else ""])
sys.addaudithook(audit)
import {module}
from kvdock import runtime
print(json.dumps({{
    "imported": sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}),
    "kvdock": sorted(name for name in sys.modules if name.startswith("kvdock")),
    "touched": touched,
    "runtime": runtime.made() is not None,
    "contexts": [name for name in ("cuda", "xpu", "mtia") if getattr(torch, name).is_initialized()],
    "threads": threading.active_count(),
}}))
"""


@pytest.mark.parametrize("module", ["kvdock", "kvdock.ops", "kvdock.cli"])
def test_importing_is_light(module: str) -> None:
    found = answer(CODE.format(module=module))
    heavy = {"transformers", "typer", "rich", "triton", "hypothesis", "pytest", "gguf", "accelerate"}
    assert not heavy & set(found["imported"]), "clients and the command line are imported when they are used"
    assert {name.partition(".")[0] for name in found["kvdock"]} == {"kvdock"}, "no plugin, and no kit"
    assert not [name for name in found["kvdock"] if name.startswith("kvdock.integrations.")]
    assert found["touched"] == []
    assert found["runtime"] is False, "the runtime is made at the first use"
    assert found["contexts"] == [], "no device was opened"
    assert found["threads"] == 1


def test_the_probe_sees_a_device_that_is_touched() -> None:
    code = CODE.format(module="kvdock").replace("from kvdock import runtime", "open('/dev/null').close()\nfrom kvdock import runtime")
    assert answer(code)["touched"] == [["open", "/dev/null"]]


TIMES = """
import json, time
import torch
before = time.perf_counter()
import kvdock
print(json.dumps(time.perf_counter() - before))
"""


def test_importing_beside_torch_takes_next_to_no_time() -> None:
    """At most 0.15 s; it takes a thousandth, since names are imported when they are asked for."""
    assert min(answer(TIMES) for _ in range(3)) < 0.15


def test_names_are_imported_when_they_are_asked_for() -> None:
    code = """
import json, sys
import kvdock
light = sorted(name for name in sys.modules if name.startswith("kvdock"))
missing = [name for name in kvdock.__all__ if getattr(kvdock, name, None) is None]
wrong = sorted(set(kvdock._HOME) ^ (set(kvdock.__all__) - {"ops", "plugin"}))
try:
    kvdock.PagedKvCache
except AttributeError as error:
    said = str(error)
print(json.dumps([light, missing, wrong, said, kvdock.scheduler.__name__, "PagedKVCache" in dir(kvdock)]))
"""
    assert answer(code) == [["kvdock"], [], [], "module 'kvdock' has no attribute 'PagedKvCache'", "kvdock.scheduler", True]


KIT = """
import json, sys
import kvdock_conformance
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "kvdock", "pytest", "hypothesis"})))
"""


def test_importing_the_conformance_kit_imports_no_torch() -> None:
    assert answer(KIT) == [], "pytest's coverage and collection must not pay for it"
