"""`paged_attention`: what queries see, how exact results are, and what is refused. What holds of any op is asked by ``KVD-OP``."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import attrs

from kvdock_conformance.cases import attention_batches, attention_many, attention_outliers
from kvdock_conformance.cases.attention import ATTENTION, OP, Attention
from kvdock_conformance.checking import attention
from kvdock_conformance.checking.any_op import BY_ANYBODY
from kvdock_conformance.checking.refusals import check_mistake
from kvdock_conformance.checking.repeated import check_computed
from kvdock_conformance.requirement import Case, Check, Level, Requirement
from kvdock_conformance.requirements.ops import REQUIREMENTS as OF_ANY_OP

__all__ = ["REQUIREMENTS"]


def _asked(number: int, sentence: str, check: Check, cases: Any, **more: Any) -> Requirement:
    return Requirement(f"KVD-ATTN-{number:03}", sentence, OP, check, cases, **{"needs": BY_ANYBODY, **more})


def _of_any_op() -> Iterable[Requirement]:
    """Yield what is asked of any op, with cases that are drawn when they are needed."""
    for item in OF_ANY_OP:
        if not item.by_area:
            yield attrs.evolve(item.of(OP), cases=functools.cache(functools.partial(lambda each: [*each.cases(ATTENTION)], item)))


REQUIREMENTS = (
    _asked(
        1,
        "Every result is within bounds of attention in float64, whatever two properties meet in a call and wherever its tensors "
        "begin, and no other byte is changed.",
        check_computed,
        lambda: (*attention_batches.every_two(), *attention_batches.groups(), *attention_batches.addresses(), *attention_batches.shared()),
    ),
    _asked(
        2,
        "At lengths, windows, starts and chunks around powers of two, and of many keys of which it is to see few, each query sees the keys "
        "that it is to see, no more and no less.",
        check_computed,
        lambda: (*attention_batches.edges(), *attention_batches.joins(), *attention_batches.growing()),
    ),
    _asked(
        3,
        "What lies beyond a length, before a start, in blocks of nobody or behind a query changes no result, NaN and infinities included.",
        check_computed,
        attention_batches.garbage,
    ),
    _asked(
        4,
        "A query that sees nothing gets zeros, and as its sum the logit of the sink or minus infinity, also where a size is 0.",
        check_computed,
        attention_batches.nothing_seen,
    ),
    _asked(
        5,
        "An index value out of range raises IndexRangeError on host memory before anything is written, and on a device is not seen, and "
        "counted where it can be.",
        attention.check_index_values,
        lambda: (*attention_batches.index_values(), *attention_many.behind_many()),
    ),
    _asked(
        6,
        "Heads that do not divide, sums that do not fit, and a window, cap, scale or cause that means nothing raise an error with the fix, "
        "and change nothing.",
        check_mistake,
        attention_batches.mistakes,
    ),
    _asked(
        7,
        "Results over parts of the keys, merged by their sums, which are natural logarithms, are the result over all.",
        attention.check_parts,
        attention_batches.parts,
    ),
    _asked(
        8,
        "The public function returns the output, given or made, and with return_lse the sums too.",
        attention.check_public,
        lambda: [Case(f"of {counts or 'one each'}", Attention([5, 20], counts, sinks=True).case()) for counts in (None, [3, 1])],
    ),
    _asked(
        9,
        "What claims batch_invariant gives each sequence the same bits whatever else is in the batch.",
        attention.check_alone,
        attention_many.alone,
        needs=attention.BATCH_INVARIANT,
    ),
    _asked(
        10,
        "Results are right where a token's keys and values are so long that blocks have more of them than a kernel may look at at once.",
        check_computed,
        attention_batches.heavy,
        level=Level.EXTENDED,
    ),
    _asked(
        11,
        "There may be any number of sequences and of blocks, rows may have any number of elements, as many as those of latents, and values "
        "may be a part of the rows of keys, whichever that is.",
        check_computed,
        attention_many.many,
    ),
    _asked(
        12,
        "Results are right whatever the size of scores, of both signs, of products before they are scaled, and of sinks.",
        check_computed,
        attention_outliers.outliers,
    ),
    _asked(
        13,
        "More queries and heads together than a launch grid has rows are all attended to.",
        check_computed,
        attention_many.products,
        level=Level.EXTENDED,
    ),
    *_of_any_op(),
)
