"""The combinations of ranks that a schema allows, and the code for one of them. See `kvdock.ops.calls.writer`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

import attrs

from kvdock.ops.geometry import LOWEST, MAX_ALIGNMENT
from kvdock.ops.schema import LEAD_RANKS, Dim, OpSchema, Role, parse_dims

__all__ = ["HOST_INT_RANK", "Variant", "VariantSource", "alone", "indented", "names_of", "pivot_of", "tuple_of", "variants_of"]

HOST_INT_RANK = -1
"""Stands for the rank of an argument that came as a host int."""


@attrs.frozen
class Variant:
    """One combination of ranks that a schema allows: each has a quick path of its own.

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
    pivot, found = schema.args[pivot_of(schema)], list[Variant]()
    leads = {len(parse_dims(line, lead)): lead for lead in reversed(LEAD_RANKS) for line in reversed(pivot.dims)}
    if pivot.role is Role.RUNTIME_INT:
        leads[HOST_INT_RANK] = LEAD_RANKS[0]
    for number, (rank, lead) in enumerate(sorted(leads.items())):
        dims = {arg.name: parse_dims(arg.dims[0], lead) for arg in schema.args if arg.is_tensor and not arg.optional}
        if rank == HOST_INT_RANK:
            del dims[pivot.name]
        else:
            dims[pivot.name] = pivot.dims_of_rank(rank) or ()
        found.append(Variant(number, rank, dims))
    return found


class VariantSource:
    """Writes the code of one variant of an op."""

    def __init__(self, schema: OpSchema, variant: Variant) -> None:
        self.schema, self.variant = schema, variant
        self.pools = [arg.name for arg in schema.static_args]
        self.rest = [name for name in variant.dims if name not in self.pools]
        self.mutated = [arg.name for arg in schema.mutated if not arg.optional]
        self.outputs = [name for name in self.mutated if name not in self.pools]
        self.words = list(dict.fromkeys(dim.name for name in self.rest for dim in variant.dims[name] if dim.runtime))
        self.optional = [arg.name for arg in schema.args if arg.optional and arg.role in (Role.TENSOR, Role.MUTATED)]
        self.returned = [arg.name for arg in schema.args if arg.returned]
        self.given = [name for name in self.rest if name not in self.returned]
        self.values = tuple_of(schema.arg_names)
        self.rows = [name for name in self.rest if not all(dim.runtime for dim in variant.dims[name][-1:])]  # the innermost is static
        self.runtime = {name: [(i, dim) for i, dim in enumerate(variant.dims[name]) if dim.runtime] for name in self.rest}
        self.only_pools_written = bool(self.mutated) and not self.outputs
        self.group = int(variant.pivot_rank == HOST_INT_RANK)  # their calls are remembered apart

    # Names

    @property
    def launch_args(self) -> str:
        """Write what `Descriptor.fix` promises a launch: addresses, run-time sizes, host ints."""
        ints = [arg.name for arg in self.schema.args if arg.role is Role.RUNTIME_INT and arg.name not in self.variant.dims]
        return ", ".join([*(f"{name}_ptr" for name in self.variant.dims), *self.words, *ints])

    # What is written

    def range_lines(self, names: Sequence[str]) -> Iterator[str]:
        """Write the common range of what is written."""
        for which, end, sign in (("low", "ptr", "<"), ("high", "end", ">")):
            yield f"{which} = {names[0]}_{end}"
            yield from (f"if {name}_{end} {sign} {which}: {which} = {name}_{end}" for name in names[1:])

    def doubled(self) -> list[str]:
        """Write which pairs of destinations share addresses; pools may lie interleaved where that was looked into."""
        found = []
        for a, b in itertools.combinations(self.mutated, 2):
            pair = f"{a}_ptr < {b}_end and {b}_ptr < {a}_end"
            if a in self.pools and b in self.pools:
                pair += f' and ("{a}", "{b}", {b}_ptr - {a}_ptr) not in pools.apart'
            found.append(pair)
        return found

    def overlap(self, ends: dict[str, str]) -> list[str]:
        """Write which sources may lie in what is written, or nowhere: one comparison with the range of all of that is enough for most.

        Args:
            ends: the expression for the end of a source, where it is not known yet: it is worked out when it matters.
        """
        found = []
        for source in self.variant.dims if self.mutated else ():
            if source in self.mutated:
                continue
            end = ends.get(source, f"{source}_end")
            pairs = " or ".join(f"{source}_ptr < {target}_end and {target}_ptr < {end}" for target in self.mutated)
            inside = f"low < {end}" if len(self.mutated) == 1 else f"low < {end} and ({pairs})"
            found.append(f"{source}_ptr < high and ({source}_ptr < {LOWEST} or {inside})")
        return found

    # The quick call

    @property
    def fast_numbers(self) -> list[tuple[str, str]]:
        """List what is settled of a `FastCall`: the name it is unpacked to, and how the body writes it."""
        found = [(f"{word}_least", f"int({word} > 1)") for word in self.words]  # 1 is a pattern of its own: see `body_lines`
        reach: dict[str, list[str]] = {"reach": [], **{f"{word}_reach": [] for word in self.words}}
        for name in self.rest:
            dims, size = self.variant.dims[name], f"{name}_size"
            static = [f"{name}_n{i}" for i, dim in enumerate(dims) if not dim.runtime]
            if name not in self.rows:
                found.append((f"{name}_mask", f"{size} - 1"))
            found += [(each, each) for each in static if name in self.returned]
            if static and len(self.runtime[name]) == 1:  # see `_fast_sizes`
                found.append((f"{name}_row", " * ".join(static)))
            spans = [f"({name}_n{i} - 1) * {name}_t{i}" for i, dim in enumerate(dims) if not dim.runtime]
            ends = [f"- {name}_t{i}" for i, _ in self.runtime[name]]
            numbers = [(f"{name}_step{i}", f"{name}_t{i} * {size}") for i, _ in self.runtime[name]]
            numbers.append((f"{name}_rest", f"({' '.join([' + '.join(['1', *spans]), *ends])}) * {size}"))
            for key, (_, expression) in zip([*(f"{dim.name}_reach" for _, dim in self.runtime[name]), "reach"], numbers, strict=True):
                reach[key].append(expression)
            found += numbers
        if self.only_pools_written and self.rest:
            found += [(key, f"max({', '.join(each)}, 0)") for key, each in reach.items()]
        return found

    def fast_lines(self) -> Iterator[str]:
        """Write a call whose strides are settled."""
        numbers = [name for name, _ in self.fast_numbers]
        if numbers:
            yield f"{names_of(numbers)} = numbers"
        conditions = [f"{word} > {word}_least" for word in self.words]
        conditions += [f"{name}_ptr >= {LOWEST}" for name in self.given if not self.only_pools_written]  # else see `overlap`
        yield from self._fast_sizes([name for name in self.rest if name not in self.outputs], conditions)
        steps = {name: "".join(f" + {dim.name} * {name}_step{i}" for i, dim in self.runtime[name]) for name in self.rest}
        ends = {name: f"{name}_ptr + {name}_rest{steps[name]}" for name in self.rest}
        if self.returned:
            yield from self._make_outputs()
        yield from (f"{name}_ptr = {name}.data_ptr()" for name in self.rest)
        if self.outputs:
            yield from self._check_outputs(ends)
        rows = [f"{name}_ptr" for name in self.rows]
        refused = [f"({' | '.join(rows)}) & {MAX_ALIGNMENT - 1}"] if rows else []
        refused += [f"{name}_ptr & {name}_mask" for name in self.rest if name not in self.rows]
        conditions += [f"not ({' or '.join(alone(check) for check in refused)})"] if refused else []
        if self.only_pools_written:  # below all of them, or above, is where nearly everything lies
            if self.rest:
                yield " + ".join(["floor = low - (reach", *(f"{word} * {word}_reach" for word in self.words)]) + ")"
            below = {name: f"{LOWEST} <= {name}_ptr <= floor" if name in self.rest else f"{name}_end <= low" for name in self.variant.dims}
            beside = " and ".join(f"({name}_ptr >= high or {below[name]})" for name in self.variant.dims if name not in self.mutated)
            overlap = " or ".join(alone(check) for check in self.overlap(ends))
            conditions += [f"({beside} or not ({overlap}))"] if overlap else []
        conditions += [f"({check})" for check in self.relations()]
        yield f"if {' and '.join(conditions) or 'True'}:"
        yield "    entry.used = cache.clock = cache.clock + 1"
        yield f"    if late: recent.promote({self.group}, guard)"
        yield "    if launch is not None:"
        yield from (f"        {line}" for line in self.finish(f"launch({self.launch_args})"))
        yield from (f"    {line}" for line in self.finish(f"plan.run({', '.join(self.schema.arg_names)})"))

    def _make_outputs(self) -> Iterator[str]:
        """Write how absent outputs are made: the guard has settled all their sizes but those that were just read."""
        yield "if made:"
        yield "    try:"
        for name in self.returned:  # sizes one by one: half the price of a tuple
            sizes = (dim.name if dim.runtime else f"{name}_n{i}" for i, dim in enumerate(self.variant.dims[name]))
            yield f"        {name} = {self.schema.arg(name).same_dtype}.new_empty({', '.join(sizes)})"
        yield "    except RuntimeError:  # there may be no memory, which is said there"
        yield f"        {names_of(self.returned)} = make_outputs({self.values})"

    def _check_outputs(self, ends: dict[str, str]) -> Iterator[str]:
        """Check where outputs lie, and their sizes. Those that the call has made are as they should be: new, and nobody else's."""
        sizes = list[str]()
        known = [dim.name for name in self.rest if name not in self.outputs for dim in self.variant.dims[name]]
        lines = [*self._fast_sizes(self.outputs, sizes, known), *(f"{name}_end = {ends[name]}" for name in self.outputs)]
        lines += self.range_lines(self.mutated)
        pairs = [pair for pair in itertools.combinations(self.mutated, 2) if {*pair} - {*self.pools}]
        shared = [*(f"{a}_ptr < {b}_end and {b}_ptr < {a}_end" for a, b in pairs), *self.overlap(ends)]
        low = [f"{name}_ptr < {LOWEST}" for name in self.outputs]
        wrong = [alone(check) for check in [*low, *(size.replace("==", "!=") for size in sizes), *shared]]
        lines += [f"if {' or '.join(wrong)}:", "    late = True", "    continue"]
        is_made = {*self.outputs} == {*self.returned}
        yield from ["if not made:", *(f"    {line}" for line in lines)] if is_made else lines

    def _fast_sizes(self, names: Sequence[str], conditions: list[str], known: Iterable[str] = ()) -> Iterator[str]:
        """Read run-time sizes: the number of elements says as much as a shape where one size is unknown, and costs half."""
        known = set(known)
        for name in sorted(names, key=lambda name: (len(self.runtime[name]) != 1, name in self.rows)):
            dims, unknown = self.variant.dims[name], self.runtime[name]
            row = f" * {name}_row" if len(dims) > 1 else ""
            if len(unknown) == 1 and (unknown[0][1].name in known or not row):
                word = unknown[0][1].name
                if word in known:
                    conditions.append(f"{name}.numel() == {word}{row}")
                else:
                    yield f"{word} = {name}.numel()"
            elif unknown:
                sizes = (f"{name}_n{i}" if d.name in known or not d.runtime else d.name for i, d in enumerate(dims))
                yield f"{names_of(sizes)} = {name}.shape"
                conditions += [f"{name}_n{i} == {dim.name}" for i, dim in unknown if dim.name in known]
            known.update(dim.name for _, dim in unknown)

    def relations(self) -> list[str]:
        """Return the conditions of the schema whose words this variant has. Those on static sizes were checked with the signature."""
        dims = [(name, i, dim) for name in (*self.pools, *self.rest) for i, dim in enumerate(self.variant.dims[name])]
        sizes = {dim.name: f"{name}.shape[{i}]" for name, i, dim in dims if dim.name not in self.words}
        found = []
        for relation in self.schema.relations:
            names = relation.code.co_names
            if all(word in self.words or word in sizes for word in names) and any(word in self.words for word in names):
                holds = re.sub(r"[A-Za-z_]\w*", lambda word: sizes.get(word[0], word[0]), relation.expression)
                found.append(f"{relation.without} is not None or {holds}" if relation.without else holds)
        return found

    def finish(self, call: str) -> list[str]:
        """Write a call that is the last, and what is returned."""
        return [call, f"return {', '.join(self.returned)}"] if self.returned else [f"return {call}"]

    # The body

    def body_lines(self) -> Iterator[str]:
        """Write a call of a known signature."""
        names = [f"{name}_{what}" for name in self.rest for what in ("size", "full")]
        if names:
            yield f"{names_of(names)} = signature.numbers"
        doubts, bound = [f"not {word}" for word in self.words], set[str]()
        doubts += [f"{name}_ptr < {LOWEST}" for name in (*self.rest, *self.pools) if name in self.mutated or not self.mutated]
        for name in self.rest:
            yield from self._read(name, doubts, bound)
        if self.pools:
            yield f"{names_of(f'{name}_extent' for name in self.pools)} = pools.extents"
        for name in self.pools:
            yield f"{name}_ptr = {name}.data_ptr()"
            yield f"{name}_end = {name}_ptr + {name}_extent"
        if self.mutated:
            yield from self.range_lines(self.mutated)
        doubts += [f"not ({check})" for check in self.relations()]
        doubts += [f"not {name}.is_contiguous() and has_internal_overlap({name})" for name in self.outputs]
        doubts += [*self.doubled(), *self.overlap({})]
        if doubts:
            yield f"if {' or '.join(alone(doubt) for doubt in doubts)}:"
            yield from (f"    {line}" for line in self.finish(f"slow({self.values}, named, pools)"))
        yield from self._entry_lines()
        # That of a run-time size of 1 says nothing, and a fast call insists on the 1.
        steps = [(f"{name}_t{i}", dim) for name in self.rest for i, dim in enumerate(self.variant.dims[name])]
        strides = tuple_of(f"{step} if {dim.name} > 1 else -1" if dim.runtime else step for step, dim in steps)
        yield "if is_full and named == recent.own_name:"
        yield f"    strides = {strides}"
        yield "    fast = signature.fast.get(strides)"
        yield "    if fast.__class__ is not FastCall or fast.entry is not entry:"
        numbers = tuple_of(expression for _, expression in self.fast_numbers)
        yield "        fast = None"
        yield "        if signature.is_due(strides):"
        yield f"            numbers = {numbers}"
        yield f"            fast = signature.settle(schema, entry, strides, numbers, {self.values})"
        yield "    if fast is not None:"
        yield f"        recent.adopt({self.group}, fast)"
        yield "        if fast.launch is not None:"
        yield from (f"            {line}" for line in self.finish(f"fast.launch({self.launch_args})"))
        yield from self.finish(f"plan.run({', '.join(self.schema.arg_names)})")

    def _read(self, name: str, doubts: list[str], bound: set[str]) -> Iterator[str]:
        dims = self.variant.dims[name]
        if dims:
            sizes = []
            for i, dim in enumerate(dims):
                is_new = dim.runtime and dim.name not in bound
                sizes.append(dim.name if is_new else f"{name}_n{i}")
                if dim.runtime and not is_new:
                    doubts.append(f"{name}_n{i} != {dim.name}")
                bound.add(dim.name)
            yield f"{names_of(sizes)} = {name}.shape"
            yield f"{names_of(f'{name}_t{i}' for i in range(len(dims)))} = {name}.stride()"
            spans = " + ".join(f"({size} - 1) * {name}_t{i}" for i, size in enumerate(sizes))
        yield f"{name}_ptr = {name}.data_ptr()"
        yield f"{name}_end = {name}_ptr + (1{f' + {spans}' if dims else ''}) * {name}_size"
        if name not in self.rows:
            doubts.append(f"{name}_ptr & ({name}_size - 1)")
            return
        yield f"{name}_bits = {name}_ptr | {name}_full"
        for i, size in enumerate(sizes[:-1]):
            yield f"if {size} > 1: {name}_bits |= {name}_t{i} * {name}_size"

    def _entry_lines(self) -> Iterator[str]:
        """Find the entry for the alignment of the tensors."""
        pools = " | ".join(f"{name}_ptr" for name in self.pools)
        short = ([f"({pools}) & {MAX_ALIGNMENT - 1}"] if pools else []) + [f"{name}_bits & ({name}_full - 1)" for name in self.rows]
        yield f"is_full = not ({' or '.join(short)})" if short else "is_full = True"
        optional = []
        if self.optional:
            sizes = "{" + ", ".join(f'"{word}": {word}' for word in self.words) + "}"
            limits = "low, high" if self.mutated else "0, 0"
            yield "more = ()"
            yield "if signature.optional is not None:"
            yield "    is_full = False"
            yield f"    more = signature.optional.read({self.values}, {sizes}, {limits})"
            yield "    if more is None:"
            yield from (f"        {line}" for line in self.finish(f"slow({self.values}, named)"))
            optional = ["*more"]
        bits = [*(f"({name}_ptr | {MAX_ALIGNMENT})" for name in self.pools), *(f"{name}_bits" for name in self.rows)]
        classes = tuple_of([*(f"{bit} & -{bit}" for bit in bits), *optional])
        yield "if is_full:"
        yield "    classes, entry = None, signature.full"
        yield "else:"
        yield f"    classes = {classes}"
        yield "    entry = signature.entries.get(classes, EMPTY)"
        yield "plan = entry.value  # held until it has run, whatever becomes of the entry"
        yield "if plan is None:"
        yield f"    entry, plan = prepare(signature, {self.values}, classes, named)"
        yield "else:"
        yield "    cache = signature.cache"
        yield "    entry.used = cache.clock = cache.clock + 1"


def tuple_of(parts: Iterable[str]) -> str:
    """Write a tuple."""
    return f"({names_of(parts)})"


def names_of(parts: Iterable[str]) -> str:
    """Write what is inside of a tuple, or to the left of one that is unpacked."""
    text = ", ".join(parts)
    return text if ", " in text or not text else text + ","


def alone(check: str) -> str:
    """Put a condition in brackets where it has an operator that binds less than ``or``'s neighbours should."""
    return f"({check})" if " and " in check or " or " in check else check


def indented(lines: Iterable[str], by: int) -> list[str]:
    """Indent lines of source."""
    return ["    " * by + line for text in lines for line in text.splitlines()]
