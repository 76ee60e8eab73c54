"""What every op refuses, and how it says so: ``KVD-ERROR``.

Most of it is core's doing, and a backend cannot spoil it: then these requirements hold for a kernel that somebody wraps around
`kvdock.ops`, or that they call instead. Index values, `Kernel.supports` and `Kernel.prepare` are the backend's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvdock_conformance.cases import mistakes
from kvdock_conformance.checking.refusals import check_mistake, check_recovery, check_served_or_refused
from kvdock_conformance.checking.served import SERVED
from kvdock_conformance.requirement import Check, Level, Requirement

__all__ = ["AREA", "REQUIREMENTS"]

AREA = "errors"


def _require(number: int, sentence: str, *makers: Callable[[], Iterable[mistakes.Mistake]], check: Check = check_mistake) -> Requirement:
    text = f"{sentence}, with the value that came and the fix in its text, and changes nothing" if check is check_mistake else sentence
    return Requirement(f"KVD-ERROR-{number:03}", f"{text}.", AREA, check, mistakes.mistakes(*makers), Level.CORE)


REQUIREMENTS = [
    _require(
        1, "A tensor of the wrong rank, or with a size that others do not have, raises ArgumentValueError", mistakes.other_ranks_and_sizes
    ),
    _require(2, "Indices for more or fewer tokens or rows than there are raise ArgumentValueError", mistakes.other_lengths),
    _require(3, "A dtype that an argument may not have raises ArgumentTypeError", mistakes.wrong_dtypes),
    _require(
        4,
        "Rows in another dtype than their cache's raise ArgumentTypeError, or UnsupportedError where a quantised cache has no scale, "
        "and are neither converted nor reinterpreted",
        mistakes.other_dtypes_than_the_cache,
    ),
    _require(5, "A tensor on another device than the first one raises ArgumentValueError", mistakes.other_devices),
    _require(6, "Rows whose elements do not follow each other raise ArgumentValueError", mistakes.strides_within_rows),
    _require(7, "A source in the memory of a destination raises ArgumentValueError", mistakes.overlapping_sources),
    _require(8, "Destinations that share memory, or whose places do, raise ArgumentValueError", mistakes.destinations_that_share),
    _require(9, "A scale for a cache that is not quantised raises ArgumentValueError", mistakes.scales_for_nothing),
    _require(10, "What is no tensor where one is needed raises ArgumentTypeError, or ArgumentValueError in pairs", mistakes.no_tensors),
    _require(
        11,
        "A call without tokens is checked like any other, but for strides, which say nothing there: a mistake in it raises",
        mistakes.no_tokens,
    ),
    _require(12, "An index out of range that the host can read raises IndexRangeError", mistakes.out_of_range),
    _require(
        13,
        "Pairs in host memory whose outcome depends on the order of copies raise ArgumentValueError",
        mistakes.pairs_in_no_order,
    ),
    _require(
        14,
        "A call behind one that raised is served as if that had not been",
        mistakes.out_of_range,
        mistakes.pairs_in_no_order,
        check=check_recovery,
    ),
    Requirement(
        "KVD-ERROR-015",
        "A request is refused by Kernel.supports with reasons, or prepared and served, and neither raises an error of another kind.",
        AREA,
        check_served_or_refused,
        mistakes.served_or_refused,
        Level.CORE,
        SERVED,
    ),
]
