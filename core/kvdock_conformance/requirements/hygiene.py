"""How a backend behaves as a plugin among others: ``KVD-HYGIENE``. Much of it is asked of a fresh interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from kvdock_conformance.cases.computing import COMPUTING
from kvdock_conformance.cases.drawing import Drawing
from kvdock_conformance.cases.every_op import EVERY, INDEX, OPS, OpCall, few, roomy, ways
from kvdock_conformance.cases.layouts import Geometry
from kvdock_conformance.checking.claims import check_capabilities, check_claims, check_devices, check_kernels, check_names, check_probe
from kvdock_conformance.checking.fresh import (
    check_ending,
    check_first_calls_at_once,
    check_import_cost,
    check_import_is_light,
    check_no_context,
    check_notes,
    check_prints_nothing,
    check_process,
    check_settings_of_import,
    check_without_assertions,
)
from kvdock_conformance.checking.process import check_settings_of_calls
from kvdock_conformance.checking.surroundings import SURROUNDINGS, check_surroundings
from kvdock_conformance.requirement import Case, Check, Level, Requirement

__all__ = ["AREA", "REQUIREMENTS"]

AREA = "hygiene"
_TYPES = ("cpu", "cuda", "xpu", "mps", "meta", "hpu", "mtia", "xla", "privateuseone")
_LIMIT_S = 200.0


def _require(number: int, sentence: str, check: Check, *cases: Case, level: Level = Level.CORE) -> Requirement:
    made: Callable[[], Iterable[Case]] = lambda: cases or (Case("asked once", {}),)  # noqa: E731 - the type is the reason
    return Requirement(f"KVD-HYGIENE-{number:03}", sentence, AREA, check, made, level, limit_s=_LIMIT_S)


_CALLS: Sequence[tuple[int, str, str, str, dict[str, Any]]] = (
    (5, "nhd", "contiguous", "bfloat16", {}),
    (84, "k and v unlike", "k and v unlike", "float32", {}),
    (150, "odd address", "padded heads", "bfloat16", {}),
    (4, "hnd", "fused qkv", "float32", {"index": "int32"}),
    (20, "nhd", "contiguous", "bfloat16", {"is_padded": True}),
    (6, "hnd", "[B, H, q, D]", "bfloat16", {}),
    (40, "nhd", "contiguous", "bfloat16", {"is_run": True}),
    (12, "nhd", "contiguous", "bfloat16", {"lead": (3, 4), "is_padded": True}),
    (9, "nhd", "padded heads", "float32", {"lead": (3, 3), "is_padded": True}),
)
"""Tokens, pools, sources, dtypes and indices of calls, few and many, dense and not; the first pools are large, with places far behind."""


_UNLIKE = {"hk": 2, "hv": 3, "dv": 4}
_OWN = "settings of a user's own"
_KNOWN = 4  # calls like one another behind which one is known
_LONG: tuple[int, str, str, str, dict[str, Any]] = (4096, "nhd", "contiguous", "float32", {})
"""Where a user has other settings, threads among them, 7 tokens more: two to ten threads cannot share them evenly."""


def _made(op: str, number: int = 0, **more: str) -> Case:
    """Return a case of calls of an op, some prepared and then repeated, steps of decoding, and such calls that raise.

    Each ``number`` has other numbers of tokens. A long call, which takes an interpreter long, comes where nothing is set, or much.
    """
    drawing, calls = Drawing(), []
    large = {"num_blocks": 48, "block": 384} if op == "static_update_" else {"num_blocks": 520, "block": 16}
    for tokens, pool, source, dtype, indices in (*_CALLS, *([_LONG] if op in OPS and more.get("surroundings", _OWN) == _OWN else [])):
        count = few(op, tokens + number)
        sizes = attrs.evolve(roomy(op, count), dtype=dtype, **(large if tokens == 5 else _UNLIKE if "lead" in indices else {}))
        if "lead" in indices:  # which are that many tokens whatever the number
            count, indices = tokens, indices if INDEX[op] == "slot_mapping" else {"is_padded": True}
        if op == "static_update_" and tokens in (4, 6, 20):
            sizes = attrs.evolve(sizes, num_blocks=20)  # rows, whose lengths may be read one by one where they are few
        like = OpCall(op, tokens=count, pool=pool, source=source, geometry=sizes, **indices)
        calls += [attrs.evolve(like, seed=seed).call(drawing) for seed in ((1, 2) if tokens in (5, 84) else (1,))]
    for way in ways(op):
        step = OpCall(op, tokens=1, more=way)  # which is called otherwise once it is known
        caches = step.caches(drawing)
        calls += [*(attrs.evolve(step, seed=seed).call(drawing, caches) for seed in range(_KNOWN)), step.beyond(drawing, caches)]
    if op == "static_update_":  # one row, which may be written in a way of its own
        one = OpCall(op, tokens=1, pool="hnd", source="[B, H, q, D]", geometry=Geometry(num_blocks=1, block=16), is_padded=True)
        calls += [attrs.evolve(one, seed=seed).call(drawing) for seed in range(_KNOWN)]
    if op in COMPUTING:  # places that few bits cannot say, of which several tokens see unlike ones
        sizes = attrs.evolve(roomy(op, 3), dtype="float32")
        long = OpCall(op, tokens=3, geometry=sizes, is_padded=True, more={"width": 40})
        calls += [attrs.evolve(long, seed=seed).call(drawing) for seed in (1, 2)]
    calls.append(OpCall(op).beyond(drawing))
    return Case(" ".join((f"calls of {op}", *(f"with {text}" for text in more.values()))), drawing.case(*calls, **more))


REQUIREMENTS = [
    _require(1, "Importing the plugin's module imports neither a compiler nor another framework.", check_import_is_light),
    _require(2, "Importing it takes at most half the processor time of importing kvdock, and 0.1 s.", check_import_cost),
    _require(3, "Importing it and probing opens no context on any device.", check_no_context),
    _require(
        4,
        "A process that is forked after a probe can use the backend, or is told why not by a KVDockError.",
        check_process,
        Case("fork", {"method": "fork"}),
    ),
    _require(
        5,
        "A process that is spawned after a probe can use the backend, or is told why not by a KVDockError.",
        check_process,
        Case("spawn", {"method": "spawn"}),
    ),
    _require(6, "Probing again gives the same answer.", check_probe),
    _require(7, "The name and the device type are words in lower case.", check_names),
    _require(
        8,
        "What it claims depends on the device alone, and only devices of types that it runs on are claimed.",
        check_claims,
        Case("every type", {"types": list(_TYPES)}),
    ),
    _require(
        9, "It lists at least one device, each once, with its index where the type has one, and tensors can be put there.", check_devices
    ),
    _require(10, "What it says it can do is always the same, and its kernels take every dtype that it declares.", check_capabilities),
    _require(11, "It brings a kernel of its own for at least one op.", check_kernels, level=Level.EXTENDED),
    _require(
        12,
        "Importing it and probing leave the settings of the process as they are: its folder and environment, filters of warnings, "
        "random numbers, floating-point mode, locale, garbage collector, threads, torch's defaults, and kvdock's own functions.",
        check_settings_of_import,
    ),
    _require(
        13,
        "Calls leave the settings of the process as they are, print nothing to stdout, and leave no threads behind but daemons of a pool.",
        check_settings_of_calls,
        *map(_made, EVERY),
    ),
    _require(14, "A process that has used it ends by itself, with exit code 0, and leaves no process behind.", check_ending),
    _require(15, "Its notes are lines of text, and asking for them opens no context on any device.", check_notes),
    _require(16, "Importing it and probing print nothing to stdout.", check_prints_nothing),
    _require(
        17,
        "Calls do the same whatever a user has set and passes, and leave that as it is, with plans that were made so or otherwise: torch's "
        "default dtype and device, deterministic algorithms, warnings as errors, autocast, inference mode, the floating-point mode, "
        "settings of Python, numpy and the system, parameters for tensors, and rows or all tensors made in inference mode.",
        check_surroundings,
        *(_made(op, number, surroundings=name) for op in EVERY for number, name in enumerate(SURROUNDINGS, 1)),
    ),
    _require(
        18,
        "A process that is forked behind calls on host memory can use the backend too, or is told why not by a KVDockError.",
        check_process,
        Case("fork", {"method": "fork behind calls"}),
    ),
    _require(
        19,
        "An index out of range does the same in an interpreter that leaves assertions out (python -O).",
        check_without_assertions,
        level=Level.EXTENDED,
    ),
    _require(20, "The first calls of a process may come from several threads at once.", check_first_calls_at_once),
]
