"""What a backend takes of memory and time, and that it gives back what it took. ``KVD-RESOURCE``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from kvdock_conformance.cases.computing import COMPUTING
from kvdock_conformance.cases.drawing import Drawing, call
from kvdock_conformance.cases.every_op import EVERY, INDEX, OpCall, few, roomy, ways
from kvdock_conformance.cases.layouts import POOLS, Geometry
from kvdock_conformance.cases.pairs import covering
from kvdock_conformance.checking import costs, resources, scratch
from kvdock_conformance.checking.plans import OWN_PLANS
from kvdock_conformance.checking.served import SERVED
from kvdock_conformance.requirement import Capability, Case, Check, Level, Requirement

__all__ = ["AREA", "REQUIREMENTS"]

AREA = "resources"
_SIZES = Geometry(num_blocks=16, block=16)
_SEEN = (1, 2, 3, 8, 18, 84)
_MOST = max(_SEEN)
_SPARE = 16 << 20
"""So many bytes nobody counts: what malloc gives back late is no more than that."""
_LARGE = 34 << 20
"""So many bytes of keys: a little more than what malloc keeps when it is freed, so that it is seen."""
_LARGER = 66 << 20
"""So many bytes of keys: more than a thread has of malloc's, who takes of that where a process may have no more."""
_COMPILED_S = 8.0
"""A compiler may take so long for a plan, which may have several kernels, where all processors are busy."""
_WAYS = (("nhd", "contiguous"), ("hnd", "[B, H, q, D]"), ("padded slots", "padded heads"), ("odd address", "odd address"))
"""Pools and rows: dense for all ops but the static one, dense for that alone, and not dense."""
_TIMED = (costs.check_supports_time, costs.check_new_counts, costs.check_destroy_time)
_COUNTED = ("k", "v", "slot_mapping", "k_out", "v_out", "block_pairs", *(name for op in COMPUTING.values() for name in op.rows))


def _require(
    number: int,
    sentence: str,
    check: Check,
    *calls: Callable[[Drawing, OpCall], Iterable[dict[str, Any]]],
    needs: Capability = OWN_PLANS,
    level: Level = Level.CORE,
    wrong: bool = False,
    ways: Sequence[tuple[str, str]] = (("nhd", "contiguous"),),
    plans: int = 1,
    **more: int | Sequence[int],
) -> Requirement:
    """Return a requirement of this area: cases of each op on each pool and rows, those of second calls extended; if so asked, of errors.

    A case prepares so many plans at most, and has the time for it.
    """

    def cases() -> Iterable[Case]:
        for op, (number, made), (pool, rows) in itertools.product(EVERY, enumerate(calls), ways):
            drawing = Drawing()
            name = ", ".join((op, *["extended"][:number], *[f"{pool}, {rows}"][: len(ways) - 1]))
            plain = OpCall(op, tokens=3, pool=pool, source=rows, geometry=_SIZES)
            yield Case(name, drawing.case(*made(drawing, plain), **more), Level.EXTENDED if number else Level.CORE)
        yield from _wrong() if wrong else ()

    limit_s = max(60.0, plans * _COMPILED_S)
    return Requirement(f"KVD-RESOURCE-{number:03}", sentence, AREA, check, cases, level, needs, limit_s=limit_s, alone=check in _TIMED)


def _wrong() -> Iterable[Case]:
    """Return a call of each op with indices out of range, which raises on the host."""
    for op in EVERY:
        drawing = Drawing()
        yield Case(f"{op}, out of range", drawing.case(OpCall(op).beyond(drawing)))


def _of_rows(op: str, tokens: int) -> Geometry:
    sizes = roomy(op, tokens)
    return attrs.evolve(sizes, num_blocks=17) if op == "static_update_" else sizes


def _of_64_mib(op: str, tokens: int) -> Geometry:
    return Geometry(num_blocks=4, block=2**20, hk=1, hv=1) if op == "static_update_" else Geometry(num_blocks=2**18, block=16, hk=1, hv=1)


def _counted(
    *counts: int, sizes: Callable[[str, int], Geometry] = roomy, fill: str = "random"
) -> Callable[[Drawing, OpCall], Iterable[dict[str, Any]]]:
    """Return a function that returns calls of so many tokens, each the first of the same ones, with the same strides."""

    def calls(drawing: Drawing, plain: OpCall) -> Iterable[dict[str, Any]]:
        most = attrs.evolve(plain, tokens=max(counts), geometry=sizes(plain.op, max(counts)))
        every: Any = most.arguments(drawing)
        for arena in drawing.arenas:
            arena["fill"] = fill
        counted = [name for name in _COUNTED if name in every]
        for count in counts:
            first = {name: every[name].slice(2 if plain.op == "static_update_" else 0, 0, count) for name in counted}
            yield call(plain.op, **(every | first))

    return calls


def _signatures(drawing: Drawing, plain: OpCall) -> Iterable[dict[str, Any]]:
    """Return calls of few signatures."""
    pools = ("nhd", "hnd", "padded slots", "k and v unlike")
    return [attrs.evolve(plain, pool=pool).call(drawing) for pool in pools]


def _unlike(drawing: Drawing, plain: OpCall) -> Iterable[dict[str, Any]]:
    """Return calls of many signatures: sizes of heads, each in all memory orders."""
    pools = [pool for pool in POOLS if pool != "untouched memory"]
    sizes = [Geometry.even(heads, dim, num_blocks=16, block=16) for heads, dim in ((2, 8), (3, 16), (5, 40))]
    return [attrs.evolve(plain, pool=pool, geometry=each).call(drawing) for each in sizes for pool in pools]


def _large(drawing: Drawing, plain: OpCall) -> Iterable[dict[str, Any]]:
    """Return a call of many MiB on dense memory, and others on such that is not."""
    room = _LARGE // (2048 if plain.op == "copy_blocks_" else 1024)
    tokens, sizes = few(plain.op, room), attrs.evolve(roomy(plain.op, room), hk=8, dk=64, hv=8, dv=64)
    ways = [*_WAYS]
    if plain.op == "static_update_":  # whose heads come before its positions
        ways.insert(0, ways.pop(1))
    calls = [attrs.evolve(plain, tokens=tokens, geometry=sizes, pool=pool, source=rows).call(drawing) for pool, rows in ways]
    if INDEX[plain.op] == "slot_mapping":  # rows of a batch that do not follow each other, taken apart by padding
        batch = attrs.evolve(plain, lead=(3, tokens // 3), geometry=sizes, source="cut short", is_padded=True)
        calls.append(batch.call(drawing))
    for arena in drawing.arenas:
        arena["fill"] = "zeros"  # nobody looks at what it holds
    return calls


def _few_and_large(drawing: Drawing, plain: OpCall) -> Iterable[dict[str, Any]]:
    """Return a call of few tokens, and one of many MiB."""
    room = _LARGER // (2**17 if plain.op in ("paged_caching_", "gather_paged") else 2**18)
    # Long rows: an interpreter takes its time for each.
    tokens, sizes = few(plain.op, room), attrs.evolve(roomy(plain.op, room), hk=128, dk=512, hv=128, dv=512)
    return _counted(3, tokens, sizes=lambda op, most: sizes, fill="zeros")(drawing, plain)


def _of_each_path(drawing: Drawing, plain: OpCall) -> Iterable[dict[str, Any]]:
    """Return calls in which every two properties meet that choose a way through a kernel."""
    factors = {"tokens": (3, _MOST), "memory": _WAYS, "is_padded": (False, True), "is_run": (False, True), "is_batch": (False, True)}
    for one in covering({**factors, "more": range(len(ways(plain.op)))}):
        (pool, rows), count = one["memory"], one["tokens"]
        how = {"pool": pool, "source": rows, "geometry": roomy(plain.op, count), "lead": (count // 3, 3) if one["is_batch"] else None}
        how |= {"is_padded": one["is_padded"], "is_run": one["is_run"], "more": ways(plain.op)[one["more"]]}
        yield attrs.evolve(plain, tokens=count, **how).call(drawing)
    for pool, rows in _WAYS[:2]:  # a step, which may be repeated in a way of its own
        yield attrs.evolve(plain, tokens=1, pool=pool, source=rows).call(drawing)


_ONCE = _counted(*_SEEN, *(count for count in range(9, _MOST) if count not in _SEEN))
_FIRST = _counted(*_SEEN, *(count for count in range(9, 31) if count not in _SEEN))
"""Calls of few numbers of tokens, which come first, and then of many between them."""


def _ever_more(drawing: Drawing, plain: OpCall) -> Iterable[dict[str, Any]]:
    """Return calls of few numbers of tokens, and then of about twice as many again and again: what holds the most grows each time."""
    first = 5 if plain.op in ("copy_blocks_", *COMPUTING) else 8  # an interpreter takes its time for each block
    counts = (2**power + more for power in range(first, first + 5) for more in (1, 2))
    return _counted(*_SEEN, *counts, sizes=_of_rows)(drawing, plain)


REQUIREMENTS = [
    _require(
        1,
        "No memory of a call is kept behind it, neither by its plan, what repeats it nor an error that it raised: as no tensor, as no view "
        "of one, and in no cycle that only the garbage collector frees.",
        resources.check_keeps_nothing,
        _of_each_path,
        needs=SERVED,
        plans=18,
        wrong=True,
    ),
    _require(
        2,
        "Calls leave nothing behind, however often they are made or raise, with the same index values or others: no tensor, memory, open "
        "file or thread.",
        resources.check_leaks,
        _counted(3, 1, 2, 5, 8, 24, sizes=_of_rows),
        _of_each_path,
        needs=SERVED,
        plans=18,
        wrong=True,
        values=1,
    ),
    _require(
        3,
        "Nothing is kept for a number of tokens that comes once.",
        resources.check_leaks_of_counts,
        _ever_more,
        _ONCE,
        warm=len(_SEEN),
    ),
    _require(4, "A plan that is destroyed gives back all that was taken to prepare and call it.", resources.check_given_back, _signatures),
    _require(
        5,
        "Plans of many signatures that are destroyed give back the memory of their device, and of the host all but 64 KiB each.",
        resources.check_given_back_by_others,
        _unlike,
        level=Level.EXTENDED,
        plans=60,
    ),
    _require(
        6,
        "Each kernel that it brings serves a plain call, in one dtype at least of those that it claims and stores as they come.",
        costs.check_serves,
        _counted(3),
        needs=costs.OWN_KERNEL,
    ),
    _require(
        7,
        "To ask whether a new request is supported takes at most 20 times as long as a repeated call.",
        costs.check_supports_time,
        _unlike,
    ),
    _require(
        8,
        "The first call with a number of tokens takes at most 8 times as long as those after it.",
        costs.check_new_counts,
        _FIRST,
        warm=len(_SEEN),
    ),
    _require(
        9,
        "A call on memory that is not dense takes about as much scratch memory as on dense memory: nothing is made contiguous first.",
        scratch.check_scratch,
        _large,
        level=Level.EXTENDED,
        spare=_LARGE // 4,
    ),
    _require(
        10,
        "The scratch memory of a call goes by what it moves, and not by how large the pools are.",
        scratch.check_scratch_within,
        _counted(3, 1024, sizes=_of_64_mib, fill="zeros"),
        spare=_SPARE,
        most=0,
    ),
    _require(
        11,
        "The scratch memory of a call, on memory that is dense or not, comes from torch's allocator, is no more than its plan says "
        "behind the call, whatever calls it had before, and than eight times what it moves, and is given back with the call.",
        scratch.check_scratch_within,
        _few_and_large,
        ways=_WAYS[::2],
        spare=_SPARE,
        most=16 * _LARGER,
    ),
    _require(12, "To destroy a plan takes at most 100 times as long as a repeated call.", costs.check_destroy_time, _signatures),
]
