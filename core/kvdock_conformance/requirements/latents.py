"""Writing latents into a paged cache and reading them, ``KVD-MLA`` and ``KVD-MLAREAD``: what is asked of any op that goes by slots."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from kvdock_conformance.cases.any_op import Drawable
from kvdock_conformance.cases.drawing import Drawing
from kvdock_conformance.cases.latents import DRAWN, LatentCall, far
from kvdock_conformance.cases.layouts import PARTS, Geometry
from kvdock_conformance.cases.paged import FORETOLD, foretold, in_turn, shuffled
from kvdock_conformance.cases.pairs import covering
from kvdock_conformance.checking.any_op import check_only_written
from kvdock_conformance.checking.pools_shared import check_shared_pools
from kvdock_conformance.checking.repeated import check_repeated
from kvdock_conformance.checking.scratch import check_scratch_within
from kvdock_conformance.requirement import Case, Level, Requirement
from kvdock_conformance.requirements.families import Cases
from kvdock_conformance.requirements.ops import REQUIREMENTS as OF_ANY_OP
from kvdock_conformance.requirements.slots import SlotArea
from kvdock_conformance.requirements.threads import met

__all__ = ["ASKED", "REQUIREMENTS", "of_any_op"]

ASKED: Sequence[tuple[str, int | None, str]] = (
    ("first", 1, "Each token's latent is {done}, and behind it its rotary part, where slot_mapping names the slot."),
    ("bytes", None, "No other byte is changed when latents are {done}: neither between rows nor around them."),
    ("padding", 3, "When latents are {done}, a negative slot is padding, whichever negative number it is."),
    ("beyond", 4, "When latents are {done}, a slot beyond the pool raises in host memory before anything is, and is left out on a device."),
    ("ends", 5, "Latents are {done} at the first and the last slot of the pool, and at those on either side of a border between blocks."),
    ("index", 6, "When latents are {done}, slots are read as int32 and as int64, by the strides of slot_mapping."),
    ("batch", 7, "Latents are {done} as [T, D] and as [B, S, D]."),
    ("nothing", 8, "A call in which no latents are {done} changes nothing and raises nothing."),
    ("blocks", 10, "Latents are {done} in blocks of any number of slots, and pools of any number of blocks."),
    ("dims", 11, "Latents and rotary parts of any number of elements are {done}."),
    ("unlike", 13, "Latents are {done} that have more elements than the rotary part, and fewer."),
    ("many", 14, "Any number of latents may be {done} in a call."),
    ("orders", 16, "Latents are {done} by the pool's own strides, whatever the order of its dimensions in memory."),
    ("parts", None, "Latents are {done} in a pool that is a part of a larger tensor."),
    ("rows", 18, "When latents are {done}, those and rotary parts have strides of their own, as slices of one projection have."),
    ("addresses", 19, "Latents are {done} in tensors that begin at any address that is a multiple of their element's size."),
    ("numbers", 20, "Elements of every dtype arrive bit for bit when latents are {done}."),
    ("inputs", None, "What is only read stays as it was when latents are {done}."),
    ("repeated", None, "When latents are {done}, calls that differ from those before them are served as if they were the first."),
    ("scratch", None, "When latents are {done}, the scratch memory of a call is no more than its plan says, and given back with the call."),
    ("meeting", None, "Whatever two properties meet when latents are {done}, of dtype, memory orders, form, sizes and padding, they are."),
    ("threads", None, "When latents are {done}, two threads may do so in one pool at once, at other slots of its blocks."),
)
"""What a requirement is about, the number of its cases among those that all such ops have, and what must be so."""


_KNOWN = 4  # calls like one another, behind which one is known
_STEPS = (0, 1, 2, 3, 4, -1, 5, -5, -(2**31), 6)
_FACTORS: Mapping[str, Sequence[Any]] = {
    "rows": ("fused kv", "contiguous", "fused qkv", "odd steps", "odd address"),
    "pool": ("nhd", "padded blocks"),
    "lead": ((1,), (13,), (3, 4)),
    "padding": (0, 1, 2),
    "sizes": ((64, 16), (7, 3)),
    "dtype": ("bfloat16", "float64", "uint8"),
    "index": ("int64", "int32"),
}
_HOW: Mapping[str, Mapping[str, Any]] = {
    "inputs": {"check": check_only_written},
    "scratch": {"check": check_scratch_within, "level": Level.EXTENDED},
    "meeting": {"check": check_repeated},
    "threads": {"check": check_shared_pools},
}


def _own(area: SlotArea) -> Mapping[str, Sequence[Cases]]:
    """Return the cases that are for latents alone, by what they are about; those of "index" are beside the others."""
    make, names = area.make, ("nhd", "padded slots", "padded blocks", "odd steps", "odd address", "nhd")

    def repeated() -> Iterable[Case]:
        for name, order in (("other strides at each call", names), ("the same at each call", ("nhd",) * 4)):
            yield in_turn(name, [make("", pool=pool) for pool in order], own_pools=True)
        leads = [(5,), (13,), (1,), (2, 3), (24,), (13,)]
        yield in_turn("other tokens and slots at each call", [make("", shuffled(24, seed), lead) for seed, lead in enumerate(leads)])
        yield foretold([make("", [slot]) for slot in FORETOLD], "slot_mapping")
        for (rank, rope), dtype in itertools.product(((64, 16), (5, 3), (7, 1)), ("bfloat16", "uint8")):
            sizes = attrs.evolve(area.base, hk=1, dk=rank, hv=1, dv=rope, dtype=dtype)
            yield in_turn(f"a step of {rank} and {rope} again, {dtype}", [make("", [slot], geometry=sizes) for slot in _STEPS])

    def together() -> Iterable[Case]:
        for seed, how in enumerate(covering(_FACTORS)):
            name = ", ".join(f"{factor} {value}" for factor, value in how.items())
            lead, padding, (rank, rope) = how.pop("lead"), how.pop("padding"), how.pop("sizes")
            how["geometry"] = attrs.evolve(area.base, hk=1, dk=rank, hv=1, dv=rope, dtype=how.pop("dtype"))
            slots = random.Random(seed).sample(range(area.base.capacity), math.prod(lead))  # noqa: S311 - the same in every run
            padded = [-1 if at % 3 < padding else slot for at, slot in enumerate(slots)]
            calls = [make("", each, lead, **how) for each in (*[slots] * _KNOWN, padded, slots)]
            # Of parts that do not lie together, with the steps of such that do.
            yield in_turn(name, [*calls, make("", slots, lead, **{**how, "rows": "two projections"})])

    def threads() -> Iterable[Case]:
        for name, slots, others in (
            ("one slot", [0], [1]),
            ("few slots", [0, 5], [1, 4]),
            ("every other slot", range(0, 24, 2), range(1, 24, 2)),
        ):
            drawing, one, other = Drawing(), make("", slots), make("", others)
            pools = one.pools(drawing)
            yield from met(name, drawing.case(one.call(drawing, pools), other.call(drawing, pools)))

    def scratch() -> Iterable[Case]:
        drawing, sizes = Drawing(), attrs.evolve(area.base, num_blocks=34, block=16, hk=128, dk=512, hv=1, dv=64)
        few, many = (make("", range(count), geometry=sizes) for count in (3, 528))  # long rows: an interpreter takes its time for each
        pools = many.pools(drawing)
        calls = [each.call(drawing, pools) for each in (few, many)]
        for arena in drawing.arenas:
            arena["fill"] = "zeros"  # nobody looks at what it holds
        yield Case("few and many", drawing.case(*calls, spare=16 << 20, most=1 << 30), Level.EXTENDED)

    gaps = ("padded slots", "padded blocks", "odd steps")
    one = {"lead": (13,), "index_order": "one", "rows": "contiguous" if "gather" in area.op else "one token for all"}
    wide = attrs.evolve(area.base, num_blocks=80, block=16)
    large = attrs.evolve(area.base, num_blocks=2**15 + 2, block=16, dtype="float32")  # more than 2**24 elements
    whole = "nhd" if "gather" in area.op else "untouched memory"  # what is read is not all zeros
    thin = Geometry.even(1, 1, num_blocks=2**20 + 1, block=16, dtype="uint8")  # more than 2**24 slots
    return {
        "index": ([make(f"{index}, one slot for all", [5], index=index, **one) for index in ("int32", "int64")],),
        "bytes": ([make(name, pool=name) for name in gaps], [make(f"rows: {name}", rows=name) for name in ("padded tokens", "fused kv")]),
        "rows": () if "gather" in area.op else (area.in_rows_and_batches(("values behind one token", "values of the first token")),),
        "parts": (
            [make(f"{name}, {count} tokens", lead=(count,), pool=name) for name in PARTS for count in (2, 13)],
            [make("far into a pool", [2**19 + 20, 0, 2**18], geometry=large, pool=whole)],
            [make("behind 2**24 slots", [2**24 + 1, 16, 2**24 + 15], geometry=thin, pool=whole)],
            functools.partial(far, area.op),
        ),
        "beyond": ([make("behind 1024 good ones", [*range(1024), 80 * 16], geometry=wide)],),
        "inputs": ([make("plain"), make("with padding", [3, -1, -7, 9]), make("fused", rows="fused kv"), make("int32", index="int32")],),
        "repeated": (repeated,),
        "meeting": (together,),
        "scratch": (scratch,),
        "threads": (threads,),
    }


def _requirements(area: SlotArea, done: str) -> Iterator[Requirement]:
    shared, own = area.shared(), _own(area)
    for number, (role, at, sentence) in enumerate(ASKED, 1):
        yield area.require(number, sentence.format(done=done), *(shared[at] if at else ()), *own.get(role, ()), **_HOW.get(role, {}))


def of_any_op(op: str, drawn: Drawable) -> Iterator[Requirement]:
    """Yield what is asked of any op, with cases that are drawn when they are needed. Outputs that an op itself makes are not asked for."""
    for item in OF_ANY_OP:
        made = attrs.evolve(item.of(op), cases=functools.cache(functools.partial(lambda each: [*each.cases(drawn)], item)))
        if item.id != "KVD-OP-018":
            yield made


_AREAS = {"mla_caching_": ("MLA", "written"), "mla_gather": ("MLAREAD", "read")}
REQUIREMENTS = [
    *(
        item
        for op, (code, done) in _AREAS.items()
        for item in (*_requirements(SlotArea(code, op, functools.partial(LatentCall, op)), done), *of_any_op(op, DRAWN[op]))
    )
]
