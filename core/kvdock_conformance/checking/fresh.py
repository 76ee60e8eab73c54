"""What a fresh interpreter says about a backend: what importing its module costs, whether it may be forked and spawned, how it ends."""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvdock import runtime
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.process import GRACE_S, LIMIT_S, ended
from kvdock_conformance.checking.settings import ProcessSettings
from kvdock_conformance.checking.target import Target

__all__ = [
    "FACTS",
    "HEAVY",
    "IMPORT_S",
    "IMPORT_SHARE",
    "SCRIPT",
    "SEEDED",
    "check_ending",
    "check_first_calls_at_once",
    "check_import_cost",
    "check_import_is_light",
    "check_no_context",
    "check_notes",
    "check_prints_nothing",
    "check_process",
    "check_settings_of_import",
    "check_without_assertions",
    "entry_module",
    "facts_of",
]

SEEDED: list[str] = []
"""Lines that every fresh interpreter runs once it has imported kvdock. Seeded faults stand here; nothing else does."""

HEAVY = ("triton", "transformers", "accelerate", "numba", "cupy", "jax", "tensorflow", "torch._inductor", "torch._dynamo")
"""What an entry module must not import: it is imported wherever kvdock is used, whether its device is there or not."""

FACTS: dict[tuple[Any, ...], dict[str, Any]] = {}
"""What was found, so that one interpreter serves all checks: starting one costs the import of torch."""

IMPORT_SHARE, IMPORT_S = 0.5, 0.1
"""An entry module may take this share of the processor time that importing kvdock takes beside torch, and so many seconds."""

SCRIPT = """
from __future__ import annotations

import atexit, contextlib, ctypes, functools, gc, importlib, itertools, json, locale, logging, multiprocessing, os, random, re
import resource, signal, socket, subprocess, sys, tempfile, threading, time, types, warnings, zlib
from collections.abc import Callable
from typing import Any

gc.disable()  # it would look through all of torch a dozen times, and once more at the end
import numpy as np
import torch

gc.freeze()
gc.enable()
NAME, SETUP, MODULE, DEVICE, HEAVY, MUST_RAISE = {name!r}, {setup!r}, {module!r}, {device!r}, {heavy!r}, {must_raise!r}
start = time.process_time()
import kvdock
for public in kvdock.__all__ if __name__ == "__main__" else ():  # which are imported when they are asked for
    getattr(kvdock, public)
cost_of_kvdock = time.process_time() - start
from kvdock import runtime
{seeded}

{settings}
is_set_up = False  # a forked process inherits what was set up, a spawned one begins anew

def registry():
    global is_set_up
    if is_set_up:
        return runtime.default().registry
    is_set_up = True
    if SETUP:
        module, _, function = SETUP.partition(":")
        getattr(importlib.import_module(module), function)()
    elif NAME in {own!r}:
        importlib.import_module("kvdock_conformance.stand_ins").register(NAME)
    return runtime.default().registry

def write():
    device = torch.device(DEVICE)
    registry().backend(NAME)
    pool, rows = torch.zeros(2, 4, 1, 8, device=device), torch.ones(1, 1, 8, device=device)
    with kvdock.use_backend(NAME):
        kvdock.ops.paged_caching_(pool, pool.clone(), rows, rows, torch.tensor([5], device=device))
    return "right" if pool.sum().item() == 8 and bool((pool[1, 1] == 1).all()) else "wrong bytes"

def many():
    answer, device = write(), torch.device(DEVICE)
    pool, rows, slots = torch.zeros(32, 16, 1, 8, device=device), torch.ones(200, 1, 8, device=device), torch.arange(200, device=device)
    with kvdock.use_backend(NAME):
        kvdock.ops.paged_caching_(pool, pool.clone(), rows, rows, slots)
        got, _ = kvdock.ops.gather_paged(pool, pool, slots)
        right = bool((got == 1).all())
        cache, copied = torch.zeros(32, 1, 16, 8, device=device), pool.clone()
        with contextlib.suppress(kvdock.UnsupportedError):
            kvdock.ops.static_update_(cache, cache.clone(), rows[:6].view(2, 1, 3, 8), rows[:6].view(2, 1, 3, 8), slots[5:6])
            right &= cache.sum().item() == 48 and bool((cache[:2, :, 5:8] == 1).all())
        with contextlib.suppress(kvdock.UnsupportedError):
            kvdock.ops.copy_blocks_(copied, copied.clone(), slots[None, :38:19])
            right &= copied.sum().item() == 1728 and bool((copied[19] == 1).all())
    return answer if right else "wrong bytes"

def at_once():
    answers, ready = [], threading.Barrier(3)
    def work():
        ready.wait()
        try:
            answers.append(write())
        except Exception as error:
            answers.append(type(error).__name__ + ": " + str(error))
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return "; ".join(sorted(set(answers)))

def beyond():
    device, found = torch.device(DEVICE), []
    registry().backend(NAME)
    pool, rows, slot = torch.zeros(2, 4, 1, 8, device=device), torch.ones(1, 1, 8, device=device), torch.tensor([8], device=device)
    cache, pair = pool.transpose(1, 2), torch.tensor([[0, 2]], device=device)
    calls = dict(paged_caching_=(pool, pool.clone(), rows, rows, slot), gather_paged=(pool, pool, slot))
    calls.update(static_update_=(cache, cache.clone(), rows[None], rows[None], slot), copy_blocks_=(pool, pool.clone(), pair))
    calls.update(swap_blocks_=(pool.clone(), pool, pair), mla_caching_=(pool, rows[0, :, :5], rows[0, :, 5:], slot))
    calls.update(mla_gather=(pool, slot, 5), paged_attention=(rows, pool, pool, slot[None].int() * 0, slot + 1))
    for op, args in calls.items():
        try:
            with kvdock.use_backend(NAME):
                getattr(kvdock.ops, op)(*args)
            found += [op + " did not raise"] * MUST_RAISE
        except (kvdock.IndexRangeError, kvdock.UnsupportedError):
            pass
        except Exception as error:
            found += [op + " raised " + type(error).__name__]
    return ", ".join(found + ["something was written"] * bool(pool.any())) or "right"

def report(pipe, work):
    try:
        answer = work()
    except kvdock.KVDockError as error:
        answer = "KVDockError: " + str(error)
    except BaseException as error:
        answer = type(error).__name__ + ": " + str(error)
    pipe.send(answer)
    pipe.close()

def ask(method, work=write):
    context = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(False)
    process = context.Process(target=report, args=(sender, work))
    process.start()
    sender.close()
    try:
        answer = receiver.recv() if receiver.poll(30) else "no answer within 30 s"
    except EOFError:
        process.join(5)
        answer = "the process ended with exit code %s" % process.exitcode
    process.kill()
    process.join()
    return answer

def contexts():
    found = []
    for name, part in vars(torch).items():  # torch.<type of device>, by whomever it was put there; all but the host's
        functions = [getattr(part, function, None) for function in ("is_initialized", "current_device")]
        if part is not torch.cpu and all(isinstance(function, types.FunctionType) for function in functions) and part.is_initialized():
            found.append("torch." + name)
    return found

def printed(call):
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            call()
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        return file.read().decode(errors="replace")

if __name__ == "__main__":
    before, settings = set(sys.modules), ProcessSettings()
    start = time.process_time()
    at_import = printed(lambda: importlib.import_module(MODULE))
    cost = time.process_time() - start
    imported = sorted(set(sys.modules) - before)
    backend = registry().backend(NAME)
    at_probe = printed(backend.probe)
    found = dict(changes=settings.changes(), printed=at_import + at_probe)
    found.update(cost=cost, cost_of_kvdock=cost_of_kvdock, imported=[name for name in imported if name.startswith(HEAVY)])
    found.update(contexts=contexts())
    backend.notes()
    found.update(contexts_after_notes=contexts(), fork=ask("fork"), spawn=ask("spawn"))
    found["at once"] = ask("fork", at_once)
    with contextlib.suppress(Exception):  # what is wrong with the calls is for others to say
        many()
    # torch itself refuses a forked process a device that is in use
    found["fork behind calls"] = ask("fork", many) if DEVICE == "cpu" else "right"
    found["beyond"] = beyond()
    with open(__file__ + ".json", "w") as file:
        json.dump(found, file)
"""


def entry_module(target: Target) -> str:
    """Return the module that the backend's entry point names, or that of its class where it has no entry point."""
    for record in runtime.default().registry.records():
        if record.distribution is not None and target.name in [backend.name for backend in record.backends]:
            return record.value.partition(":")[0]
    return type(target.backend).__module__


def facts_of(target: Target, *flags: str) -> dict[str, Any]:
    """Return what a fresh interpreter with some flags finds, and remember it.

    Raises:
        NonconformanceError: the interpreter ended before it had found them.
    """
    key = (target.name, target.setup, tuple(SEEDED), *flags)
    if key not in FACTS:
        FACTS[key] = _ask(target, flags)
    return FACTS[key]


def _ask(target: Target, flags: Sequence[str]) -> dict[str, Any]:
    """Run the script in a fresh interpreter: in a file, since spawned processes import it."""
    text = SCRIPT.format(
        name=target.name,
        setup=target.setup,
        module=entry_module(target),
        device=str(target.device),
        heavy=HEAVY,
        seeded="\n".join(SEEDED),
        settings=inspect.getsource(ProcessSettings),
        own=() if target.setup else ("reference", "portable-kernels"),  # which it has to register itself where nobody sets them up
        must_raise=target.must_raise,
    )
    with tempfile.TemporaryDirectory() as folder:
        path, answer = Path(folder) / "fresh.py", Path(folder) / "fresh.py.json"
        path.write_text(text, encoding="utf-8")
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        code, left, said = ended([sys.executable, "-P", *flags, str(path)], environ)
        if not answer.exists():
            raise NonconformanceError("a fresh interpreter that loads the backend", expected="no error", got=said[-4000:])
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return {**found, "ending": (code, left, said[-2000:].strip())}


def check_import_is_light(target: Target, data: Mapping[str, Any]) -> None:
    """Check that the entry module imports no compiler and no client."""
    found = facts_of(target)["imported"]
    if found:
        raise NonconformanceError(f"what importing {entry_module(target)} imports", expected="none of these", got=", ".join(found[:8]))


def check_import_cost(target: Target, data: Mapping[str, Any]) -> None:
    """Check the processor time of the import against kvdock's own."""
    found = facts_of(target)
    limit = IMPORT_SHARE * found["cost_of_kvdock"] + IMPORT_S
    if found["cost"] > limit:
        raise NonconformanceError(
            f"processor time of importing {entry_module(target)}", expected=f"at most {limit:.3f} s", got=f"{found['cost']:.3f} s"
        )


def check_settings_of_import(target: Target, data: Mapping[str, Any]) -> None:
    """Check what importing the module and probing have changed in a fresh interpreter."""
    for what, was, came in facts_of(target)["changes"][:1]:
        raise NonconformanceError(f"{what} after import and probe()", expected=was, got=came)


def check_no_context(target: Target, data: Mapping[str, Any]) -> None:
    """Check that import and probe have opened no context on any device."""
    found = facts_of(target)["contexts"]
    if found:
        raise NonconformanceError("device contexts after import and probe()", expected="none", got=", ".join(found))


def check_prints_nothing(target: Target, data: Mapping[str, Any]) -> None:
    """Check that import and probe have written nothing to stdout, which is for the answers of whatever program uses the backend."""
    found = facts_of(target)["printed"]
    if found:
        raise NonconformanceError("what import and probe() print to stdout", expected="nothing", got=repr(found[:200]))


def check_notes(target: Target, data: Mapping[str, Any]) -> None:
    """Check that notes are lines of text, and open no context on any device.

    Raises:
        NonconformanceError: one is none, or something was opened.
    """
    notes = target.backend.notes()
    if isinstance(notes, str) or not all(isinstance(line, str) and line.strip() and "\n" not in line for line in notes):
        raise NonconformanceError("notes()", expected="a list of lines", got=repr(notes))
    found = facts_of(target)["contexts_after_notes"]
    if found:
        raise NonconformanceError("device contexts after notes()", expected="none", got=", ".join(found))


def check_process(target: Target, data: Mapping[str, Any]) -> None:
    """Check that a child of a process that has probed can use the backend, or is told why not."""
    found = facts_of(target)[data["method"]]
    if found != "right" and not found.startswith("KVDockError: "):
        raise NonconformanceError(
            f"a write in a process made by {data['method']} after probe()", expected="a write or a KVDockError", got=found
        )


def check_ending(target: Target, data: Mapping[str, Any]) -> None:
    """Check how a fresh interpreter that has used the backend ends, and what it leaves behind.

    Raises:
        NonconformanceError: it ended with an error, not by itself, or left a process behind.
    """
    code, left, said = facts_of(target)["ending"]
    ending = "a process that has used the backend"
    if code is None:
        raise NonconformanceError(ending, expected=f"an end within {LIMIT_S:g} s", got=f"none, behind {said!r}")
    if code != 0:
        raise NonconformanceError(ending, expected="exit code 0", got=f"exit code {code}: {said}")
    if left:
        raise NonconformanceError(f"processes that it leaves behind, {GRACE_S:g} s after its end", expected="none", got="; ".join(left))


def check_first_calls_at_once(target: Target, data: Mapping[str, Any]) -> None:
    """Check that threads whose calls are the first of a process get what one alone gets."""
    found = facts_of(target)
    if found["fork"] == "right" and found["at once"] != "right":
        raise NonconformanceError("the first calls of a process, by three threads", expected="what one alone gets", got=found["at once"])


def check_without_assertions(target: Target, data: Mapping[str, Any]) -> None:
    """Check what indices out of range do in an interpreter that leaves assertions out."""
    found = facts_of(target, "-O")["beyond"]
    if found != "right":
        raise NonconformanceError("indices out of range, with python -O", expected="IndexRangeError, and nothing written", got=found)
