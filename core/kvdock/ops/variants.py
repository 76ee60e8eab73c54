"""The combinations of ranks that a schema allows: each has a quick path of its own."""

from __future__ import annotations

import attrs

from kvdock.ops.schema import LEAD_RANKS, Arg, Dim, OpSchema, Role

__all__ = ["HOST_INT_RANK", "Variant", "pivot_of", "variants_of"]

HOST_INT_RANK = -1
"""Stands for the rank of an argument that came as a host int."""


@attrs.frozen
class Variant:
    """One combination of ranks that a schema allows.

    Args:
        number: its place among the op's variants, part of the key.
        pivot_rank: rank of the pivot argument that selects it.
        dims: the dimensions of each argument that is always a tensor in it.
    """

    number: int
    pivot_rank: int
    dims: dict[str, tuple[Dim, ...]]


def pivot_of(schema: OpSchema) -> int:
    """Return the index of the argument whose rank tells the variants apart: the first tensor when there is but one."""
    tensors = [index for index, arg in enumerate(schema.args) if not arg.optional and arg.is_tensor]
    telling = (i for i in tensors if len(schema.args[i].shapes()) > 1 or schema.args[i].role is Role.RUNTIME_INT)
    return next(telling, tensors[0])


def variants_of(schema: OpSchema) -> list[Variant]:
    """Return every combination of ranks, told apart by the rank of the pivot argument."""
    pivot = schema.args[pivot_of(schema)]
    ranks: list[tuple[int, int]] = [(len(dims), lead) for lead in LEAD_RANKS for dims in [_shape(line, lead, pivot) for line in pivot.dims]]
    if pivot.role is Role.RUNTIME_INT:
        ranks.insert(0, (HOST_INT_RANK, LEAD_RANKS[0]))
    unique = dict(reversed(ranks))
    return [Variant(i, rank, _dims(schema, pivot, rank, unique[rank])) for i, rank in enumerate(sorted(unique))]


def _shape(line: str, lead: int, arg: Arg) -> tuple[Dim, ...]:
    """Read one line of an argument's sizes for a number of leading dimensions."""
    width = len(line.split()) + (lead - 1 if line.startswith("...") else 0)
    return next(dims for dims in arg.shapes() if len(dims) == width)


def _dims(schema: OpSchema, pivot: Arg, rank: int, lead: int) -> dict[str, tuple[Dim, ...]]:
    """Return the dimensions of each required tensor when the pivot has ``rank``."""
    dims = {arg.name: _shape(arg.dims[0], lead, arg) for arg in schema.args if arg.is_tensor and not arg.optional}
    if rank == HOST_INT_RANK:
        del dims[pivot.name]
    else:
        dims[pivot.name] = next(d for d in pivot.shapes() if len(d) == rank)
    return dims
