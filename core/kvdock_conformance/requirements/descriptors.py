"""Plans of every op: when they are prepared, what they may be used for, how they end. ``KVD-DESC``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from kvdock_conformance.cases.drawing import Drawing
from kvdock_conformance.cases.every_op import OPS, OpCall, roomy
from kvdock_conformance.cases.layouts import POOLS, Geometry
from kvdock_conformance.cases.repeats import alignments, repeats, very_often
from kvdock_conformance.checking import many_calls, plans, repeated
from kvdock_conformance.requirement import Case, Check, Level, Requirement

__all__ = ["AREA", "REQUIREMENTS"]

AREA = "descriptors"
_SMALL = Geometry(num_blocks=8, block=8)
_MANY = (17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024)
_MORE_HEADS = Geometry.even(4, 8, num_blocks=8, block=8)
_ASKED = [Geometry.even(2, dim, num_blocks=8, block=8) for dim in (12, 20)]  # nobody was asked about these before
_OTHER_SIZES = Geometry(num_blocks=8, block=8, hk=3, dk=16, hv=1, dv=8)


def _require(number: int, sentence: str, check: Check, cases: Callable[[], Iterable[Case]]) -> Requirement:
    """Return a requirement of this area, about calls that the backend serves."""
    return Requirement(f"KVD-DESC-{number:03}", sentence, AREA, check, cases, Level.CORE, plans.OWN_PLANS)


def _sequence(name: str, calls: Sequence[OpCall], *, same_caches: bool = False, **more: Any) -> Case:
    """Return calls one after the other, each on caches of its own or all on those of the first."""
    drawing = Drawing()
    caches = calls[0].caches(drawing)
    others = [call.call(drawing, caches if same_caches else None) for call in calls[1:]]
    return Case(f"{calls[0].op}, {name}", drawing.case(calls[0].call(drawing, caches), *others, **more))


def _each(
    name: str, calls: Callable[[OpCall], Sequence[OpCall]], *, same_caches: bool = False, **more: Any
) -> Callable[[], Iterable[Case]]:
    """Return a function that makes one such case for each op."""
    return lambda: (_sequence(name, calls(OpCall(op, tokens=3, geometry=_SMALL)), same_caches=same_caches, **more) for op in OPS)


def _repeated() -> Iterable[Case]:
    """Return one signature again and again."""
    for op in OPS:
        for name, pool in (("dense", "nhd"), ("padded", "padded blocks"), ("at an odd address", "odd address")):
            calls = [OpCall(op, tokens=3, pool=pool, geometry=_SMALL, seed=seed) for seed in range(3)]
            yield _sequence(f"{name}, caches of their own", calls, warm=1)
            yield _sequence(f"{name}, the same caches", calls, same_caches=True, warm=1)


def _new_counts(warm: int = 1) -> Iterable[Case]:
    """Return calls that differ in what is a run-time value, behind so many that do not."""
    for op in OPS:
        first = OpCall(op, geometry=Geometry(num_blocks=16, block=16))
        counts, most = (1, 2, 3, 4, 7, 8, 15, 16, *_MANY), {"copy_blocks_": 8, "static_update_": 16}.get(op, 1024)
        sizes = Geometry(num_blocks=64, block=16) if most == 1024 else first.geometry
        again = [attrs.evolve(first, geometry=sizes)] * warm
        yield _sequence("token counts", [*again, *(attrs.evolve(again[0], tokens=count) for count in counts if count <= most)], warm=warm)
        if op == "copy_blocks_":
            continue
        sources = ("contiguous", "fused qkv", "padded tokens", "[B, H, q, D]", "every other token", "padded heads")
        steps = [attrs.evolve(first, source=name, tokens=count) for name in sources for count in (5, 1, 8)]
        yield _sequence("strides of tokens", [first] * warm + steps, same_caches=True, warm=warm)
        if op == "static_update_":
            continue
        leads = ((2, 3), (3, 2), (1, 5), (5, 1), (1, 1), (4, 16))
        batches = [attrs.evolve(first, lead=lead) for lead in (*leads[:1] * warm, *leads)]
        yield _sequence("sizes of batches", batches, same_caches=True, warm=warm)


def _one_memory() -> Iterable[Case]:
    """Return calls on caches that lie at one address, with other sizes, strides and dtypes each time."""
    for op in OPS:
        drawing = Drawing()
        pools = POOLS["nhd"](drawing, _SMALL)
        sizes = [(8, 8, 2, 8), (16, 4, 2, 8), (8, 8, 4, 4), (4, 16, 2, 8), (8, 8, 1, 16)]
        seen = [tuple(pool.shaped(shape) for pool in pools) for shape in sizes]
        seen.append(tuple(pool.shaped((8, 2, 8, 8)).transpose(1, 2) for pool in pools))
        seen.append(tuple(attrs.evolve(pool, dtype="float16") for pool in pools))
        calls = []
        for seed, (k, v) in enumerate([*seen, *seen]):
            blocks, block, heads, dim = k.shape
            first = OpCall(op, tokens=2, geometry=Geometry.even(heads, dim, num_blocks=blocks, block=block, dtype=k.dtype), seed=seed % 2)
            caches = (k.transpose(1, 2), v.transpose(1, 2)) if op == "static_update_" else (k, v)
            calls.append(first.call(drawing, caches))
        yield Case(f"{op}, one memory seen in other ways", drawing.case(*calls))


def _changing(first: OpCall) -> list[OpCall]:
    """Return calls that need plans of their own, and come back to the first ones."""
    changed = [
        first,
        attrs.evolve(first, pool="hnd"),
        attrs.evolve(first, pool="padded slots"),
        attrs.evolve(first, geometry=_OTHER_SIZES),
        attrs.evolve(first, geometry=attrs.evolve(_SMALL, dtype="float32")),
        attrs.evolve(first, geometry=attrs.evolve(_SMALL, dtype="float16")),
        attrs.evolve(first, pool="k and v unlike"),
        attrs.evolve(first, geometry=Geometry(num_blocks=16, block=4)),
        attrs.evolve(first, tokens=2, pool="halves [NB, 2, ...]"),
        attrs.evolve(first, geometry=attrs.evolve(_SMALL, num_blocks=6)),  # the fewest places come last
    ]
    return [*changed, *(attrs.evolve(call, seed=6) for call in changed)]


def _two(first: OpCall) -> list[OpCall]:
    """Return two signatures in turns, of contiguous caches: what refuses others prepares plans for these."""
    return [attrs.evolve(first, seed=seed, geometry=(_SMALL, _MORE_HEADS)[seed % 2]) for seed in range(5)]


def _again(first: OpCall) -> list[OpCall]:
    """Return one signature several times."""
    return [attrs.evolve(first, seed=seed) for seed in range(3)]


def _with_gradients() -> Iterable[Case]:
    """Return calls one after the other, of few tokens and many, and with indices of each form."""
    forms: Sequence[dict[str, Any]] = ({"tokens": 18, "index": "int32"}, {"tokens": 18, "is_padded": True})
    for op, form in itertools.product(OPS, (*({"tokens": count} for count in (3, 84, 4097)), *forms)):
        name = ", ".join(f"{key} {value}" for key, value in form.items())
        yield _sequence(name, _again(OpCall(op, geometry=roomy(op, form["tokens"]), **form)), same_caches=True)


REQUIREMENTS = [
    _require(1, "A call of a signature that the calling thread has used before prepares nothing.", plans.check_reuse, _repeated),
    _require(
        2,
        "A call that differs from one before it in the number of tokens, or in the strides of tokens, prepares nothing.",
        plans.check_reuse,
        _new_counts,
    ),
    _require(
        3,
        "A plan is used only for the shapes, strides and dtypes that it was prepared for, in whatever order signatures come.",
        plans.check_changes,
        lambda: (*_each("signatures in turns", _changing)(), *_one_memory()),
    ),
    _require(
        4,
        "A plan that was prepared for tensors at multiples of 16 bytes is never used for tensors at addresses of another kind.",
        plans.check_changes,
        alignments,
    ),
    _require(
        5,
        "A plan that leaves its cache is destroyed once, under its device and without an error, and the other plans keep working.",
        plans.check_eviction,
        _each("signatures that drive each other out", _two),
    ),
    _require(
        6,
        "A plan that leaves its cache during a call of it is destroyed after that call, which ends as if nothing had happened.",
        plans.check_in_use,
        lambda: (
            case
            for clear in (False, True)
            for case in _each("cleared meanwhile" if clear else "evicted meanwhile", lambda first: _two(first)[:2], clear=clear)()
        ),
    ),
    _require(
        7,
        "Two threads that call an op at once, neither with a plan to begin with, both get what they would get alone.",
        plans.check_threads,
        _each("two threads", lambda first: _changing(first)[:6]),
    ),
    _require(
        8,
        "After the caches have been cleared from another thread, calls prepare anew and are right, and the plans from before are "
        "destroyed once.",
        plans.check_clear_elsewhere,
        _each("cleared from another thread", _again, same_caches=True),
    ),
    _require(
        9,
        "A descriptor says how much scratch memory its calls take, as a non-negative int.",
        plans.check_workspace,
        _each("workspace_bytes", lambda first: [first]),
    ),
    _require(
        10,
        "Kernel.supports returns its reasons as a list of texts, gives the same answer to the same request, whatever it was asked before, "
        "changes nothing, and takes no memory of the pools' size.",
        plans.check_supports,
        _each("every dtype", lambda first: [attrs.evolve(first, geometry=sizes) for sizes in _ASKED]),
    ),
    _require(
        11,
        "A plan keeps none of the tensors of its calls, so that what nobody else uses is freed, and has no more than 1 MiB of its own.",
        plans.check_releases,
        _each("tensors let go of", _again),
    ),
    _require(
        12,
        "Kernel.prepare returns a descriptor of its own each time, which outlives the others.",
        plans.check_own_plans,
        _each("two plans for one request", lambda first: [first]),
    ),
    _require(
        13,
        "A call that repeats the one before is served by the addresses and the index values that it brings, also where Descriptor.fix "
        "serves it, and also where it is bound to its pools.",
        repeated.check_repeated,
        repeats,
    ),
    _require(
        14,
        "A call whose like was made before compiles, loads, opens and starts nothing, whatever the number and the strides of tokens.",
        repeated.check_quiet,
        lambda: _new_counts(warm=3),
    ),
    _require(
        15,
        "Tensors that require gradients are served like others, and so are calls in inference mode: nothing is recorded.",
        repeated.check_autograd,
        _with_gradients,
    ),
    _require(
        16,
        "A call that was made very often is served like the first, by what repeats it and by its plan.",
        many_calls.check_many_calls,
        very_often,
    ),
]
