"""What a thread knows of the calls it has made: pools, signatures and fast calls, each recognised without reading it again.

A call goes down this list, and stops at the first that serves it:

1. `FastCall`: pools as they were, and all else like an earlier call but for addresses and run-time sizes. What its strides come to
   is settled; it is left to look at sizes and addresses.
2. `Signature`: a call with the static signature of an earlier one. Sizes and strides are read, and looked up among fast calls.
3. `kvdock.ops.entry.OpEntry.find`: all else is validated, once.

The first two are the code in `kvdock.ops.calls`. Neither depends on what the last call was like: a thread keeps what it meets, and
what is settled belongs to a signature, not to a call. A `FastCall` is made once its strides were read often enough that making it
is cheap beside that, and tried first from then on; both are counted for each pattern of strides by itself, and done at most a
logarithm of times. So a pattern that comes again costs less, and one that never does costs nothing more.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvdock.descriptors.lru import Entry, LRUDescriptorCache
from kvdock.guarded import raise_memory
from kvdock.ops.calls.variant import Variant
from kvdock.ops.geometry import LOWEST, MAX_ALIGNMENT, extent
from kvdock.ops.guards import Guard, make_guard
from kvdock.ops.memory import alignment_class, full_alignment
from kvdock.ops.schema import LEAD_RANKS, Arg, Dim, OpSchema, Role, parse_dims

__all__ = ["EMPTY", "FastCall", "Pools", "Recent", "Signature", "known_sizes", "new_outputs"]

MOST_PATTERNS = 256
"""Patterns of strides that a signature counts. Those that never come again must not fill memory."""

FIRST_WORTH = 4
"""How often a pattern of strides is read before it is settled: that costs as much as it saves in some ten calls."""

MOST_TRIED = 3
"""Fast calls that are tried before strides are read: each that does not fit costs a tenth of reading them."""

MOST_PLACES = 4096
"""Addresses of pools that are remembered: a layer has one."""

EMPTY: Entry = Entry(None, 0)
"""Stands for an entry that is not there."""


class Pools:
    """Pools of one geometry: what a call has in its static tensor arguments. An op without such has one of these for all calls.

    Args:
        schema: the op.
        args: all arguments of a valid call, by name.
        epoch: `Chooser.epoch` for which it holds.
        generation: generation of the descriptor caches for which it holds.

    Attributes:
        guard: accepts pools of this geometry.
        extents: bytes that each pool spans.
        places: by the address of the first pool, what `place` returned.
        apart: names of two written pools and differences of their addresses at which they lie interleaved, without sharing a byte.
    """

    __slots__ = ("_names", "_written", "apart", "epoch", "extents", "generation", "guard", "places")

    def __init__(self, schema: OpSchema, args: dict[str, Any], epoch: int, generation: int) -> None:
        tensors = [args[arg.name] for arg in schema.static_args]
        self.epoch, self.generation = epoch, generation
        self.guard = make_guard(tensors, [tensor.shape for tensor in tensors], [tensor.stride() for tensor in tensors])
        self.extents = tuple(extent(tensor) for tensor in tensors)
        self._names = [arg.name for arg in schema.static_args]
        self._written = [arg.name for arg in schema.static_args if arg.role is Role.MUTATED]
        self.apart: set[tuple[str, str, int]] = set()
        self.places: dict[int, tuple[int, ...]] = {}
        self.note_apart(args)

    def place(self, *tensors: torch.Tensor) -> tuple[int, ...]:
        """Return address and end of each pool, the range of all that are written, and whether they are plain.

        Plain are those that a fast call may have: aligned, and apart from one another.
        """
        if len(self.places) >= MOST_PLACES:
            self.places.clear()
        starts = [tensor.data_ptr() for tensor in tensors]
        ranges = [(start, start + extent) for start, extent in zip(starts, self.extents, strict=True)]
        written = [each for name, each in zip(self._names, ranges, strict=True) if name in self._written]
        low, high = (min(a for a, _ in written), max(b for _, b in written)) if written else (0, 0)
        apart = all(a[1] <= b[0] or b[1] <= a[0] for a, b in itertools.combinations(written, 2))
        plain = apart and min(starts) >= LOWEST and not any(start % MAX_ALIGNMENT for start in starts)
        place = self.places[starts[0]] = (*(address for each in ranges for address in each), low, high, plain)
        return place

    def note_apart(self, args: dict[str, Any]) -> None:
        """Remember how the pools of a valid call lie to one another: they share no byte."""
        pairs = itertools.combinations(self._written, 2)
        self.apart.update((a, b, args[b].data_ptr() - args[a].data_ptr()) for a, b in pairs)


class FastCall:
    """What is settled of calls with one pattern of strides.

    Args:
        guard: accepts the tensors of a call but outputs that it may make.
        bound_guard: the same for a call of a `BoundOp`, without pools.
        entry: where the plan is.
        launch: see `kvdock.interface.Descriptor.fix`.
        others: cache, number of the variant, static values, numbers, and a guard of outputs that are given.

    Attributes:
        parts: what a call unpacks; ``bound_parts`` for a call of a `BoundOp`.
    """

    __slots__ = ("bound_parts", "entry", "launch", "parts")

    def __init__(self, guard: Guard, bound_guard: Guard, entry: Entry, launch: Callable[..., None] | None, *others: Any) -> None:
        self.entry, self.launch = entry, launch
        self.parts, self.bound_parts = (guard, entry, launch, *others), (bound_guard, entry, launch, *others)


class Recent(threading.local):
    """What the calling thread used last, of one op or of one op bound to its pools. Calls with a host int for a tensor go apart.

    Args:
        own_name: the backend that a bound op uses for good, if any.
        is_bound: whether it is of a bound op.

    Attributes:
        state0: what a call unpacks: epoch, generation, the `Pools`, and the fast calls to try.
        signature0: the signature to try.
        pools, signatures: all that the thread knows of the op.
    """

    __slots__ = ("is_bound", "own_name")  # the same for all threads, and there even where a signal handler looks into what is being made
    state0: tuple[Any, ...] = (-1, -1, None, ())
    state1: tuple[Any, ...] = (-1, -1, None, ())
    signature0: Signature | None = None
    signature1: Signature | None = None
    pools: Sequence[Pools] = ()
    signatures: Sequence[Signature] = ()
    _late = 0

    def __init__(self, own_name: str | None = None, *, is_bound: bool = False) -> None:
        self.own_name, self.is_bound = own_name, is_bound

    def use(self, group: int, signature: Signature) -> None:
        """Try a signature first from now on, and its pools."""
        setattr(self, f"signature{group}", signature)
        pools = signature.pools
        if getattr(self, f"state{group}")[2] is not pools:
            setattr(self, f"state{group}", (pools.epoch, pools.generation, pools, ()))

    def adopt(self, group: int, fast: FastCall) -> None:
        """Try a fast call first from now on: the first time that it is found by reading strides, the second, the fourth, ..."""
        counts: dict[FastCall, int] = self.__dict__.setdefault("counts", {})  # one's own: other layers find the same fast call
        if len(counts) >= MOST_PATTERNS:
            counts.clear()
        counts[fast] = found = counts.get(fast, 0) + 1
        if not found & (found - 1):
            self._put_first(group, fast.bound_parts if self.is_bound else fast.parts)

    def promote(self, group: int, guard: Guard) -> None:
        """Count that a fast call was tried in vain before this one, and try this one first the 64th time: it may be what goes on now."""
        self._late += 1
        if not self._late % 64:
            *_, fasts = getattr(self, f"state{group}")
            self._put_first(group, next(parts for parts in fasts if parts[0] is guard))

    def _put_first(self, group: int, first: tuple[Any, ...]) -> None:
        *head, fasts = getattr(self, f"state{group}")
        others = [parts for parts in fasts if parts is not first]
        setattr(self, f"state{group}", (*head, (first, *others[: MOST_TRIED - 1])))


class Signature:
    """A static signature that a call was validated for, and the plans for it by alignment.

    Args:
        schema: the op.
        variant: the combination of ranks.
        key: what tells calls apart beside tensors: see `kvdock.ops.calls.writer`.
        values: all arguments of a valid call.
        pools: its pools.
        cache: the calling thread's descriptor cache for the device.

    Attributes:
        guard: accepts the other tensors of `Variant.dims` in a call of this signature.
        optional: checks the optional tensors that are there; None when there are none.
        full: the entry for tensors that are as aligned as their rows allow, which nearly all are.
        entries: the entries for others, by the alignment of each tensor.
        numbers: bytes per element, and best alignment, of each tensor that is no pool.
        fast: by pattern of strides: a `FastCall`, or how often it was read so far.
    """

    __slots__ = ("_dims", "cache", "entries", "fast", "full", "guard", "key", "numbers", "optional", "pools", "variant")

    def __init__(
        self,
        schema: OpSchema,
        variant: Variant,
        key: tuple[Any, ...],
        values: tuple[Any, ...],
        pools: Pools,
        cache: LRUDescriptorCache[Any],
    ) -> None:
        args, static = schema.bind(values), {arg.name for arg in schema.static_args}
        self.variant, self.key, self.pools, self.cache = variant.number, key, pools, cache
        self._dims = {name: dims for name, dims in variant.dims.items() if name not in static}
        tensors = [args[name] for name in self._dims]
        dims = list(self._dims.values())
        self.guard = make_guard(tensors, *_insisted(dims, tensors))
        present = [arg for arg in schema.args if arg.optional and arg.role is Role.TENSOR and args[arg.name] is not None]
        self.optional = _OptionalTensors(schema, present, args) if present else None
        self.full: Entry = EMPTY
        self.entries: dict[tuple[int, ...], Entry] = {}
        self.numbers = [n for d, tensor in zip(dims, tensors, strict=True) for n in (tensor.element_size(), full_alignment(d, tensor))]
        self.fast: dict[tuple[int, ...], FastCall | int] = {}

    def is_due(self, strides: tuple[int, ...]) -> bool:
        """Count that a pattern of strides was read, and say whether it is worth settling now: the 4th time, the 8th, ..."""
        count = self.fast.get(strides, 0)
        if isinstance(count, FastCall):  # of a plan that is gone
            count = 0
        elif not count and len(self.fast) >= MOST_PATTERNS:
            self.fast.clear()
        self.fast[strides] = count = count + 1
        return count >= FIRST_WORTH and not count & (count - 1)

    def settle(
        self, schema: OpSchema, entry: Entry, pattern: tuple[int, ...], numbers: tuple[int, ...], values: tuple[Any, ...]
    ) -> FastCall | None:
        """Make the `FastCall` of a call that has just been checked, if that says enough about the same strides at other sizes.

        The pattern is all strides but the pools', and numbers what the code in `kvdock.ops.calls` makes of them.
        """
        plan, args = entry.value, schema.bind(values)
        outputs = {arg.name for arg in schema.mutated}
        settled = {name: _settled(dims, args[name], is_output=name in outputs) for name, dims in self._dims.items()}
        if plan is None or None in settled.values():
            return None
        sizes, strides = ({name: each[place] for name, each in settled.items() if each} for place in (0, 1))
        # An output that is made is guarded by what its sizes are made of.
        kept = {d.name: n for name in outputs & {*sizes} for d, n in zip(self._dims[name], sizes[name], strict=True) if n is not None}
        for name, dims in self._dims.items():
            sizes[name] = [kept.get(d.name, n) if n is None else n for d, n in zip(dims, sizes[name], strict=True)]
        pools = [arg.name for arg in schema.static_args]
        sizes |= {name: args[name].shape for name in pools}
        strides |= {name: args[name].stride() for name in pools}
        returned = [arg.name for arg in schema.args if arg.returned]
        given = [name for name in self._dims if name not in returned]

        def guard_of(names: list[str]) -> Guard:
            return make_guard([args[name] for name in names], [sizes[name] for name in names], [strides[name] for name in names])

        others = self.cache, self.variant, self.key[2], numbers, guard_of(returned) if returned else None
        fast = self.fast[pattern] = FastCall(guard_of([*pools, *given]), guard_of(given), entry, plan.fix(values), *others)
        return fast


class _OptionalTensors:
    """The optional tensors that the calls of a signature have, read without code of their own: such calls take longer."""

    def __init__(self, schema: OpSchema, present: Sequence[Arg], args: dict[str, Any]) -> None:
        self._places = [schema.arg_names.index(arg.name) for arg in present]
        self._dims = [arg.dims_of_rank(args[arg.name].dim()) or () for arg in present]
        tensors = [args[arg.name] for arg in present]
        self._is_static = [bool(dims) and not any(dim.runtime for dim in dims) for dims in self._dims]
        sizes, free = _insisted(self._dims, tensors)
        strides = [tensor.stride() if is_static else each for is_static, each, tensor in zip(self._is_static, free, tensors, strict=True)]
        self._guard = make_guard(tensors, sizes, strides)
        words = {dim.name for dims in self._dims for dim in dims}
        names = {arg.name for arg in present}
        self._relations = [each for each in schema.relations if each.without not in names and words.intersection(each.code.co_names)]
        self._sizes = known_sizes(schema, args)

    def accept(self, values: tuple[Any, ...]) -> bool:
        """Whether they are like those of the signature."""
        return self._guard(*[values[place] for place in self._places])

    def read(self, values: tuple[Any, ...], sizes: dict[str, int], low: int, high: int) -> tuple[int, ...] | None:
        """Return their alignment, or None where sizes do not agree or one may lie in what is written, from ``low`` to ``high``."""
        classes = []
        for place, dims, is_static in zip(self._places, self._dims, self._is_static, strict=True):
            tensor = values[place]
            if not all(tensor.shape) or any(sizes.setdefault(d.name, n) != n for d, n in zip(dims, tensor.shape, strict=True) if d.runtime):
                return None
            at = tensor.data_ptr()
            if at < LOWEST or (at < high and low < at + extent(tensor)):
                return None
            classes.append(alignment_class(dims, tensor, is_static))
        known = self._sizes | sizes if self._relations else {}
        return tuple(classes) if all(relation.holds(known) for relation in self._relations) else None


_Fixed = list[int | None]


def known_sizes(schema: OpSchema, args: dict[str, Any]) -> dict[str, int]:
    """Return sizes by word, as tensors that are always there have them."""
    sizes: dict[str, int] = {}
    for arg in schema.args:
        tensor = args[arg.name]
        if isinstance(tensor, torch.Tensor) and not arg.optional and not arg.returned:
            for dim, size in zip(arg.dims_of_rank(tensor.dim()) or (), tensor.shape, strict=False):
                sizes.setdefault(dim.name, size)
    return sizes


def new_outputs(schema: OpSchema, values: tuple[Any, ...]) -> list[torch.Tensor | None]:
    """Return new outputs for a call that brings none, as large as its other arguments say; None where these are wrong.

    Raises:
        CapacityError: there is no memory for them.
    """
    args, returned = schema.bind(values), [arg for arg in schema.args if arg.returned]
    try:
        sizes = known_sizes(schema, args)
        lead = sum(word.startswith("lead") for word in sizes) or LEAD_RANKS[0]
        shapes = [[dim.literal or sizes[dim.name] for dim in parse_dims(arg.dims[0], lead)] for arg in returned]
        return [args[arg.same_dtype or ""].new_empty(shape) for arg, shape in zip(returned, shapes, strict=True)]
    except (AttributeError, KeyError, TypeError):
        return [None] * len(returned)  # wrong arguments, which the slow path explains
    except (MemoryError, RuntimeError) as error:
        raise_memory(error, schema.name)


def _insisted(dims: Sequence[tuple[Dim, ...]], tensors: Sequence[torch.Tensor]) -> tuple[list[_Fixed], list[_Fixed]]:
    """Return the sizes that may not change, and the strides that may not whatever the sizes: the innermost of rows."""
    sizes, strides = list[_Fixed](), list[_Fixed]()
    for each, tensor in zip(dims, tensors, strict=True):
        sizes.append([None if dim.runtime else size for dim, size in zip(each, tensor.shape, strict=True)])
        strides.append([*[None] * (len(each) - 1), None if each[-1].runtime else tensor.stride(-1)] if each else [])
    return sizes, strides


def _settled(dims: tuple[Dim, ...], tensor: torch.Tensor, *, is_output: bool) -> tuple[_Fixed, _Fixed] | None:
    """Return which sizes and strides a fast call insists on, or None if what holds of a tensor need not hold at other sizes.

    A run-time size of 1 stays 1, and its stride, which says nothing, may be any: so a batch of one keeps its fast call as it grows.
    Steps between rows must be as aligned as rows. An output must be dense, and only its outermost size may change: at these strides,
    places would coincide if another grew.
    """
    best, item = full_alignment(dims, tensor), tensor.element_size()
    sizes: _Fixed = []
    strides: _Fixed = []
    dense = tensor.numel()
    for dim, size, stride in zip(dims, tensor.shape, tensor.stride(), strict=True):
        if dim.runtime and size == 1:
            sizes.append(1)
            strides.append(None)
            continue
        if dim.runtime and stride * item % best:
            return None
        dense //= size
        if is_output and size > 1 and stride != dense:
            return None
        sizes.append(None if dim.runtime and not (is_output and any(kept != 1 for kept in sizes)) else size)
        strides.append(stride)
    return sizes, strides
