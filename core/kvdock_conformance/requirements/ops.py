"""Ops that plugins bring, and those of kvdock that compute: ``KVD-OP``. Each is asked of each, whoever serves it, by cases of its schema.

`OpRequirement.of` makes a requirement of one op: ``KVD-OP-001@rope_caching_``. The child, which has the plugins, draws its cases.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from kvdock.plugin import Role
from kvdock_conformance.cases import any_mistakes
from kvdock_conformance.cases.any_op import AnyCall, Drawable, factors_of, in_turn, runtime_words, static_words
from kvdock_conformance.cases.pairs import covering
from kvdock_conformance.checking import any_op, plans, repeated
from kvdock_conformance.checking.refusals import check_mistake
from kvdock_conformance.requirement import Case, Check, Level, Requirement

__all__ = ["REQUIREMENTS", "OpRequirement", "drawn", "of_op"]

_COUNTS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65, 255, 256, 257)
_FEW = (3, 1, 8)
_UNREADY = (Case("no case could be drawn", {}),)


@attrs.frozen
class OpRequirement:
    """One thing that must be so for every op that a plugin brings.

    Args:
        id: its name for good.
        sentence: what must be so, in one sentence.
        check: checks one case.
        cases: returns its cases for an op; none where the op has nothing that it is about.
    """

    id: str
    sentence: str
    check: Check
    cases: Callable[[Drawable], Iterable[Case]]

    def of(self, op: str, cases: Sequence[Case] = _UNREADY, unready: str = "") -> Requirement:
        """Return it as a requirement of one op, with cases; or with why there are none, which leaves it open."""
        made = Requirement(f"{self.id}@{op}", self.sentence, op, self.check, lambda: cases, Level.CORE, any_op.BY_ANYBODY)
        return attrs.evolve(made, unready=unready)


def drawn(op: Drawable) -> dict[str, list[dict[str, Any]]]:
    """Return the cases of an op by requirement, as what JSON can hold.

    Raises:
        Exception: whatever the plugin's ``draw`` raises; ArgumentValueError where it does not say enough.
    """
    found = {item.id: [attrs.asdict(case, recurse=False) | {"level": case.level.value} for case in item.cases(op)] for item in REQUIREMENTS}
    json.dumps(found)
    return found


def of_op(op: str, cases: Mapping[str, Sequence[Mapping[str, Any]]], unready: str = "") -> Iterator[Requirement]:
    """Yield the requirements of an op: those that have cases among what `drawn` returned, or all with why that did not work."""
    for item in REQUIREMENTS:
        listed = [Case(one["name"], one["data"], Level(one["level"])) for one in cases.get(item.id, ())]
        if listed:
            yield item.of(op, listed)
        elif unready:
            yield item.of(op, unready=unready)


def _settled(op: Drawable, seed: int = 0, **how: Any) -> AnyCall:
    """Return a call with its sizes."""
    return AnyCall(op, how, seed=seed).settled() or AnyCall(op)


def _every_two(op: Drawable) -> Iterator[Case]:
    """Yield calls in which every two properties meet."""
    for level, classes in ((Level.CORE, ("even", "ones", "odd", "many")), (Level.EXTENDED, ("large",))):
        for number, how in enumerate(covering(factors_of(op.schema, *classes))):
            plain = {factor: values[0] for factor, values in factors_of(op.schema, "even").items()}
            special = [f"{factor} {value}" for factor, value in how.items() if value != plain[factor]]
            name = f"{level.value} {number}: {', '.join(special) or 'plain'}"
            yield Case(name, in_turn([_settled(op, number, **how)]), level)


def _plain(op: Drawable) -> Iterator[Case]:
    for sizes in ("even", "ones", "odd"):
        yield Case(f"sizes {sizes}", in_turn([_settled(op, sizes=sizes)]))


def _without_tokens(op: Drawable) -> Iterator[Case]:
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


def _repeated(op: Drawable) -> Iterator[Case]:
    """Yield calls that repeat one another, with others in between."""
    for text, shared in (("the same pools", True), ("pools of their own", False)):
        first = _settled(op)
        again = [attrs.evolve(first, seed=seed) for seed in range(1, 6)]
        others = _others(first, _FEW, ("wide gaps", "odd gaps", "other order"))
        yield Case(text, in_turn([first, *again, *others, *again[:3], *others[:1] * 3, *again], pools=shared))


def _new_counts(op: Drawable) -> Iterator[Case]:
    """Yield calls behind the first one that differ in what is no part of the key."""
    first = _settled(op, sizes="many")  # so that pools have room for many
    again = [attrs.evolve(first, seed=seed) for seed in (1, 2)]
    yield Case("the same again", in_turn([first, *again], warm=1))
    yield Case("pools of their own", in_turn([first, *again], pools=False, warm=1))
    others = _others(first, _COUNTS, ("wide gaps",))
    if others:
        yield Case("counts and steps", in_turn([first, *others], warm=1))


def _signatures(op: Drawable) -> list[AnyCall]:
    """Return calls that need plans of their own: other sizes and dtypes, and pools in another order."""
    first = _settled(op, seed=3)
    found = [first, _settled(op, seed=4, sizes="odd"), _settled(op, seed=5, sizes="ones")]
    pools = {f"{arg.name} memory": "odd gaps" for arg in op.schema.static_args}
    found.append(attrs.evolve(first, how={**first.how, **pools}))
    for factor, values in factors_of(op.schema, "even").items():
        if factor.endswith("dtype"):
            found += [attrs.evolve(first, how={**first.how, factor: value}) for value in values[1:]]
    return found


def _changing(op: Drawable) -> Iterator[Case]:
    yield Case("signatures in turns", in_turn([*_signatures(op), *_signatures(op)], pools=False))


def _evicted(op: Drawable) -> Iterator[Case]:
    first, other = _settled(op), _settled(op, seed=4, sizes="odd")
    if static_words(op.schema):
        yield Case("signatures that drive each other out", in_turn([first, other, first, other, first], pools=False))


def _again(op: Drawable) -> Iterator[Case]:
    first = _settled(op)
    yield Case("one signature", in_turn([attrs.evolve(first, seed=seed) for seed in range(3)]))


def _outputs(op: Drawable) -> Iterator[Case]:
    if any(arg.returned for arg in op.schema.args):
        yield from _plain(op)


def _with_gradients(op: Drawable) -> Iterator[Case]:
    if any(arg.role is Role.TENSOR and any(dtype.is_floating_point for dtype in arg.dtypes) for arg in op.schema.args):
        yield from _again(op)


_REFUSED = "raises {}, with the value that came and the fix in its text, and changes nothing."

REQUIREMENTS: Sequence[OpRequirement] = (
    OpRequirement(
        "KVD-OP-001",
        "A call writes what the reference of its plugin writes, and changes no other byte, whatever two properties meet in it, of dtypes, "
        "sizes, memory orders, steps, addresses and absent arguments, called or bound to its pools.",
        any_op.check_both_ways,
        _every_two,
    ),
    OpRequirement("KVD-OP-002", "Neither a call nor the reference changes what is only read.", any_op.check_only_written, _plain),
    OpRequirement(
        "KVD-OP-003",
        "A call in which a run-time size is 0 writes what the reference writes, which may be nothing.",
        any_op.check_nothing_to_do,
        _without_tokens,
    ),
    OpRequirement(
        "KVD-OP-004",
        "A call that repeats others, or differs from them in addresses, values, number of tokens and steps, is right each time.",
        any_op.check_both_ways,
        _repeated,
    ),
    OpRequirement(
        "KVD-OP-005",
        "A call that differs from one before it in addresses, values, number of tokens or steps of tokens prepares nothing.",
        plans.check_reuse,
        _new_counts,
    ),
    OpRequirement(
        "KVD-OP-006",
        "A plan is used only for the shapes, strides and dtypes that it was prepared for, in whatever order signatures come.",
        plans.check_changes,
        _changing,
    ),
    OpRequirement(
        "KVD-OP-007",
        "A plan that leaves its cache is destroyed once, under its device and without an error, and the other plans keep working.",
        plans.check_eviction,
        _evicted,
    ),
    OpRequirement("KVD-OP-008", "Two threads that call the op at once both get what they would get alone.", plans.check_threads, _changing),
    OpRequirement("KVD-OP-009", "A plan keeps none of the tensors of its calls.", plans.check_releases, _again),
    OpRequirement(
        "KVD-OP-010",
        "Tensors that require gradients are served like others, and so are calls in inference mode: nothing is recorded.",
        repeated.check_autograd,
        _with_gradients,
    ),
    OpRequirement(
        "KVD-OP-011",
        f"A tensor of a rank or with a size that the schema does not allow {_REFUSED.format('ArgumentValueError')}",
        check_mistake,
        any_mistakes.other_shapes,
    ),
    OpRequirement(
        "KVD-OP-012",
        f"A dtype that the schema does not allow, or what is no tensor, {_REFUSED.format('ArgumentTypeError')}",
        check_mistake,
        any_mistakes.other_dtypes,
    ),
    OpRequirement(
        "KVD-OP-013",
        f"A tensor on another device than the first one {_REFUSED.format('ArgumentValueError')}",
        check_mistake,
        any_mistakes.elsewhere,
    ),
    OpRequirement(
        "KVD-OP-014",
        f"A fake tensor, which has no memory, {_REFUSED.format('ArgumentTypeError')}",
        check_mistake,
        any_mistakes.not_memory,
    ),
    OpRequirement(
        "KVD-OP-015",
        "Rows whose elements do not follow each other, a destination that is one in memory and a source within a destination "
        f"{_REFUSED.format('ArgumentValueError').replace('raises', 'raise', 1)}",
        check_mistake,
        any_mistakes.strides_and_overlaps,
    ),
    OpRequirement(
        "KVD-OP-016",
        "The kernel that explain names is the one that serves the call, and explaining it prepares and changes nothing.",
        any_op.check_explained,
        _plain,
    ),
    OpRequirement(
        "KVD-OP-017",
        "Kernel.supports answers requests of every dtype with a list of reasons, the same each time, and does not change the request.",
        plans.check_supports,
        _again,
    ),
    OpRequirement(
        "KVD-OP-018",
        "Outputs that the caller does not bring are made with the sizes and dtype of the schema, and hold what the reference writes.",
        any_op.check_made_anew,
        _outputs,
    ),
)
