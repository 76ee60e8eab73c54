"""What a thread knows of the calls it has made: signatures, which are recognised without reading them again.

A call goes down this list, and stops at the first that serves it:

1. `FastCall`: a call just like an earlier one but for addresses and run-time sizes. One guard recognises it, and what its
   strides come to is settled.
2. `Signature`: a call with the static signature of an earlier one. One guard recognises it; sizes and strides are read.
3. `kvdock.ops.entry.OpEntry.find`: all else is validated, once.

The first two are the code in `kvdock.ops.calls`. Neither depends on what the last call was: a thread keeps all signatures that
it meets, and what is settled belongs to a signature, not to a call. A `FastCall` is made once its strides were read often
enough that making it is cheap beside that: it is counted for each pattern of strides by itself, and at most a logarithm of times.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from kvdock.descriptors.lru import Entry, LRUDescriptorCache
from kvdock.ops.geometry import MAX_ALIGNMENT, alignment_of, extent
from kvdock.ops.guards import Guard, make_guard, never
from kvdock.ops.schema import Arg, Dim, OpSchema, Role
from kvdock.ops.variants import Variant

__all__ = ["EMPTY", "FastCall", "Recent", "Signature", "full_alignment"]

MOST_PATTERNS = 64
"""Patterns of strides that a signature counts. Those that never come again must not fill memory."""

FIRST_WORTH = 32
"""How often a pattern of strides is read before it is settled: that costs as much as it saves in some ten calls."""

EMPTY: Entry[Any] = Entry(None, 0)
"""Stands for an entry that is not there."""

_NO_CALL: tuple[Any, ...] = (never, -1, EMPTY, None, 0, 0, (), None, ())


@attrs.frozen(eq=False)
class FastCall:
    """What is settled of calls with one pattern of strides, as tuples that a call unpacks.

    Args:
        entry: the descriptor's entry in the cache.
        launch: see `kvdock.interface.Descriptor.fix`.
        direct: for a call with all arguments: guard, number of the variant, entry, cache, epoch, generation, static values, launch, and
            numbers.
        bound: the same for a call that is bound to its pools, whose guard leaves them out.
    """

    entry: Entry[Any]
    launch: Callable[..., None] | None
    direct: tuple[Any, ...]
    bound: tuple[Any, ...]


class Recent(threading.local):
    """What the calling thread used last, of one op or of one op bound to its pools. A host int in place of a tensor goes apart.

    Args:
        own_name: the backend that a bound op uses for good, if any.
        is_bound: whether calls leave out the pools.
    """

    def __init__(self, own_name: str | None = None, is_bound: bool = False) -> None:
        self.own_name = own_name
        self.is_bound = is_bound
        self.fast0 = self.fast1 = _NO_CALL
        self.signature0: Signature = UNKNOWN
        self.signature1: Signature = UNKNOWN
        self.signatures: list[Signature] = []

    def adopt(self, fast: FastCall, group: int) -> None:
        """Try this first from now on."""
        parts = fast.bound if self.is_bound else fast.direct
        if group:
            self.fast1 = parts
        else:
            self.fast0 = parts


class Signature:
    """A static signature that a call was validated for, and the plans for it by alignment.

    Args:
        schema: the op.
        variant: the combination of ranks.
        key: what else tells calls apart: the backend asked for, which optional tensors are there, and static values.
        values: all arguments of a valid call.
        cache: the calling thread's descriptor cache for the device.
        epoch: `Chooser.epoch` for which it holds.
        generation: generation of the descriptor caches for which it holds.

    Attributes:
        guard: accepts the tensors of `Variant.dims` in a call of this signature.
        optional: checks the optional tensors that are there; None when there are none.
        full: the entry for tensors that are as aligned as their rows allow, which nearly all are.
        entries: the entries for others, by the alignment of each tensor.
        numbers: for each pool the bytes it spans, and for each other tensor its bytes per element and best alignment.
        apart: differences of addresses at which two pools lie interleaved, without sharing a byte.
        fast: by pattern of strides: a `FastCall`, or how often it was read so far.
    """

    __slots__ = (
        "_dims",
        "apart",
        "cache",
        "entries",
        "epoch",
        "fast",
        "full",
        "generation",
        "guard",
        "key",
        "numbers",
        "optional",
        "pools",
        "variant",
    )

    def __init__(
        self,
        schema: OpSchema,
        variant: Variant,
        key: tuple[Any, ...],
        values: tuple[Any, ...],
        cache: LRUDescriptorCache[Any],
        epoch: int,
        generation: int,
    ) -> None:
        args = schema.bind(values)
        self.variant, self.key, self.cache, self.epoch, self.generation = variant.number, key, cache, epoch, generation
        self.pools = [arg.name for arg in schema.static_args]
        self._dims = variant.dims
        self.guard = self._guard(args, list(variant.dims), self._free_strides)
        present = [arg for arg in schema.args if arg.optional and arg.role is Role.TENSOR and args[arg.name] is not None]
        self.optional = OptionalTensors(schema, present, args) if present else None
        self.full: Entry[Any] = EMPTY
        self.entries: dict[tuple[int, ...], Entry[Any]] = {}
        rest = [(name, args[name]) for name in variant.dims if name not in self.pools]
        self.numbers = [extent(args[name]) for name in self.pools]
        for name, tensor in rest:
            self.numbers += [tensor.element_size(), full_alignment(variant.dims[name], tensor)]
        self.apart: set[tuple[str, str, int]] = set()
        self.note_apart(schema, values)
        self.fast: dict[tuple[int, ...], FastCall | int] = {}

    def _guard(self, args: dict[str, Any], names: Sequence[str], strides: Callable[[str, torch.Tensor], list[int | None]]) -> Guard:
        tensors = [args[name] for name in names]
        sizes = [
            [None if dim.runtime else size for dim, size in zip(self._dims[name], tensor.shape, strict=True)]
            for name, tensor in zip(names, tensors, strict=True)
        ]
        return make_guard(tensors, sizes, [strides(name, tensor) for name, tensor in zip(names, tensors, strict=True)])

    def _free_strides(self, name: str, tensor: torch.Tensor) -> list[int | None]:
        """Return the strides that are static: all of a pool's, and the innermost of a row."""
        if name in self.pools:
            return list(tensor.stride())
        dims = self._dims[name]
        return _innermost(dims, tensor)

    def accepts(self, tensors: Sequence[torch.Tensor], values: tuple[Any, ...]) -> bool:
        """Whether a call has this signature, given its required tensors and all arguments."""
        return self.guard(*tensors) and (self.optional is None or self.optional.accept(values))

    def note_apart(self, schema: OpSchema, values: tuple[Any, ...]) -> None:
        """Remember of a call that was validated how its pools lie to one another: they share no byte."""
        places = [(arg.name, schema.bind(values)[arg.name].data_ptr()) for arg in schema.static_args if arg.role is Role.MUTATED]
        self.apart.update((a, b, b_at - a_at) for (a, a_at), (b, b_at) in itertools.combinations(places, 2))

    def is_due(self, strides: tuple[int, ...]) -> bool:
        """Count that a pattern of strides was read, and say whether it is worth settling now: the 32nd time, the 64th, ..."""
        count = self.fast.get(strides, 0)
        if isinstance(count, FastCall):  # of a plan that is gone
            count = 0
        elif not count and len(self.fast) >= MOST_PATTERNS:
            self.fast.clear()
        self.fast[strides] = count = count + 1
        return count >= FIRST_WORTH and not count & (count - 1)

    def settle(
        self, schema: OpSchema, entry: Entry[Any], strides: tuple[int, ...], numbers: tuple[int, ...], values: tuple[Any, ...]
    ) -> FastCall | None:
        """Make the `FastCall` of a call that has just been checked, if that says enough about the same strides at other sizes.

        Args:
            schema: the op.
            entry: the plan's.
            strides: all strides of its tensors but the pools'.
            numbers: what the code in `kvdock.ops.calls` makes of them.
            values: all arguments.
        """
        plan, args = entry.value, schema.bind(values)
        outputs = [args[arg.name] for arg in schema.mutated if arg.name not in self.pools]
        names = list(self._dims)
        steady = all(_keeps_alignment(dims, args[name]) for name, dims in self._dims.items())
        if plan is None or not steady or not all(_is_dense(output) for output in outputs):
            return None
        launch = plan.fix(values)
        rest = (self.variant, entry, self.cache, self.epoch, self.generation, self.key[2], launch, numbers)
        guards = (self._guard(args, which, self._all_strides) for which in (names, [name for name in names if name not in self.pools]))
        direct, bound = ((guard, *rest) for guard in guards)
        fast = self.fast[strides] = FastCall(entry, launch, direct, bound)
        return fast

    def _all_strides(self, name: str, tensor: torch.Tensor) -> list[int | None]:
        return list(tensor.stride())


def _keeps_alignment(dims: tuple[Dim, ...], tensor: torch.Tensor) -> bool:
    """Whether steps between rows are as aligned as rows. Those of a size of 1 do not count, and may be any, until it grows."""
    best = full_alignment(dims, tensor)
    return all(not dim.runtime or step * tensor.element_size() % best == 0 for dim, step in zip(dims, tensor.stride(), strict=True))


def _is_dense(output: torch.Tensor) -> bool:
    """Whether an output is dense at any first size: then its places never coincide."""
    return output.is_contiguous() and output.dim() > 0 and output.stride(0) * output.shape[0] == output.numel()


def _innermost(dims: tuple[Dim, ...], tensor: torch.Tensor) -> list[int | None]:
    """Return the strides that a tensor with run-time sizes may not change: the innermost of rows."""
    strides: list[int | None] = [None] * len(dims)
    if dims and not dims[-1].runtime:
        strides[-1] = tensor.stride(-1)
    return strides


def full_alignment(dims: tuple[Dim, ...], tensor: torch.Tensor) -> int:
    """Return the best alignment class that a tensor with run-time sizes can have: that of its rows, or of its elements."""
    size = tensor.element_size()
    return alignment_of([size if not dims or dims[-1].runtime else int(tensor.shape[-1]) * size])


class OptionalTensors:
    """The optional tensors that the calls of a signature have, read without code of their own: such calls take longer.

    Args:
        schema: the op.
        present: the arguments.
        args: all arguments of a valid call.
    """

    def __init__(self, schema: OpSchema, present: Sequence[Arg], args: dict[str, Any]) -> None:
        self._places = [schema.arg_names.index(arg.name) for arg in present]
        self._dims = [arg.dims_of_rank(args[arg.name].dim()) or () for arg in present]
        tensors = [args[arg.name] for arg in present]
        sizes = [
            [None if d.runtime else n for d, n in zip(dims, t.shape, strict=True)] for dims, t in zip(self._dims, tensors, strict=True)
        ]
        self._guard = make_guard(tensors, sizes, [_innermost(dims, t) for dims, t in zip(self._dims, tensors, strict=True)])

    def accept(self, values: tuple[Any, ...]) -> bool:
        """Whether they are like those of the signature."""
        return self._guard(*[values[place] for place in self._places])

    def read(self, values: tuple[Any, ...], sizes: dict[str, int], low: int, high: int) -> tuple[int, ...] | None:
        """Return their alignment, or None where sizes do not agree or one may lie in what is written, from ``low`` to ``high``."""
        classes = []
        for place, dims in zip(self._places, self._dims, strict=True):
            tensor = values[place]
            if any(dim.runtime and sizes.get(dim.name, n) != n for dim, n in zip(dims, tensor.shape, strict=True)):
                return None
            at, size = tensor.data_ptr(), tensor.element_size()
            if at < high and low < at + extent(tensor):
                return None
            steps = [step * size for n, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1]
            classes.append(alignment_of([at, full_alignment(dims, tensor), *steps]))
        return tuple(classes)


class _Unknown(Signature):
    """Accepts nothing: what a thread starts with."""

    def __init__(self) -> None:
        self.guard, self.key, self.epoch, self.generation = never, (), -1, -1


UNKNOWN = _Unknown()

assert MAX_ALIGNMENT == 16  # noqa: S101 - the code in `kvdock.ops.calls` compares with it
