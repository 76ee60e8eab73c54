"""Sizes that fulfil the relations of a schema: what `kvdock_conformance.cases.any_op` draws them with."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Mapping, Sequence
from types import CodeType

from kvdock.ops.schema import Dim, OpSchema

__all__ = ["Sizes", "broken_by", "elements_of", "equations_of", "solved"]

Sizes = Mapping[str, int]


@functools.cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<relation>", "eval")


def equations_of(schema: OpSchema) -> list[tuple[str, CodeType]]:
    """Return relations that say what a size is, ``"C == B + 1"``: the word, and what it is equal to."""
    found = (re.fullmatch(r"(\w+) == ([\w +*-]+)", relation.expression) for relation in schema.relations)
    return [(match[1], _compiled(match[2])) for match in found if match and " or " not in match[2]]


def elements_of(every: Sequence[Sequence[Dim]], sizes: Sizes) -> int:
    """Return how many elements the largest of some tensors has."""
    return max(math.prod(sizes.get(dim.name, dim.literal or 1) for dim in dims) for dims in every)


def solved(equations: Sequence[tuple[str, CodeType]], sizes: Sizes, fixed: Sizes) -> Sizes:
    """Return sizes of which those that a relation settles are what it says."""
    found = dict(sizes)
    for word, expression in equations:
        if word in found and word not in fixed:
            with contextlib.suppress(NameError):  # about a size that is absent
                found[word] = eval(expression, {"__builtins__": {}}, found)  # noqa: S307 - from the schema
    return found


def broken_by(schema: OpSchema, sizes: Sizes) -> str:
    """Return the first relation that does not hold; empty when all do. One about sizes that are absent holds."""
    return next((relation.expression for relation in schema.relations if not relation.holds(sizes)), "")
