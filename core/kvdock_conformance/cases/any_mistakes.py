"""Calls of any op with one mistake each, made from its schema: what kvdock must refuse before a kernel is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs

from kvdock.ops.schema import Arg, Role
from kvdock_conformance.cases.any_op import AnyCall, Drawable
from kvdock_conformance.cases.drawing import Drawing, View, call
from kvdock_conformance.requirement import Case

__all__ = ["elsewhere", "not_memory", "other_dtypes", "other_shapes", "strides_and_overlaps"]

TYPE, VALUE = "ArgumentTypeError", "ArgumentValueError"


@attrs.frozen
class _Good:
    """A good call: what a mistake is made in."""

    op: Drawable
    call: AnyCall
    drawing: Drawing
    args: Mapping[str, Any]

    @classmethod
    def of(cls, op: Drawable) -> _Good:
        """Return a plain call."""
        one = AnyCall(op).settled() or AnyCall(op)
        drawing = Drawing()
        return cls(op, one, drawing, one.arguments(drawing))

    def tensors(self) -> Iterator[tuple[Arg, View]]:
        """Yield its tensors."""
        for arg in self.op.schema.args:
            if isinstance(self.args.get(arg.name), View):
                yield arg, self.args[arg.name]

    def case(self, name: str, change: Mapping[str, Any], *texts: str, error: str = VALUE, **more: Any) -> Case:
        """Return the call and one in which something is wrong."""
        calls = [call(self.op.schema.name, **args) for args in (self.args, {**self.args, **change})]
        return Case(name, self.drawing.case(*calls, **{"error": error, "texts": [*texts], "meta": [], "may_pass": False, **more}))


def _each(make: Callable[[_Good, Arg, View], Iterable[Case]]) -> Callable[[Drawable], Iterable[Case]]:
    """Return what makes cases of each tensor of an op."""

    def cases(op: Drawable) -> Iterator[Case]:
        names = [arg.name for arg, _ in _Good.of(op).tensors()]
        for name in names:
            good = _Good.of(op)  # memory of its own for each, which a mistake may add to
            yield from (case for arg, view in good.tensors() if arg.name == name for case in make(good, arg, view))

    return cases


@_each
def other_shapes(good: _Good, arg: Arg, view: View) -> Iterator[Case]:
    """Yield tensors of a rank that they may not have, or with a size that others do not have."""
    ranks = {len(dims) for dims in arg.shapes()}
    rank = next(rank for rank in range(max(ranks) + 1, 9) if rank not in ranks)
    more = good.drawing.tensor(view.dtype, (1,) * (rank - len(view.shape)) + view.shape)
    yield good.case(f"{arg.name} of {rank} dims", {arg.name: more}, f": {arg.name}: ", f"shape {list(more.shape)}")
    dims = good.call.dims(arg) or ()
    others = [dim.name for other, _ in good.tensors() if other is not arg for dim in good.call.dims(other) or ()]
    for at, dim in enumerate(dims):
        if dim.literal is not None or dim.name in others:
            other = good.drawing.tensor(view.dtype, [size + (at == place) for place, size in enumerate(view.shape)])
            yield good.case(f"{arg.name} with one more in dim {at}", {arg.name: other}, "shape [")


@_each
def other_dtypes(good: _Good, arg: Arg, view: View) -> Iterator[Case]:
    """Yield dtypes that an argument may not have, and what is no tensor at all."""
    names = [str(dtype).removeprefix("torch.") for dtype in arg.dtypes]
    for dtype in ("float64", "int16", "bool"):
        if dtype not in names:
            texts = (f": {arg.name}: ", f"torch.{dtype}")
            yield good.case(f"{arg.name} in {dtype}", {arg.name: good.drawing.tensor(dtype, view.shape)}, *texts, error=TYPE)
    followers = [other.name for other in good.op.schema.args if other.same_dtype == arg.name]
    for dtype in [name for name in names if name != view.dtype and (arg.same_dtype or followers)][:1]:
        changed = {arg.name: good.drawing.tensor(dtype, view.shape)}
        yield good.case(f"{arg.name} in another dtype than what goes with it", changed, f"torch.{dtype}", error=TYPE)
    if not arg.optional:
        yield good.case(f"{arg.name} is no tensor", {arg.name: "a text"}, f": {arg.name}: ", error=TYPE)


@_each
def elsewhere(good: _Good, arg: Arg, view: View) -> Iterator[Case]:
    """Yield tensors on another device than the first one. Pools that may be on the host say themselves where the op runs."""
    placing = good.op.schema.placing
    if arg.name != placing[0] and not (arg.host and arg.name in placing):
        yield good.case(f"{arg.name} elsewhere", {}, f": {arg.name}: ", "on meta", meta=[arg.name])


@_each
def not_memory(good: _Good, arg: Arg, view: View) -> Iterator[Case]:
    """Yield fake tensors."""
    yield good.case(f"{arg.name} is fake", {}, f": {arg.name}: ", error=TYPE, fake=[arg.name])


@_each
def strides_and_overlaps(good: _Good, arg: Arg, view: View) -> Iterator[Case]:
    """Yield rows in steps, destinations that are one in memory, and sources in the memory of what is written."""
    rank, dims = len(view.shape), good.call.dims(arg) or ()
    if dims and not dims[-1].runtime and view.shape[-1] > 1:
        stepped = good.drawing.tensor(view.dtype, (*view.shape, 2)).select(rank, 0)
        yield good.case(f"{arg.name} with every other element", {arg.name: stepped}, f": {arg.name}: ", "strides [")
    if arg.role is Role.MUTATED and rank > 1 and view.shape[0] > 1:
        one = good.drawing.tensor(view.dtype, (1, *view.shape[1:])).expand(view.shape)
        yield good.case(f"{arg.name} that is one in memory", {arg.name: one}, f": {arg.name}: ", "memory of its own")
    written = next((other for role, other in good.tensors() if role.role is Role.MUTATED and role is not arg), None)
    if written is not None:
        there = attrs.evolve(good.drawing.tensor(view.dtype, view.shape), arena=written.arena)
        room = good.drawing.arenas[written.arena]
        room["bytes"] = max(room["bytes"], good.drawing.arenas[-1]["bytes"])
        yield good.case(f"{arg.name} in the memory of what is written", {arg.name: there}, "which is written")
