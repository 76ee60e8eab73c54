"""From a schema to the code of a call: what `kvdock.ops.calls` holds was written by this.

A call must not cost more than the kernel it launches, and what costs in Python is every attribute read and every function call.
So what `validate` finds out by looping over a schema is written out here once per op as straight-line source, as attrs and
dataclasses do for ``__init__``. The result is committed, and read there: `kvdock/ops/calls/paged_caching_.py` is the code of
`paged_caching_`. ``make calls`` writes it anew after a schema has changed. For the op of a plugin it is written when the op is
registered, and `linecache` shows it to debuggers.

A module has one function, ``make``, which is given an `kvdock.ops.entry.OpEntry` and returns its two ways in: for all
arguments, and for those that are left once pools are bound. Both try fast calls first; ``body`` is what they share when none fits
(see `kvdock.ops.signatures`). What is called ``slow`` decides: a quick check that fails may be wrong, one that passes may not.

A name in the source begins with that of the argument it is about: ``k_n0`` is the first size of ``k``, ``k_t0`` its first stride
in elements, ``k_step0`` the same in bytes, ``k_ptr`` its address, ``k_end`` the address behind it.
"""

from __future__ import annotations

import keyword
import linecache
import re
import types
from collections.abc import Iterator
from typing import Any

from kvdock.errors import ArgumentValueError
from kvdock.ops.calls.variant import VariantSource, indented, names_of, pivot_of, tuple_of, variants_of
from kvdock.ops.schema import OpSchema, Role

__all__ = ["compile_source", "source_of"]

_HEAD = '''"""The quick path of `{op}`. Written by ``make calls`` from its schema: see `kvdock.ops.calls.writer`, and do not edit it."""

{imports}from kvdock.ops.signatures import EMPTY, FastCall

__all__ = ["make"]


def make(op):
    """Return the op as a function of all its arguments, and as one of a `BoundOp` and the rest."""
    is_compiling, recording, is_intercepted, trace = op.is_compiling, op.recording, op.is_intercepted, op.trace
    get_mode, enter = op.get_mode, op.enter
    recent, chooser, settings, schema = op.recent, op.chooser, op.settings, op.schema
    find, prepare, slow, blame = op.find, op.prepare, op.run_slowly, op.blame
'''


_OWN_NAMES = frozenset(
    """
    backend blame body0 body1 bound bound_call cache call chooser classes count dispatcher EMPTY enter entry epoch error Exception fast
    fast_calls FastCall find floor generation get_mode guard has_internal_overlap high int is_compiling is_full is_intercepted key known
    late launch low made make make_outputs max mode more named numbers op outputs_guard own_name place plain plan pools prepare reach
    recent recording RuntimeError same schema settings signature slow static strides trace type TypeError variant
    """.split()  # noqa: SIM905 - a list would be one name to a line
)
"""What the code of every op calls its own things, and what every op has in `torch.ops`."""

_DERIVED = r"(ptr|end|size|full|bits|extent|mask|row|rest|[nt]\d+|step\d+)"
"""What may follow the name of an argument."""


def _check_names(schema: OpSchema) -> None:
    """Refuse names of arguments and sizes that the code would take for others."""
    words = sorted({dim.name for arg in schema.args for dims in arg.shapes() for dim in dims if dim.literal is None})
    names = [*schema.arg_names, *words]
    for name in names:
        is_free = name.isidentifier() and not keyword.iskeyword(name) and name not in _OWN_NAMES and names.count(name) == 1
        derived = [*(f"{arg}_{_DERIVED}" for arg in schema.arg_names), *(f"{word}_(least|reach)" for word in words)]
        if not is_free or any(re.fullmatch(pattern, name) for pattern in derived):
            raise ArgumentValueError(
                f"OpSchema {schema.name}: {name}",
                expected="names of arguments and sizes that the code of a call does not use for something else",
                got=name,
                fix=f"call it {name}_arg, or the like",
            )


class _Module:
    def __init__(self, schema: OpSchema) -> None:
        self.schema = schema
        self.sources = [VariantSource(schema, variant) for variant in variants_of(schema)]
        self.groups = {source.group: [each for each in self.sources if each.group == source.group] for source in reversed(self.sources)}
        first = self.sources[0]  # these are the same in all
        self.finish, self.values, self.pools = first.finish, first.values, first.pools
        self.optional, self.returned = first.optional, first.returned
        self.pivot = schema.args[pivot_of(schema)].name
        self.ints = [arg.name for arg in schema.args if arg.role is Role.RUNTIME_INT and not arg.dims]

    def text(self) -> str:
        """Return the source, which a formatter will lay out."""
        imports = "from kvdock.ops.geometry import has_internal_overlap\n" if self.sources[0].outputs else ""
        parts = [_HEAD.format(op=self.schema.name, imports=imports) + ("    make_outputs = op.make_outputs\n" if self.returned else "")]
        parts += ["\n".join(indented(self._body(group), 1)) for group in sorted(self.groups)]
        parts += ["\n".join(indented(self._call(is_bound), 1)) for is_bound in (False, True)]
        return "\n\n".join([*parts, "    return call, bound_call\n"])

    @property
    def place(self) -> list[str]:
        """Name what is known of where pools lie."""
        return [*(f"{name}_{what}" for name in self.pools for what in ("ptr", "end")), "low", "high"]

    def _place_lines(self) -> Iterator[str]:
        """Write where pools lie. Addresses are large integers, on which every operation makes another: so it is looked up."""
        first, *others = self.pools
        yield f"place = pools.places.get({first}.data_ptr())"
        different = "".join(f" or place[{2 * number}] != {name}.data_ptr()" for number, name in enumerate(others, 1))
        yield f"if place is None{different}:"
        yield f"    place = pools.place({', '.join(self.pools)})"
        yield f"{names_of([*self.place, 'plain'])} = place"
        yield "if not plain:"
        yield "    break  # the body finds out more"

    @property
    def _static(self) -> str:
        """Write the static values with their types: 1, 1.0 and True are equal, and need not mean the same."""
        static = [arg.name for arg in self.schema.args if arg.role is Role.STATIC]
        return tuple_of(part for name in static for part in (f"type({name})", name))

    def _body(self, group: int) -> Iterator[str]:
        """Write the function that serves every call of a known signature, given its pools if they are known."""
        sources, names, values = self.groups[group], ", ".join(self.schema.arg_names), self.values
        tensors = ", ".join(sources[0].rest)
        yield f"def body{group}(recent, pools, {names}, named):"
        if self.returned:
            yield f"    if {' and '.join(f'{name} is None' for name in self.returned)}:"
            yield f"        {names_of(self.returned)} = make_outputs({values})"
        key = tuple_of(["named", str(group), self._static, *(f"{name} is None" for name in self.optional)])
        yield f"    key = {key}"
        yield f"    signature = recent.signature{group}"
        yield "    try:"
        optional = f" and (signature.optional is None or signature.optional.accept({values}))" if self.optional else ""
        known = "pools is not None and signature.pools is pools and signature.key == key"
        yield f"        known = {known} and signature.guard({tensors}){optional}"
        yield "    except TypeError:  # what is no tensor"
        yield "        known = False"
        yield "    if not known:"
        yield f"        signature = find(recent, key, {values})"
        yield "        if signature is None:  # nothing that can be known by a guard, such as an int of a class of its own"
        yield from indented(self.finish(f"slow({values}, named)"), 3)
        yield "        pools = signature.pools"
        for source in sources[:-1]:
            yield f"    if signature.variant == {source.variant.number}:"
            yield from indented(source.body_lines(), 2)
        yield from indented(sources[-1].body_lines(), 1)

    def _call(self, is_bound: bool) -> Iterator[str]:
        own = "own_name" if is_bound else "None"
        args = [name for name in self.schema.arg_names if not (is_bound and name in self.pools)]
        yield f"def {'bound_call' if is_bound else 'call'}({', '.join([*(['bound'] if is_bound else []), *args])}):"
        if is_bound:
            yield "    recent, own_name = bound.recent, bound.own_name"
            yield f"    {names_of([*self.pools, *self.place])} = bound.fixed"
        yield "    try:"
        yield from indented(self._tried(is_bound, own), 2)
        yield "    except Exception as error:  # free until something is raised"
        yield f"        blame(error, {self.values}, {own})"
        yield "        raise"

    def _tried(self, is_bound: bool, own: str) -> Iterator[str]:
        """Write what a way in does, whatever may be raised there."""
        yield "if is_compiling():"
        yield from indented(self._traced(is_bound, own), 1)
        yield f"if recording._is_fx_tracing_flag and is_intercepted({self.values}):"
        yield f"    return trace({self.values}, {own})"
        yield "mode = get_mode()"
        for group in sorted(self.groups, reverse=True):
            if group:
                yield f"if type({self.pivot}) is int:"
            yield from indented(self._served(group, is_bound, own), group)

    def _served(self, group: int, is_bound: bool, own: str) -> Iterator[str]:
        """Write what serves the calls of a group."""
        yield from self._fast(group, is_bound)
        yield f"named = {own} if mode is None else enter(mode, {self.values}, {own})"
        if self.ints:
            yield f"if {' or '.join(f'type({name}) is not int' for name in self.ints)}:"
            yield from indented(self.finish(f"slow({self.values}, named)"), 1)
        yield f"return body{group}(recent, pools, {', '.join(self.schema.arg_names)}, named)"

    def _traced(self, is_bound: bool, own: str) -> list[str]:
        call = f"trace({self.values}, {own})"
        if not is_bound or not self.pools:
            return [f"return {call}"]
        pools = names_of(self.pools)
        return [f"{pools} = bound.traced_pools()", *([f"return {call}"] if self.returned else [call, f"return {pools}"])]

    def _fast(self, group: int, is_bound: bool) -> Iterator[str]:
        """Write the attempts to serve a call like earlier ones."""
        sources, pools = self.groups[group], [] if is_bound else self.pools
        yield f"epoch, generation, pools, fast_calls = recent.state{group}"
        yield "if not (epoch == chooser.epoch and generation == settings.generation):"
        yield "    pools = None"
        conditions = ["fast_calls", "mode is None", *(f"{name} is None" for name in self.optional)]
        conditions += [f"type({name}) is int" for name in self.ints]
        yield f"elif {' and '.join(conditions)}:"
        if self.returned:
            yield f"    made = {' and '.join(f'{name} is None' for name in self.returned)}"
        yield "    late = False"
        yield "    for guard, entry, launch, cache, variant, static, numbers, outputs_guard in fast_calls:"
        yield "        plan = entry.value  # held until it has run, whatever becomes of the entry"
        yield "        try:"
        same = ["plan is not None", f"guard({', '.join([*pools, *sources[0].given])})"]
        same += [f"static == {self._static}"] if self._static != "()" else []
        same += [f"(made or outputs_guard({', '.join(self.returned)}))"] if self.returned else []
        yield f"            same = {' and '.join(same)}"
        yield "        except TypeError:  # what is no tensor"
        yield "            break"
        yield "        if not same:"
        yield "            late = True"
        yield "            continue"
        if pools:
            yield from indented(self._place_lines(), 2)
        for source in sources[:-1]:
            yield f"        if variant == {source.variant.number}:"
            yield from indented(source.fast_lines(), 3)
            yield "            late = True"
            yield "            continue"
        yield from indented(sources[-1].fast_lines(), 2)
        yield "        late = True"
        if pools:
            yield "try:"
            yield f"    if pools is not None and not pools.guard({', '.join(pools)}): pools = None"
            yield "except TypeError:  # what is no tensor"
            yield "    pools = None"


def source_of(schema: OpSchema) -> str:
    """Return the source of an op's module, not yet laid out by a formatter.

    Raises:
        ArgumentValueError: the schema has a name that the code uses for something else.
    """
    _check_names(schema)
    return _Module(schema).text()


def compile_source(schema: OpSchema) -> Any:
    """Return ``make`` of a schema that no committed module is for, such as a plugin's. Debuggers find its source."""
    source, name = source_of(schema), f"<kvdock call of {schema.name}>"
    module = types.ModuleType(f"kvdock.ops.calls.{schema.name}")
    exec(compile(source, name, "exec"), module.__dict__)  # noqa: S102 - made from schemas only, never from what a user passes
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    return module.__dict__["make"]
