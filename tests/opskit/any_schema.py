"""Ops of every shape of schema, and one kernel that computes something for each of them, by tensors or by address alone."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import kvdock
from kvdock.ops.dispatcher import OpDispatcher
from kvdock.ops.entry import OpEntry
from kvdock.ops.schema import Arg, OpSchema, Relation, Role
from opskit.kernels import CountingKernel, runtime_of
from opskit.memory import Copy
from support_plugins import InProcessBackend

__all__ = ["SCHEMAS", "AnyKernel", "expect", "op_of"]

F32, I32, I64 = torch.float32, torch.int32, torch.int64
FLOATS, INDICES = (F32,), (I64, I32)
READ, WRITTEN, INT, STATIC = Role.TENSOR, Role.MUTATED, Role.RUNTIME_INT, Role.STATIC

_EACH = (
    OpSchema("no_pool_", (Arg("x", READ, ("*n D",), FLOATS), Arg("y", WRITTEN, ("*n D",), FLOATS))),
    OpSchema(
        "nothing_written", (Arg("table", READ, ("R D",), FLOATS), Arg("x", READ, ("*n D",), FLOATS), Arg("slots", READ, ("*n",), INDICES))
    ),
    OpSchema("pool_only_", (Arg("value", STATIC), Arg("pool", WRITTEN, ("R D",), FLOATS))),
    OpSchema("pools_only_", (Arg("source", READ, ("R D",), FLOATS), Arg("target", WRITTEN, ("R D",), FLOATS, same_dtype="source"))),
    OpSchema(
        "three_written_",
        (
            Arg("slots", READ, ("...",), INDICES),
            Arg("a", WRITTEN, ("R D",), FLOATS),
            Arg("b", WRITTEN, ("R E",), FLOATS),
            Arg("c", WRITTEN, ("R",), FLOATS),
            Arg("x", READ, ("... D",), FLOATS),
        ),
    ),
    OpSchema(
        "latents_",
        (
            Arg("pool", WRITTEN, ("NB block W",), FLOATS),
            Arg("kv_c", READ, ("*T C",), FLOATS),
            Arg("k_pe", READ, ("*T P",), FLOATS),
            Arg("slots", READ, ("*T",), INDICES),
            Arg("eps", READ, ("", "*T"), FLOATS, optional=True),
        ),
        (
            Relation("C+P <= W", "k_pe", "at most {W} elements with kv_c", "make the cache wider"),
            Relation("T<=C", "kv_c", "few rows", "less"),
        ),
    ),
    OpSchema(
        "swap_",
        (
            Arg("pairs", READ, ("*N 2",), INDICES, host=True),
            Arg("source", READ, ("NB block D",), FLOATS),
            Arg("target", WRITTEN, ("MB block D",), FLOATS, same_dtype="source"),
        ),
    ),
    OpSchema(
        "attend",
        (
            Arg("scale", STATIC),
            Arg("window", INT),
            Arg("q", READ, ("... H D",), FLOATS),
            Arg("pool", READ, ("NB block K D",), FLOATS),
            Arg("slopes", READ, ("H",), FLOATS, optional=True),
            Arg("lse", WRITTEN, ("... H",), FLOATS, optional=True),
            Arg("out", WRITTEN, ("... H D",), FLOATS, same_dtype="q", returned=True),
        ),
    ),
    OpSchema(
        "norm",
        (
            Arg("x", READ, ("... D",), FLOATS),
            Arg("weight", READ, ("D",), FLOATS),
            Arg("eps", STATIC),
            Arg("y", WRITTEN, ("... D",), FLOATS, same_dtype="x", returned=True),
        ),
    ),
    OpSchema(
        "pick",
        (
            Arg("table", READ, ("*m D",), FLOATS),
            Arg("slots", READ, ("...",), INDICES),
            Arg("rows", WRITTEN, ("... D",), FLOATS, same_dtype="table", returned=True),
            Arg("found", WRITTEN, ("...",), FLOATS, same_dtype="table", returned=True),
        ),
    ),
    OpSchema(
        "rotate_",
        (
            Arg("x", WRITTEN, ("*n D",), FLOATS),
            Arg("cos", READ, ("*m E",), FLOATS, optional=True),
            Arg("sin", READ, ("*m E",), FLOATS, optional=True),
            Arg("bias", READ, ("G D",), FLOATS, optional=True),
            Arg("shift", READ, ("*n D",), FLOATS, optional=True),
        ),
        (Relation("m <= n", "cos", "at most {n} rows", "pass fewer"),),
    ),
    OpSchema(
        "ints_",
        (
            Arg("start", INT),
            Arg("pool", WRITTEN, ("R D",), FLOATS),
            Arg("x", READ, ("*n D",), FLOATS),
            Arg("length", INT, ("", "*k"), INDICES),
            Arg("stop", INT),
        ),
        (Relation("k == 1 or k == n", "length", "one, or {n}", "pass so many"),),
    ),
    OpSchema(
        "two_ints_",
        (Arg("pool", WRITTEN, ("R D",), FLOATS), Arg("first", INT, ("",), INDICES), Arg("second", INT, ("", "*k"), INDICES)),
    ),
)
SCHEMAS: Mapping[str, OpSchema] = {schema.name: schema for schema in _EACH}
"""Without written tensors, and with one, two and three; without pools, and with one, two and three; and so on. By name."""


def number(value: Any) -> int:
    """Return a number for a static value, which tells 1 from 1.0 and True."""
    return zlib.crc32(f"{type(value).__name__} {value!r}".encode()) % 97


def total(values: Sequence[tuple[Any, bool]]) -> float:
    """Return a sum in which each value counts differently. A tensor's elements count by their place. True marks what is static."""
    found = 0.0
    for place, (value, is_static) in enumerate(values, 1):
        if isinstance(value, torch.Tensor):
            weights = torch.arange(1, value.numel() + 1, dtype=torch.float64).view(value.shape)
            found += place * float((value.double() * weights).sum())
        else:
            found += place * (number(value) if is_static or value is None else value)
    return found % 4093


def compute(schema: OpSchema, args: Mapping[str, Any]) -> float:
    """Do what each of these ops does: fill each output with the sum of all inputs, and add it to each pool. Return it."""
    pools = {arg.name for arg in schema.static_args}
    found = total([(args[arg.name], arg.role is STATIC) for arg in schema.args if arg.role is not WRITTEN])
    for place, arg in enumerate(schema.mutated, 1):
        if args[arg.name] is not None:
            args[arg.name].copy_(place * found + (args[arg.name] if arg.name in pools else 0))
    return found


def expect(schema: OpSchema, args: Mapping[str, Any], copy: Copy) -> dict[str, torch.Tensor]:
    """Compute on copies of what lies in a copy of the memory, and return what is written."""
    twins = {name: value.clone() if isinstance(value := copy.twin(arg), torch.Tensor) else value for name, arg in args.items()}
    compute(schema, twins)
    return {arg.name: twins[arg.name] for arg in schema.mutated if args[arg.name] is not None}


class _Computing(kvdock.plugin.Descriptor):
    """Computes with the static values that it was prepared for. Where it may settle calls, those have addresses only."""

    uses_autograd = False

    def __init__(self, schema: OpSchema, request: kvdock.plugin.Request, kernel: AnyKernel) -> None:
        self._schema, self._request, self._kernel = schema, request, kernel
        self._static = {arg.name: request.args[arg.name] for arg in schema.args if arg.role is STATIC}

    def __call__(self, *values: Any) -> None:
        self._kernel.found.append(compute(self._schema, self._schema.bind(values) | self._static))
        self._kernel.calls += 1

    def fix(self, *values: Any) -> Callable[..., None] | None:
        if not self._kernel.fixes:
            return None
        self._kernel.fixed += 1
        args = self._schema.bind(values)
        required = [arg for arg in self._schema.args if isinstance(args[arg.name], torch.Tensor)]
        layouts = {arg.name: (arg.dims_of_rank(args[arg.name].dim()), args[arg.name]) for arg in required}
        pools = {arg.name for arg in self._schema.static_args}
        words = list(dict.fromkeys(d.name for name, (dims, _) in layouts.items() if name not in pools for d in dims or () if d.runtime))
        ints = [arg.name for arg in self._schema.args if arg.role is INT and arg.name not in layouts]

        def launch(*numbers: int) -> None:
            addresses, sizes, rest = numbers[: len(layouts)], numbers[len(layouts) :][: len(words)], numbers[len(layouts) + len(words) :]
            known = dict(zip(words, sizes, strict=True))
            tensors = {}
            for (name, (dims, like)), at in zip(layouts.items(), addresses, strict=True):
                shape = [known[d.name] if d.runtime else n for d, n in zip(dims or (), like.shape, strict=True)]
                tensors[name] = _tensor_at(at, like, shape)
            self._kernel.launches += 1
            self._kernel.found.append(compute(self._schema, args | tensors | dict(zip(ints, rest, strict=True)) | self._static))

        return launch


def _tensor_at(at: int, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor at an address of host memory, with another's dtype and strides."""
    kind = {F32: "<f4", I32: "<i4", I64: "<i8"}[like.dtype]
    steps = tuple(step * like.element_size() for step in like.stride())
    described = {"data": (at, False), "typestr": kind, "version": 3, "shape": tuple(shape), "strides": steps}
    return torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=described)))


class AnyKernel(kvdock.plugin.Kernel):
    """A kernel for these schemas.

    Args:
        schema: the op.
        fixes: whether its descriptors settle calls.

    Attributes:
        found: what was computed, call by call.
        calls, fixed, launches: how often a descriptor was called, settled a call, and was called by address.
    """

    def __init__(self, schema: OpSchema, *, fixes: bool = True) -> None:
        self.schema, self.fixes = schema, fixes
        self.found: list[float] = []
        self.calls = self.fixed = self.launches = 0

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        return ()

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        return _Computing(self.schema, request, self)


def op_of(
    schema: OpSchema, *, fixes: bool = True, dtypes: tuple[torch.dtype, ...] | None = None
) -> tuple[OpEntry, AnyKernel, CountingKernel]:
    """Return an op of a dispatcher of its own, its kernel, and what counts plans and holds tensors against requests.

    What counts is in front of the kernel only where its descriptors do not settle calls.
    """
    kernel = AnyKernel(schema, fixes=fixes)
    counting = CountingKernel(kernel)

    class Backend(InProcessBackend):
        def capabilities(self) -> kvdock.plugin.Capabilities:
            return kvdock.plugin.Capabilities(dtypes=dtypes)

    backend = Backend("any", claims=("cpu",), devices=("cpu",), kernels={schema.name: kernel if fixes else counting})
    runtime = runtime_of(backend, ops=[schema.name])
    return OpDispatcher(runtime.registry, {schema.name: schema}).op(schema.name), kernel, counting
