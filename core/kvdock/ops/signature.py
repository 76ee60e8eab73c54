"""From a schema to the quick path of a call: its key, its checks, and the launch.

A call must not cost more than the kernel it launches, and what costs in Python is every attribute read and every
function call. So the reading of a schema that `validate` does by looping is written out here once per op as straight-line
source, as attrs and dataclasses do for ``__init__``. For `paged_caching_` on ``[T]`` slots it comes to::

    def body0(k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale, named):
        try:
            k_cache_shape = k_cache.shape                       # a pool: its geometry is static, and in the key
            ...
            lead0, k_2, k_3 = k.shape                           # lead0 is a run-time size: not in the key
            k_t0, k_t1, k_t2 = k.stride()                       # nor are these; only the alignment they leave
            ...
            key = (chooser.epoch, settings.generation, named, 0, (k_cache.dtype, k_cache_shape, ...), k_dtype, k_2, k_3, k_a & -k_a, ...)
        except Exception: return slow(values, named)            # no tensor, wrong rank: let `validate` say why
        if <sizes, devices, inner strides disagree>: return slow(values, named)
        if not lead0: return slow(values, named)                # zero tokens: nothing to do, but checked all the same
        cache = local.caches.get(device)                        # this thread's, for this device
        entry = None if cache is None else cache.entries.get(key)
        if entry is None: plan = prepare(values, key, named, device)
        else: plan = entry.value; entry.used = cache.clock = cache.clock + 1
        if <a source overlaps a destination>: return slow(values, named)
        plan.run(k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale)

What this module calls *slow* decides: a quick check that fails may be wrong, one that passes may not.

For a cache that knows its pool (`OpEntry.bind`) the lines about static arguments run once, when it is bound. What they find is
kept by the object that is the first argument of such a call, and not by cells of a closure, which nobody could copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kvdock.ops.geometry import MAX_ALIGNMENT, has_internal_overlap, normalised
from kvdock.ops.memo import Memory, remember
from kvdock.ops.schema import Arg, Dim, OpSchema, Role
from kvdock.ops.variants import HOST_INT_RANK, Variant, pivot_of, variants_of

GENERATED = "<kvdock "
"""How the file names of generated source begin."""

BODY = "body"
"""How the names of generated functions begin that look a plan up and run it."""

__all__ = ["BODY", "GENERATED", "binder_source", "compile_binder", "compile_call", "direct_source", "memorable"]


class _Source:
    """Writes the source of one variant."""

    def __init__(self, schema: OpSchema, variant: Variant, *, is_bound: bool = False) -> None:
        self.schema = schema
        self.is_bound = is_bound
        self.variant = variant
        self.static = [arg.name for arg in schema.static_args]
        self.sized: set[str] = set()  # run-time words that a line above has bound
        self.key: list[str] = ["chooser.epoch", "settings.generation", "named", str(variant.number), "static_key"]
        self.twin: str | None = None  # the argument read last
        self.checks: list[str] = []  # conditions under which the quick path gives up

    def static_lines(self) -> Iterator[str]:
        """Read the pools: everything about them is static."""
        for index, name in enumerate(self.static):
            yield f"{name}_shape = {name}.shape"
            yield f"{name}_strides = {name}.stride()"
            yield f"if 1 in {name}_shape: {name}_strides = normalised({name}_shape, {name}_strides)"
            yield f"{name}_ptr = {name}.data_ptr()"
            yield f"{name}_a = {name}_ptr | {MAX_ALIGNMENT}"
            if index == 0:
                yield f"host = {name}.is_cpu"
                yield f"device = None if host else {name}.device"  # None stands for the host: it is quicker to hash
            else:
                yield f"if {_elsewhere(name)}: raise ValueError"
        parts = ", ".join(f"{name}.dtype, {name}_shape, {name}_strides, {name}_a & -{name}_a" for name in self.static)
        yield f"static_key = ({parts},)"

    def runtime_lines(self) -> Iterator[str]:
        """Read the other arguments: sizes and strides are run-time values, and only classes of them are in the key."""
        for arg in self.schema.args:
            if arg.name in self.static:
                continue
            if arg.optional:
                self.key.append(f"None if {arg.name} is None else ({arg.name}.dtype, {arg.name}.shape, {arg.name}.device)")
            elif arg.name in self.variant.dims:
                yield from self._tensor_lines(arg, self.variant.dims[arg.name])
            elif arg.role is Role.STATIC:
                self.key += [f"type({arg.name})", arg.name]  # 1, 1.0 and True are equal, and need not mean the same
            else:
                self.checks.append(f"type({arg.name}) is not int")

    def _tensor_lines(self, arg: Arg, dims: tuple[Dim, ...]) -> Iterator[str]:
        """Read one tensor with run-time sizes."""
        name = arg.name
        if dims:
            yield f"{', '.join(self._size_name(name, i, dim) for i, dim in enumerate(dims))}, = {name}.shape"
            yield f"{', '.join(f'{name}_t{i}' for i in range(len(dims)))}, = {name}.stride()"
        else:
            self.checks.append(f"{name}.ndim != 0")
        yield f"{name}_dtype = {name}.dtype"
        yield f"{name}_size = {self._itemsize(name)}"
        yield f"{name}_ptr = {name}.data_ptr()"
        yield from self._alignment_lines(name, dims)
        static_sizes = [f"{name}_{i}" for i, dim in enumerate(dims) if not dim.runtime]
        self.key += [f"{name}_dtype", *static_sizes, f"{name}_a & -{name}_a"]
        if arg.host:
            self.key.append(f"{name}.device")
        else:
            self.checks.append(_elsewhere(name))
        if arg.role is Role.MUTATED:  # its strides are no part of the key, so that `validate` saw others
            self.checks.append(f"not {name}.is_contiguous() and has_internal_overlap({name})")

    def _itemsize(self, name: str) -> str:
        """Write the bytes of an element: those of an earlier argument, where that has the same dtype."""
        like = self.twin
        self.twin = name
        return f"{name}_dtype.itemsize" if like is None else f"{like}_size if {name}_dtype is {like}_dtype else {name}_dtype.itemsize"

    def _size_name(self, name: str, index: int, dim: Dim) -> str:
        """Name the variable for one size, noting a check when its word is bound already."""
        variable = f"{name}_{index}"
        if dim.runtime and dim.name not in self.sized:
            self.sized.add(dim.name)
            return dim.name
        if dim.runtime:
            self.checks.append(f"{variable} != {dim.name}")
        return variable

    def _alignment_lines(self, name: str, dims: tuple[Dim, ...]) -> Iterator[str]:
        """Collect what the alignment class must divide; see `validate._runtime_alignment`."""
        last = len(dims) - 1
        if not dims or dims[last].runtime:
            yield f"{name}_a = {name}_ptr | {name}_size"
            return
        self.checks.append(f"{name}_t{last} != 1 and {name}_{last} != 1")
        yield f"{name}_a = {name}_ptr | {MAX_ALIGNMENT} | {name}_{last} * {name}_size"
        for i, dim in enumerate(dims[:last]):
            size = dim.name if dim.runtime else f"{name}_{i}"
            yield f"if {size} > 1: {name}_a |= {name}_t{i} * {name}_size"

    def relation_checks(self) -> list[str]:
        """Return the relations whose words this variant has, turned into reasons to give up."""
        pools = {dim.name: f"{name}_shape[{i}]" for name in self.static for i, dim in enumerate(self.schema.arg(name).shapes()[0])}
        found = []
        for relation in self.schema.relations:
            code = compile(relation.expression, "<relation>", "eval")
            if all(word in self.sized or word in pools for word in code.co_names):
                words = {word: pools[word] for word in code.co_names if word not in self.sized}
                found.append(f"not ({_substitute(relation.expression, words)})")
        return found

    def overlap_lines(self) -> Iterator[str]:
        """Refuse a source that may share memory with a destination.

        Most sources lie below or above all destinations, which one comparison with their common range shows.
        """
        mutated = [arg.name for arg in self.schema.mutated]
        sources = [name for name in self.variant.dims if name not in mutated]
        pairs = [
            f"{source}_ptr < {target}_ptr + {self._extent(target)} and {target}_ptr < {source}_end"
            for target, source in itertools.product(mutated, sources)
        ]
        low, high = self._range(mutated)
        yield from low
        yield from high
        for source in sources:
            yield f"{source}_end = {source}_ptr + {self._extent(source)}"
        near = " or ".join(f"{source}_ptr < high and low < {source}_end" for source in sources)
        yield f"if ({near}) and ({' or '.join(pairs)}): {self._give_up}"

    def _range(self, names: list[str]) -> tuple[list[str], list[str]]:
        """Write the common address range of some tensors as ``low`` and ``high``."""
        low, high = [f"low = {names[0]}_ptr"], [f"high = {names[0]}_ptr + {self._extent(names[0])}"]
        for name in names[1:]:
            low.append(f"if {name}_ptr < low: low = {name}_ptr")
            high.append(f"if {name}_ptr + {self._extent(name)} > high: high = {name}_ptr + {self._extent(name)}")
        return low, high

    def _extent(self, name: str) -> str:
        """Write the bytes that a tensor spans; of a pool the plan knows them."""
        if name in self.static:
            return f"plan.extents[{self.static.index(name)}]"
        dims = self.variant.dims[name]
        sizes = [dim.name if dim.runtime else f"{name}_{i}" for i, dim in enumerate(dims)]
        steps = [f"({size} - 1) * {name}_t{i}" for i, size in enumerate(sizes)]
        return f"(1 + {' + '.join(steps) or '0'}) * {name}_size"

    @property
    def _give_up(self) -> str:
        """Write the return that lets the slow path decide."""
        return f"return slow(({', '.join(self.schema.arg_names)},), named)"

    def launch_lines(self) -> Iterator[str]:
        """Write what comes once the key is known."""
        names = ", ".join(self.schema.arg_names)
        doubled = [f"{a.name}_ptr == {b.name}_ptr" for a, b in itertools.combinations(self.schema.mutated, 2)]
        doubts = [*self.checks, *self.relation_checks(), *doubled]
        if doubts:
            yield f"if {' or '.join(f'({check})' for check in doubts)}: {self._give_up}"
        if self.sized:
            yield f"if not ({' and '.join(sorted(self.sized))}): {self._give_up}"
        yield "cache = local.caches.get(device)"
        yield "entry = None if cache is None else cache.entries.get(key)"
        yield "plan = None if entry is None else entry.value"
        yield f"if plan is None: plan = prepare(({names},), key, named, device)"
        yield "else:"
        yield "    entry.used = cache.clock = cache.clock + 1"
        yield from self.overlap_lines()
        if memorable(self.schema):
            size, tensors = sorted(self.sized)[0], ", ".join(_tensors(self.schema))
            yield "state = memory.state"
            yield f"if state.size != {size}: state.size = {size}"
            # What `use_backend` names is for its block only: a memo is of the usual choice, or of a bound call's own backend.
            yield f"elif entry is not None and named == own_name and not ({_row_addresses(self.schema)}) & {MAX_ALIGNMENT - 1}:"
            arguments = f"({names},), ({tensors},), {len(self.static) if self.is_bound else 0}"
            yield f"    remember(state, plan, entry, cache, chooser.epoch, settings.generation, {arguments})"
        yield f"plan.run({names})"

    def _guarded(self, lines: Sequence[str]) -> list[str]:
        """Wrap lines so that whatever fails in them is explained by the slow path."""
        return ["try:", *(f"    {line}" for line in lines), f"except Exception: {self._give_up}"]

    def body(self) -> str:
        """Return the source of a function that takes every argument."""
        lines = [*self.static_lines(), *self.runtime_lines()]
        body = [*self._guarded([*lines, f"key = ({', '.join(self.key)},)"]), *self.launch_lines()]
        return _function(f"{BODY}{self.variant.number}", [*self.schema.arg_names, "named"], body)

    def bound_body(self) -> str:
        """Return the same for pools that `static_lines` has read already."""
        known = f"{', '.join(_fixed(self.schema))} = bound.fixed"
        body = [known, *self._guarded([*self.runtime_lines(), f"key = ({', '.join(self.key)},)"]), *self.launch_lines()]
        rest = [name for name in self.schema.arg_names if name not in self.static]
        return _function(f"{BODY}{self.variant.number}", ["bound", *rest, "named"], body)


def _function(name: str, args: Sequence[str], lines: Sequence[str]) -> str:
    """Write a function."""
    return "\n".join([f"def {name}({', '.join(args)}):", *("    " + line for text in lines for line in text.splitlines())])


def _head(schema: OpSchema) -> list[str]:
    """Name what the head of a bound call needs of what it is bound to."""
    return [*(arg.name for arg in schema.static_args), "memory", "own_name"]


def _fixed(schema: OpSchema) -> list[str]:
    """Name what its bodies need: what `_Source.static_lines` finds out about the pools, too."""
    found = [f"{arg.name}_{what}" for arg in schema.static_args for what in ("shape", "ptr")]
    return [*_head(schema), *found, "host", "device", "static_key"]


def memorable(schema: OpSchema) -> bool:
    """Whether calls of an op are remembered: where every argument but the optional ones is a tensor."""
    return all(arg.optional or arg.role in (Role.TENSOR, Role.MUTATED) for arg in schema.args)


def _tensors(schema: OpSchema) -> list[str]:
    """Return the arguments that are tensors in every call."""
    return [arg.name for arg in schema.args if not arg.optional]


def _row_addresses(schema: OpSchema) -> str:
    """Write the bits of the addresses of all tensors that hold rows: indices are read one by one, wherever they lie."""
    rows = [name for name in _tensors(schema) if not schema.arg(name).shapes()[0][-1].runtime]
    return " | ".join(f"{name}_ptr" for name in rows)


def _memo_lines(schema: OpSchema, bound: Sequence[str]) -> Iterator[str]:
    """Write the head of a call: one that is just like the last of this thread is launched at once. See `kvdock.ops.memo`."""
    tensors, mutated = _tensors(schema), [arg.name for arg in schema.mutated]
    sources = [name for name in tensors if name not in mutated]
    extents = ", ".join(f"{name}_extent" for name in tensors)
    absent = "".join(f" and {arg.name} is None" for arg in schema.args if arg.optional)
    yield "memo = memory.state.memo"
    yield f"if memo is not None and mode is None{absent}:"
    yield f"    check, epoch, generation, fixed, entry, cache, {extents} = memo"
    yield f"    try: same = check({', '.join(name for name in tensors if name not in bound)})"
    yield "    except TypeError: same = False"
    yield "    plan = entry.value"
    yield "    if same and plan is not None and epoch == chooser.epoch and generation == settings.generation:"
    for name in tensors:
        yield f"        {name}_ptr = {name}.data_ptr()"
    yield f"        low, high = {mutated[0]}_ptr, {mutated[0]}_ptr + {mutated[0]}_extent"
    for name in mutated[1:]:
        yield f"        if {name}_ptr < low: low = {name}_ptr"
        yield f"        if {name}_ptr + {name}_extent > high: high = {name}_ptr + {name}_extent"
    near = " or ".join(f"{name}_ptr < high and low < {name}_ptr + {name}_extent" for name in sources)
    # Evaluated for a source within the common range only: it may lie between two pools.
    overlaps = " or ".join(
        f"{source}_ptr < {target}_ptr + {target}_extent and {target}_ptr < {source}_ptr + {source}_extent"
        for target, source in itertools.product(mutated, sources)
    )
    doubled = " or ".join(f"{a}_ptr == {b}_ptr" for a, b in itertools.combinations(mutated, 2))
    yield f"        if not (({_row_addresses(schema)}) & {MAX_ALIGNMENT - 1} or {doubled} or ({near}) and ({overlaps})):"
    yield "            entry.used = cache.clock = cache.clock + 1"
    yield f"            if fixed is not None: return fixed({', '.join(f'{name}_ptr' for name in tensors)})"
    yield f"            return plan.run({', '.join(schema.arg_names)})"


def _entry(schema: OpSchema, variants: Sequence[Variant], args: Sequence[str]) -> str:
    """Write the function that reads the mode, tries the memo, and picks a body by the rank of the pivot argument."""
    every, bound = ", ".join(schema.arg_names), [name for name in schema.arg_names if name not in args]
    own = ["bound"] if bound else []
    lines = [
        *([f"{', '.join(_head(schema))} = bound.head"] if bound else ()),
        f"if is_compiling(): return slow(({every},), None)",
        "mode = get_mode()",
        *(_memo_lines(schema, bound) if memorable(schema) else ()),
        f"named = own_name if mode is None else enter(mode, ({every},), own_name)",
        f"rank = {_rank_source(schema.args[pivot_of(schema)])}",
        *(f"if rank == {variant.pivot_rank}: return {BODY}{variant.number}({', '.join([*own, *args])}, named)" for variant in variants),
        f"return slow(({every},), named)",
    ]
    return _function("call", [*own, *args], lines)


def _rank_source(pivot: Arg) -> str:
    """Write the rank of the pivot argument, whatever was passed in its place."""
    tensor = f"getattr({pivot.name}, 'ndim', None)"
    return f"{HOST_INT_RANK} if type({pivot.name}) is int else {tensor}" if pivot.role is Role.RUNTIME_INT else tensor


def direct_source(schema: OpSchema) -> str:
    """Return the source of ``call``, which takes every argument of an op."""
    variants = variants_of(schema)
    bodies = [_Source(schema, variant).body() for variant in variants]
    return "\n".join([*bodies, _entry(schema, variants, schema.arg_names)])


def binder_source(schema: OpSchema) -> str:
    """Return the source of ``read``, which says what is known of pools, and of ``call``, which takes that and the other arguments."""
    variants = variants_of(schema)
    static = [arg.name for arg in schema.static_args]
    known = f"return ({', '.join(_head(schema))}), ({', '.join(_fixed(schema))})"
    read = _function("read", [*static, "own_name"], ["memory = Memory()", *_Source(schema, variants[0]).static_lines(), known])
    bodies = [_Source(schema, variant, is_bound=True).bound_body() for variant in variants]
    return "\n".join([read, *bodies, _entry(schema, variants, [name for name in schema.arg_names if name not in static])])


def _elsewhere(name: str) -> str:
    """Write whether a tensor is on another device than the pools. Asking for host memory is half the price of comparing."""
    return f"not {name}.is_cpu if host else {name}.device != device"


def _substitute(expression: str, words: dict[str, str]) -> str:
    """Replace whole words in an expression of the schema."""
    tokens = expression.replace("(", " ( ").replace(")", " ) ").split()
    return " ".join(words.get(token, token) for token in tokens)


def _compile(source: str, what: str, scope: dict[str, Any]) -> dict[str, Any]:
    """Execute generated source. It is made from schemas only, never from what a user passes."""
    namespace = {
        "normalised": normalised,
        "has_internal_overlap": has_internal_overlap,
        "is_compiling": torch.compiler.is_compiling,
        "remember": remember,
        "Memory": Memory,
        **scope,
    }
    exec(compile(source, f"{GENERATED}{what}>", "exec"), namespace)  # noqa: S102
    return namespace


def compile_call(schema: OpSchema, scope: dict[str, Any]) -> Callable[..., None]:
    """Return the quick path of an op: a function of its arguments in the schema's order, None where absent.

    Args:
        schema: the op.
        scope: what the source refers to: ``slow``, ``prepare``, ``enter``, ``get_mode``, ``chooser``, ``settings`` and ``local``.
    """
    call: Callable[..., None] = _compile(direct_source(schema), schema.name, {**scope, "own_name": None, "memory": Memory()})["call"]
    return call


def compile_binder(schema: OpSchema, scope: dict[str, Any]) -> tuple[Callable[..., tuple[Any, Any]], Callable[..., None]]:
    """Return what reads the pools, given a backend's name or None too, and the quick path for the other arguments.

    The latter's first argument is an object that keeps what the former returned as ``head`` and ``fixed``.
    """
    made = _compile(binder_source(schema), f"{schema.name} bound", scope)
    return made["read"], made["call"]
