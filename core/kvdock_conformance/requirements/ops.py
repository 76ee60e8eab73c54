"""Ops that plugins bring, and those of kvdock that compute: ``KVD-OP``. Each is asked of each, whoever serves it, by cases of its schema.

`OpRequirement.of` makes a requirement of one op: ``KVD-OP-001@rope_caching_``. The child, which has the plugins, draws its cases.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from kvdock_conformance.cases import any_calls, any_mistakes
from kvdock_conformance.cases.any_op import Drawable
from kvdock_conformance.checking import any_op, fences, many_calls, plans, repeated, resources
from kvdock_conformance.checking.pools_shared import check_inside, check_new_threads, check_shared_pools
from kvdock_conformance.checking.refusals import check_mistake, check_recovery
from kvdock_conformance.checking.surroundings import check_surroundings
from kvdock_conformance.requirement import Case, Level, Requirement, cases_at
from kvdock_conformance.requirements.of_any_op import OpRequirement

__all__ = ["REQUIREMENTS", "drawn", "of_op"]


def drawn(op: Drawable) -> dict[str, list[dict[str, Any]]]:
    """Return the cases of an op by requirement, as what JSON can hold.

    Raises:
        Exception: whatever the plugin's ``draw`` raises; ArgumentValueError where it does not say enough.
    """
    every = {item.id: cases_at(Level.EXTENDED, item.cases(op)) for item in REQUIREMENTS}
    found = {name: [attrs.asdict(case, recurse=False) | {"level": case.level.value} for case in cases] for name, cases in every.items()}
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


_REFUSED = "raises {}, with the value that came and the fix in its text, and changes nothing."

REQUIREMENTS: Sequence[OpRequirement] = (
    OpRequirement(
        "KVD-OP-001",
        "A call writes what the reference of its plugin writes, and changes no other byte, whatever two properties meet in it, of dtypes, "
        "sizes, memory orders, steps, addresses and absent arguments, called or bound to its pools.",
        repeated.check_computed,
        any_calls.every_two,
    ),
    OpRequirement("KVD-OP-002", "Neither a call nor the reference changes what is only read.", any_op.check_only_written, any_calls.plain),
    OpRequirement(
        "KVD-OP-003",
        "A call in which a run-time size is 0 writes what the reference writes, which may be nothing.",
        any_op.check_nothing_to_do,
        any_calls.without_tokens,
    ),
    OpRequirement(
        "KVD-OP-004",
        "A call that repeats others, or differs from them in addresses, values, number of tokens and steps, is right each time.",
        repeated.check_computed,
        any_calls.repeated,
    ),
    OpRequirement(
        "KVD-OP-005",
        "A call that differs from one before it in addresses, values, number of tokens or steps of tokens prepares nothing.",
        plans.check_reuse,
        any_calls.new_counts,
    ),
    OpRequirement(
        "KVD-OP-006",
        "A plan is used only for the shapes, strides and dtypes that it was prepared for, in whatever order signatures come.",
        plans.check_changes,
        any_calls.changing,
        limit_s=180.0,  # it prepares a dozen plans, and a compiler may take several seconds for each
    ),
    OpRequirement(
        "KVD-OP-007",
        "A plan that leaves its cache is destroyed once, under its device and without an error, and the other plans keep working.",
        plans.check_eviction,
        any_calls.evicted,
    ),
    OpRequirement(
        "KVD-OP-008", "Two threads that call the op at once both get what they would get alone.", plans.check_threads, any_calls.changing
    ),
    OpRequirement(
        "KVD-OP-009",
        "A plan keeps none of the tensors of its calls, nor their memory, and has no more than 1 MiB of its own.",
        plans.check_releases,
        any_calls.again,
    ),
    OpRequirement(
        "KVD-OP-010",
        "Tensors that require gradients are served like others, and so are calls in inference mode: nothing is recorded.",
        repeated.check_autograd,
        any_calls.with_gradients,
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
        any_calls.plain,
    ),
    OpRequirement(
        "KVD-OP-017",
        "Kernel.supports answers requests of every dtype with a list of reasons, the same each time, changes no request, and takes no "
        "memory of the pools' size.",
        plans.check_supports,
        any_calls.again,
    ),
    OpRequirement(
        "KVD-OP-018",
        "Outputs that the caller does not bring are made with the sizes and dtype of the schema, and hold what the reference writes.",
        any_op.check_made_anew,
        any_calls.outputs,
    ),
    OpRequirement(
        "KVD-OP-019",
        "Calls do the same whatever a user has set and passes, and leave that as it is, as KVD-HYGIENE-017 says.",
        check_surroundings,
        any_calls.surrounded,
        by_area=True,
    ),
    OpRequirement(
        "KVD-OP-020",
        "Nothing is read in front of a tensor or behind it, and no input is written, as KVD-READ-001 says.",
        fences.check_fenced,
        any_calls.to_the_ends,
        fences.FENCED_FOR_ANYBODY,
        by_area=True,
    ),
    OpRequirement(
        "KVD-OP-021",
        "What a call reads may be changed as soon as it has returned, in the order of its stream.",
        fences.check_inputs_released,
        any_calls.on_one_memory,
        by_area=True,
    ),
    OpRequirement(
        "KVD-OP-022",
        "Calls leave nothing behind, however often they are made: no tensor, memory, open file or thread.",
        resources.check_leaks,
        any_calls.leaking,
        by_area=True,
    ),
    OpRequirement(
        "KVD-OP-023",
        "No memory of a call is kept behind it: as no tensor, as no view of one, and in no cycle that only the garbage collector frees.",
        resources.check_keeps_nothing,
        any_calls.leaking,
        by_area=True,
    ),
    OpRequirement(
        "KVD-OP-024",
        "A call in the middle of another one, by another thread, and calls of two threads at once, are each like one alone.",
        check_shared_pools,
        any_calls.at_once,
        by_area=True,
    ),
    OpRequirement(
        "KVD-OP-025",
        "A call behind one that raised, by its own thread or by another, is served as if that had not been.",
        check_recovery,
        any_calls.behind_an_error,
    ),
    OpRequirement(
        "KVD-OP-026",
        "Nothing is kept for a number of tokens that comes once.",
        resources.check_leaks_of_counts,
        any_calls.once_each,
        by_area=True,
    ),
    OpRequirement(
        "KVD-OP-027",
        "A plan that is destroyed gives back all that was taken to prepare and call it.",
        resources.check_given_back,
        any_calls.changing,
        by_area=True,
        limit_s=180.0,
    ),
    OpRequirement(
        "KVD-OP-028",
        "A call that was made very often is served like the first, by what repeats it and by its plan.",
        many_calls.check_many_calls,
        any_calls.very_often,
        limit_s=120.0,
    ),
    OpRequirement(
        "KVD-OP-029",
        "However many threads come, call and go, each is served like the first, and leaves nothing behind.",
        check_new_threads,
        any_calls.threaded,
        by_area=True,
        level=Level.EXTENDED,
    ),
    OpRequirement(
        "KVD-OP-030",
        "A call in the middle of another, by its own thread or by a process that is forked there, neither disturbs it nor waits for it.",
        check_inside,
        any_calls.inside,
        by_area=True,
    ),
)
