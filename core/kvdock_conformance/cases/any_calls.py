"""Calls of any op, by what a requirement is about: every two properties, repetition, change, what is missing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs

from kvdock.ops.catalog import CATALOG
from kvdock.plugin import Role
from kvdock_conformance.cases.addresses import at_any_address
from kvdock_conformance.cases.any_op import AnyCall, Drawable, factors_of, in_turn, runtime_words, static_words
from kvdock_conformance.cases.drawing import Drawing, call, each_elsewhere
from kvdock_conformance.cases.pairs import covering
from kvdock_conformance.checking.pool_thread import MADE_BY
from kvdock_conformance.checking.surroundings import SURROUNDINGS
from kvdock_conformance.requirement import Case, Extended, Level, at_level

__all__ = [
    "again",
    "at_once",
    "behind_an_error",
    "changing",
    "every_two",
    "evicted",
    "inside",
    "leaking",
    "new_counts",
    "on_one_memory",
    "once_each",
    "outputs",
    "plain",
    "repeated",
    "surrounded",
    "threaded",
    "to_the_ends",
    "very_often",
    "with_gradients",
    "without_tokens",
]

_COUNTS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65, 255, 256, 257)
_FEW = (3, 1, 8)
_SELDOM = range(67, 127, 2)  # as many tokens as no other case has


def _settled(op: Drawable, seed: int = 0, **how: Any) -> AnyCall:
    """Return a call with its sizes."""
    return AnyCall(op, how, seed=seed).settled() or AnyCall(op)


def every_two(op: Drawable) -> Iterator[Case | Extended]:
    """Yield calls in which every two properties meet, and a plain one with each tensor at addresses of every kind."""
    for level, classes in ((Level.CORE, ("even", "ones", "odd", "many")), (Level.EXTENDED, ("large",))):
        yield from at_level(level, functools.partial(_every_two, op, level, classes))
    yield from at_any_address(Case("even", in_turn([_settled(op, sizes="even")])))


def _every_two(op: Drawable, level: Level, classes: Sequence[str]) -> Iterator[Case]:
    plain = {factor: values[0] for factor, values in factors_of(op.schema, "even").items()}
    for number, how in enumerate(covering(factors_of(op.schema, *classes))):
        special = [f"{factor} {value}" for factor, value in how.items() if value != plain[factor]]
        yield Case(f"{level.value} {number}: {', '.join(special) or 'plain'}", in_turn([_settled(op, number, **how)]), level)


def plain(op: Drawable) -> Iterator[Case]:
    """Yield plain calls."""
    for sizes in ("even", "ones", "odd"):
        yield Case(f"sizes {sizes}", in_turn([_settled(op, sizes=sizes)]))


def without_tokens(op: Drawable) -> Iterator[Case]:
    """Yield calls in which one run-time size is 0, or all are."""
    words = sorted(runtime_words(op.schema))
    for name, zero in {**{word: [word] for word in words}, "all": words}.items():
        call = AnyCall(op, {"lead": 2 if name == "lead1" else 1}).settled(**dict.fromkeys(zero, 0)) if zero else None
        if call is not None and 0 in call.sizes.values():
            yield Case(f"{name} = 0", in_turn([call]))


def _others(first: AnyCall, counts: Iterable[int], memory: Iterable[str]) -> list[AnyCall]:
    """Return calls like the first with other numbers of tokens, and with other steps of what is no pool."""
    static = {word: first.sizes[word] for word in static_words(first.op.schema) if word in first.sizes}
    words, pools = runtime_words(first.op.schema), {arg.name for arg in first.op.schema.static_args}
    made = [attrs.evolve(first, sizes=static, seed=count).settled(**dict.fromkeys(words, count)) for count in counts]
    found = [call for call in made if call is not None] if words else []
    tensors = [arg.name for arg in first.op.schema.args if arg.is_tensor and arg.name not in pools]
    return found + [
        attrs.evolve(one, how={**one.how, **{f"{name} memory": kind for name in tensors}}) for kind in memory for one in found[:3]
    ]


def repeated(op: Drawable) -> Iterator[Case]:
    """Yield calls that repeat one another, with others in between."""
    for text, shared in (("the same pools", True), ("pools of their own", False)):
        first = _settled(op)
        again = [attrs.evolve(first, seed=seed) for seed in range(1, 6)]
        others = _others(first, _FEW, ("wide gaps", "odd gaps", "other order"))
        yield Case(text, in_turn([first, *again, *others, *again[:3], *others[:1] * 3, *again], pools=shared))
    drawing, one = Drawing(), _settled(op)
    args = one.arguments(drawing)
    others_args = attrs.evolve(one, seed=1).arguments(drawing, one.kept(args, pools=False))
    turned = [call(op.schema.name, **each) for each in each_elsewhere(args, others_args)]
    yield Case(
        "each argument in turn from elsewhere",
        drawing.case(*turned),
    )


def new_counts(op: Drawable) -> Iterator[Case]:
    """Yield calls behind the first one that differ in what is no part of the key."""
    first = _settled(op, sizes="many")  # so that pools have room for many
    again = [attrs.evolve(first, seed=seed) for seed in (1, 2)]
    yield Case("the same again", in_turn([first, *again], warm=1))
    yield Case("pools of their own", in_turn([first, *again], pools=False, warm=1))
    others = _others(first, _COUNTS, ("wide gaps",))
    if others:
        yield Case("counts and steps", in_turn([first, *others], warm=1))


def _last_dtypes(op: Drawable) -> dict[str, str]:
    """Return what gives each argument the last of its dtypes."""
    return {factor: values[-1] for factor, values in factors_of(op.schema, "even").items() if factor.endswith("dtype")}


def _batches(op: Drawable) -> list[dict[str, Any]]:
    """Return what makes a call one of rows of tokens, if the op has such."""
    return [{"lead": rank} for rank in factors_of(op.schema, "even").get("lead", ()) if rank > 1]


def _signatures(op: Drawable) -> list[AnyCall]:
    """Return calls that need plans of their own: other sizes and dtypes, and pools in another order."""
    first = _settled(op, seed=3)
    found = [first, _settled(op, seed=4, sizes="odd"), _settled(op, seed=5, sizes="ones")]
    pools = {f"{arg.name} memory": "odd gaps" for arg in op.schema.static_args}
    found.append(attrs.evolve(first, how={**first.how, **pools}))
    found += [_settled(op, seed=6, **batch) for batch in _batches(op)]
    for factor, values in factors_of(op.schema, "even").items():
        if factor.endswith("dtype"):
            found += [attrs.evolve(first, how={**first.how, factor: value}) for value in values[1:]]
    return found


def changing(op: Drawable) -> Iterator[Case]:
    """Yield calls that need plans of their own, in turns."""
    yield Case("signatures in turns", in_turn([*_signatures(op), *_signatures(op)], pools=False))


def evicted(op: Drawable) -> Iterator[Case]:
    """Yield calls whose plans drive one another out."""
    first, other = _settled(op), _settled(op, seed=4, sizes="odd")
    if static_words(op.schema):
        yield Case("signatures that drive each other out", in_turn([first, other, first, other, first], pools=False))


def again(op: Drawable) -> Iterator[Case]:
    """Yield calls of one signature."""
    first = _settled(op)
    yield Case("one signature", in_turn([attrs.evolve(first, seed=seed) for seed in range(3)]))


def outputs(op: Drawable) -> Iterator[Case]:
    """Yield plain calls, if the op returns what it writes."""
    if any(arg.returned for arg in op.schema.args):
        yield from plain(op)


def with_gradients(op: Drawable) -> Iterator[Case]:
    """Yield calls of one signature, if anything that is read may require gradients."""
    if any(arg.role is Role.TENSOR and any(dtype.is_floating_point for dtype in arg.dtypes) for arg in op.schema.args):
        yield from again(op)


def surrounded(op: Drawable) -> Iterator[Case]:
    """Yield calls of several signatures, some of them known, in each surroundings."""
    for name in SURROUNDINGS:
        first, level = _settled(op), Level.CORE if name in ("settings of a user's own", "deterministic algorithms") else Level.EXTENDED
        known = [attrs.evolve(each, seed=seed) for each in (first, *(_settled(op, **batch) for batch in _batches(op))) for seed in range(5)]
        yield Case(f"with {name}", in_turn([*known, *_signatures(op)], pools=False, surroundings=name), level)


def to_the_ends(op: Drawable) -> Iterator[Case]:
    """Yield calls on memory of each kind, of few tokens and many."""
    tensors = [arg.name for arg in op.schema.args if arg.is_tensor]
    for sizes, memory in itertools.product(("even", "ones", "odd", "many"), ("dense", "wide gaps", "odd gaps")):
        how: dict[str, Any] = {f"{name} memory": memory for name in tensors}
        every = [_settled(op, seed, sizes=sizes, **how, **dtypes) for seed, dtypes in ((0, {}), (1, {}), (2, _last_dtypes(op)))]
        yield Case(f"sizes {sizes}, {memory}", in_turn(every, pools=False))


def on_one_memory(op: Drawable) -> Iterator[Case]:
    """Yield calls of one signature, few tokens and many."""
    for sizes in ("even", "many"):
        yield Case(f"sizes {sizes}", in_turn([attrs.evolve(_settled(op, sizes=sizes), seed=seed) for seed in range(2)]))


def leaking(op: Drawable) -> Iterator[Case]:
    """Yield calls of several signatures and numbers of tokens."""
    first = _settled(op)
    yield Case("many ways", in_turn([first, *_others(first, _FEW, ("wide gaps", "odd gaps")), *_signatures(op)], pools=False))
    for case in behind_an_error(op):
        yield attrs.evolve(case, name="out of range", data={**case.data, "calls": case.data["calls"][1:]})


def once_each(op: Drawable) -> Iterator[Case]:
    """Yield calls of few numbers of tokens, which come first, and then of many others."""
    first = _settled(op, sizes="many")
    calls = [first, *_others(first, (*_FEW, *_SELDOM), ())]
    if len(calls) > len(_SELDOM):
        yield Case("each number once", in_turn(calls, warm=1 + len(_FEW)))


def inside(op: Drawable) -> Iterator[Case]:
    """Yield two calls of one signature, one to be made in the middle of the other, unless the op may go by what is there."""
    first = _settled(op)
    for by in MADE_BY if op.schema.name in CATALOG else ():
        yield Case(f"by {by}", in_turn([first, attrs.evolve(first, seed=1)], pools=False, by=by))


def threaded(op: Drawable) -> Iterator[Case]:
    """Yield a call for many threads, unless the op may go by what is there where it writes."""
    if op.schema.name in CATALOG:
        yield Case("one after the other", in_turn([_settled(op)], threads=80))


def very_often(op: Drawable) -> Iterator[Case]:
    """Yield a call to be made again and again."""
    for times, most_s, level in ((270, 2.0, Level.CORE), (65_550, 15.0, Level.EXTENDED)):
        yield Case(f"{times} times", in_turn([_settled(op)], times=times, most_s=most_s), level)


def behind_an_error(op: Drawable) -> Iterator[Case]:
    """Yield a good call, and one whose indices are out of range, if the op is one that says which are."""
    if op.schema.name in CATALOG:
        drawing, one = Drawing(), _settled(op)
        good = one.arguments(drawing)
        wrong = attrs.evolve(one, seed=1).arguments(drawing, one.kept(good, pools=True))
        indices = [arg.name for arg in op.schema.args if arg.role is Role.TENSOR and not any(d.is_floating_point for d in arg.dtypes)]
        wrong |= {name: attrs.evolve(wrong[name], values=[2**20]) for name in indices if name in wrong}
        yield Case("all indices", drawing.case(call(op.schema.name, **good), call(op.schema.name, **wrong), meta=[]))


def at_once(op: Drawable) -> Iterator[Case]:
    """Yield two calls of one signature on memory of their own, unless the op may go by what is there where it writes."""
    first = _settled(op, sizes="many")
    if op.schema.name in CATALOG:
        yield Case("one signature", in_turn([attrs.evolve(first, seed=seed) for seed in range(2)], pools=False))
