"""Calls of any op as cases, drawn from its schema alone: an op that a plugin brings needs no case of its own.

What the schema cannot say, such as which slots there are, `kvdock.plugin.Op.draw` does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import attrs
import torch

from kvdock.errors import ArgumentValueError
from kvdock.ops.schema import LEAD_RANKS, Arg, Dim, OpSchema, Role, parse_dims
from kvdock.plugin import QUANTISED_DTYPES
from kvdock_conformance.cases.drawing import ITEMSIZE, Drawing, View, call
from kvdock_conformance.cases.sizes import Sizes, broken_by, elements_of, equations_of, solved
from kvdock_conformance.checking.memory import BITS

__all__ = ["SIZES", "AnyCall", "Drawable", "factors_of", "in_turn", "runtime_words", "static_words"]

SIZES: Mapping[str, tuple[Sequence[int], Sequence[int]]] = MappingProxyType(
    {
        "even": ((2, 4, 8, 16), (2, 4, 16)),
        "ones": ((1, 2), (1,)),
        "odd": ((1, 3, 5, 7), (3, 5, 17)),
        "many": ((1, 2, 3, 4), (65, 255, 256, 257)),
        "large": ((1, 2, 4), (1023, 1025, 4097)),
    }
)
"""By class of sizes: what static sizes are chosen from, and run-time ones."""

_ANY = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)  # where a relation forbids those of the class
_ROOMY = (64, 256, 512, 4096)
_TRIES = 3000
_MOST = 1 << 18  # elements of a tensor: references are slow
_MEMORY = ("dense", "wide gaps", "odd gaps", "other order", "odd address")
_INDICES = ("dense", "wide gaps", "odd address")  # of one dim, or none


def _words(schema: OpSchema) -> list[Dim]:
    return [dim for arg in schema.args for dims in arg.shapes() for dim in dims if dim.literal is None]


def runtime_words(schema: OpSchema) -> set[str]:
    """Return the names of run-time sizes that can be chosen: of those that a relation settles, none."""
    return {dim.name for dim in _words(schema) if dim.runtime} - {word for word, _ in equations_of(schema)}


def static_words(schema: OpSchema) -> set[str]:
    """Return the names of static sizes."""
    return {dim.name for dim in _words(schema) if not dim.runtime}


def _forms(arg: Arg) -> list[str]:
    """Return what an argument may come as: one of its lines of sizes, an int, or not at all."""
    forms = [*arg.dims] if arg.is_tensor else []
    return [*forms, *(["int"] if arg.role is Role.RUNTIME_INT else []), *(["absent"] if arg.optional and not arg.scale_of else [])]


def factors_of(schema: OpSchema, *sizes: str) -> dict[str, Sequence[Any]]:
    """Return the properties of a call, with their values: the first is the plainest. ``sizes`` are names of `SIZES`."""
    found: dict[str, Sequence[Any]] = {"sizes": sizes}
    if any(line.startswith("...") for arg in schema.args for line in arg.dims):
        found["lead"] = LEAD_RANKS
    for arg in schema.args:
        found[f"{arg.name} form"] = _forms(arg)
        if arg.is_tensor:
            rank = max(len(line.split()) + ("..." in line) for line in arg.dims)
            found[f"{arg.name} memory"] = _MEMORY if rank > 1 else _INDICES
            found[f"{arg.name} dtype"] = [_text(dtype) for dtype in arg.dtypes] if arg.same_dtype is None else ()
            found[f"{arg.name} place"] = ("device", "host") if arg.host else ()
    return {name: values for name, values in found.items() if len(values) > 1 or name == "sizes"}


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Drawable(Protocol):
    """An op whose calls can be drawn: `kvdock.plugin.Op` is one."""

    @property
    def schema(self) -> OpSchema:
        """What it takes and writes."""
        ...

    @property
    def draw(self) -> Callable[[Sizes, random.Random], Mapping[str, object]] | None:
        """Returns values of what the schema cannot say."""
        ...


@attrs.frozen
class AnyCall:
    """A call of an op, with something that is special about it.

    Args:
        op: the op.
        how: its properties by factor, see `factors_of`; the plainest where it is silent.
        sizes: sizes by word that are settled; the others are drawn.
        seed: of what is drawn.
    """

    op: Drawable
    how: Mapping[str, Any] = MappingProxyType({})
    sizes: Sizes = MappingProxyType({})
    seed: int = 0

    def _is(self, arg: Arg, factor: str, plain: str) -> str:
        return str(self.how.get(f"{arg.name} {factor}", plain))

    def dtype(self, arg: Arg) -> str:
        """Return torch's name of an argument's dtype: its own choice, or that of the argument that it follows."""
        own = self._is(arg, "dtype", _text(arg.dtypes[0]))
        followed = self.dtype(self.op.schema.arg(arg.same_dtype)) if arg.same_dtype else own
        return followed if followed in map(_text, arg.dtypes) else own

    def form(self, arg: Arg) -> str:
        """Return what an argument comes as. A scale is there where its cache is quantised."""
        if arg.scale_of and getattr(torch, self.dtype(self.op.schema.arg(arg.scale_of))) not in QUANTISED_DTYPES:
            return "absent"
        return self._is(arg, "form", (_forms(arg) or ["value"])[0])

    def dims(self, arg: Arg) -> tuple[Dim, ...] | None:
        """Return the dimensions of an argument; None where it is no tensor."""
        form = self.form(arg)
        return parse_dims(form, int(self.how.get("lead", 1))) if arg.is_tensor and form in arg.dims else None

    def settled(self, **sizes: int) -> AnyCall | None:
        """Return the call with all its sizes: these, those that are settled, and others that are drawn; None if there are none.

        Raises:
            ArgumentValueError: no sizes fulfil the relations of the schema, and none were given.
        """
        every = [self.dims(arg) or () for arg in self.op.schema.args]
        names, equations = {dim.name: dim.runtime for dims in every for dim in dims if dim.literal is None}, equations_of(self.op.schema)
        fixed = {word: size for word, size in {**self.sizes, **sizes}.items() if word in names}
        choose = random.Random(self.seed)  # noqa: S311 - the same in every run
        for number in range(_TRIES):
            found = solved(equations, {**self._chosen(names, 3 * number // _TRIES, choose), **fixed}, fixed)
            broken = broken_by(self.op.schema, found)
            if not broken and elements_of(every, found) <= _MOST:
                return attrs.evolve(self, sizes=found)
        if fixed:
            return None
        raise ArgumentValueError(f"OpSchema {self.op.schema.name}: relations", expected="some small sizes for which they hold", got=broken)

    def _chosen(self, names: Mapping[str, bool], stage: int, choose: random.Random) -> dict[str, int]:
        """Return a size for each word: of the class; then one static size large beside it, since tokens may need room; then any."""
        static, runtime = SIZES[str(self.how.get("sizes", "even"))] if stage < 2 else (_ANY, _ANY)
        found = {word: choose.choice(runtime if is_runtime else static) for word, is_runtime in names.items()}
        if stage == 1:
            word = choose.choice([*names])
            found[word] = found[word] if names[word] else choose.choice(_ROOMY)
        return found | ({"lead0": choose.choice((1, 2, 3))} if "lead1" in names else {})

    def arguments(self, drawing: Drawing, kept: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """Return the arguments of a call whose sizes are settled, without those that are absent; ``kept`` are there already."""
        lead = math.prod(size for word, size in self.sizes.items() if word.startswith("lead"))
        choose = random.Random(self.seed)  # noqa: S311 - the same in every run
        drawn = self.op.draw({**self.sizes, "...": lead}, choose) if self.op.draw else {}
        made = {arg.name: kept.get(arg.name, self._argument(drawing, arg, drawn)) for arg in self.op.schema.args}
        return {name: value for name, value in made.items() if value is not None}

    def _argument(self, drawing: Drawing, arg: Arg, drawn: Mapping[str, Any]) -> Any:
        dims, form = self.dims(arg), self.form(arg)
        if form == "absent":
            return None
        needed = arg.role is not Role.MUTATED and not (arg.is_tensor and getattr(torch, self.dtype(arg)).is_floating_point)
        needed &= not any(dtype.is_floating_point for dtype in arg.dtypes)
        if needed and arg.name not in drawn:
            raise ArgumentValueError(
                f"Op {self.op.schema.name}: draw",
                expected=f"values of {arg.name}, which the schema cannot say",
                got=f"values of {', '.join(drawn) or 'nothing'}",
                fix="give the Op a function draw(sizes, choose) that returns some",
            )
        if dims is None:
            value = drawn.get(arg.name)
            return value[0] if form == "int" and isinstance(value, Sequence) else value
        view = self._tensor(drawing, arg, dims)
        return view if arg.name not in drawn else attrs.evolve(view, values=self._bits(arg, view, drawn[arg.name]))

    def _is_on_host(self, arg: Arg) -> bool:
        """Return whether an argument lies in host memory. With all there that say whose call it is, it would be another device's."""
        placing = self.op.schema.placing
        wanted = {name: self._is(self.op.schema.arg(name), "place", "device") == "host" for name in (arg.name, *placing)}
        return wanted[arg.name] and not (arg.name == placing[0] and all(wanted.values()))

    def _tensor(self, drawing: Drawing, arg: Arg, dims: Sequence[Dim]) -> View:
        """Return a tensor of its sizes, laid out as its memory is to be: steps within a row, if it has static ones, are of one."""
        shape = [self.sizes[dim.name] if dim.literal is None else dim.literal for dim in dims]
        dtype, memory, rank = self.dtype(arg), self._is(arg, "memory", "dense"), len(dims)
        is_free, size = not dims or dims[-1].runtime, ITEMSIZE[dtype]
        steps = range(rank if is_free else rank - 1)
        gap = {"wide gaps": 16 // size, "odd gaps": 1}.get(memory, 0)
        how: dict[str, Any] = {"host": self._is_on_host(arg), "offset": size if memory == "odd address" else 0}
        how["fill"] = "numbers" if getattr(torch, dtype).is_floating_point else "zeros" if dtype == "bool" else "random"
        if gap and is_free:
            return drawing.tensor(dtype, (*shape, 1 + gap), **how).select(rank, 0)
        gaps = [0, *[gap] * (rank - 1)] if rank else None
        order = [*reversed(steps), *range(len(steps), rank)] if memory == "other order" else None
        return drawing.tensor(dtype, shape, gaps=gaps, order=order, **how)

    def _bits(self, arg: Arg, view: View, values: Sequence[Any]) -> list[int]:
        """Return the bits of numbers that were drawn."""
        count, dtype = math.prod(view.shape), getattr(torch, view.dtype)
        if not isinstance(values, Sequence) or len(values) < count:
            expected, got = f"{count} numbers for {dict(self.sizes)}", repr(values)[:80]
            raise ArgumentValueError(f"Op {self.op.schema.name}: draw: {arg.name}", expected=expected, got=got)
        bits: list[int] = torch.tensor(values[:count], dtype=dtype).view(BITS[dtype.itemsize]).tolist()
        return bits

    def kept(self, args: Mapping[str, Any], *, pools: bool) -> dict[str, Any]:
        """Return what stays of a call in those like it: what selects the plan, and pools if they are shared."""
        names = [arg.name for arg in self.op.schema.args if arg.role is Role.STATIC]
        names += [arg.name for arg in self.op.schema.static_args] if pools else []
        return {name: args.get(name) for name in names}


def in_turn(calls: Sequence[AnyCall], *, pools: bool = True, **more: Any) -> dict[str, Any]:
    """Return the data of a case: calls one after the other, on the pools of the first or each on its own; ``more`` is for its check."""
    drawing, schema = Drawing(calls[0].seed), calls[0].op.schema
    first = calls[0].arguments(drawing)
    kept = calls[0].kept(first, pools=pools)
    every = [first, *(one.arguments(drawing, kept) for one in calls[1:])]
    return drawing.case(*_called(schema, every), **more)


def _called(schema: OpSchema, every: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from (call(schema.name, **args) for args in every)
