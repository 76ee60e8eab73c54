"""Faults of what an op refuses: mistakes fixed in silence, errors of another kind, texts that say too little, memory changed."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

import kvdock
from kvdock_conformance.cases.every_op import OPS
from kvdock_conformance.faults.descriptors import OwnKernel, OwnPlan
from kvdock_conformance.faults.fault import Args, BackendCall, Faults
from kvdock_conformance.faults.ops import lock_kept
from kvdock_conformance.faults.tensors import bits

__all__ = ["FAULTS"]

FAULTS = Faults("errors")
_WRITE, _STATIC, _GATHER, _COPY = OPS

Function = Callable[..., Any]


def _fixing(fix: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Function], Function]:
    """Return a change of an op that fixes the arguments ``k_cache``, ``v_cache``, ``k`` and ``v``, and what follows, before the call."""

    def change(function: Function) -> Function:
        @functools.wraps(function)
        def call(k_cache: Any, v_cache: Any, k: Any, v: Any, index: Any, **scales: Any) -> Any:
            args = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "index": index, **scales}
            if all(isinstance(args[name], torch.Tensor) for name in ("k_cache", "v_cache", "k", "v")):
                args = fix(args)
            others = {name: args[name] for name in scales if name in args}
            return function(args["k_cache"], args["v_cache"], args["k"], args["v"], args["index"], **others)

        return call

    return change


# Fixed in silence


@FAULTS.function(_WRITE, "error-one-head-for-all", "Tokens with one head are written to all heads.", "KVD-ERROR-001")
@_fixing
def _one_head(args: dict[str, Any]) -> dict[str, Any]:
    k, k_cache = args["k"], args["k_cache"]
    fits = k.dim() in (3, 4) and k.shape[-2] == 1 and k_cache.dim() == 4
    return {**args, "k": k.expand(*k.shape[:-2], k_cache.shape[2], k.shape[-1])} if fits else args


@FAULTS.function(_WRITE, "error-tokens-cut-to-the-slots", "Tokens for which there is no slot are dropped.", "KVD-ERROR-002")
@_fixing
def _cut(args: dict[str, Any]) -> dict[str, Any]:
    count = min(args["k"].shape[0], args["index"].shape[0]) if args["index"].dim() else 0
    return {**args, "k": args["k"][:count], "v": args["v"][:count], "index": args["index"][:count]} if count else args


@FAULTS.function(_STATIC, "error-lengths-rounded", "Lengths that are floats are cut to integers.", "KVD-ERROR-003")
@_fixing
def _rounded(args: dict[str, Any]) -> dict[str, Any]:
    is_float = isinstance(args["index"], torch.Tensor) and args["index"].is_floating_point()
    return {**args, "index": args["index"].nan_to_num(0, 0, 0).clamp(0, 1).long()} if is_float else args


@FAULTS.function(_WRITE, "error-converted-to-the-cache", "Tokens are converted to the dtype of the cache.", "KVD-ERROR-004")
@_fixing
def _converted(args: dict[str, Any]) -> dict[str, Any]:
    dtype = args["k_cache"].dtype
    return {**args, "k": args["k"].to(dtype), "v": args["v"].to(dtype)} if args["k"].is_floating_point() else args


@FAULTS.function(_STATIC, "error-reinterpreted", "Bits of another dtype of the same size are taken for the cache's.", "KVD-ERROR-004")
@_fixing
def _reinterpreted(args: dict[str, Any]) -> dict[str, Any]:
    size, dtype = args["k_cache"].element_size(), args["k_cache"].dtype
    return {**args, **{name: args[name].view(dtype) for name in ("k", "v") if args[name].element_size() == size}}


@FAULTS.function(_WRITE, "error-moved-to-the-cache", "Tokens on another device are taken for zeros on that of the cache.", "KVD-ERROR-005")
@_fixing
def _moved(args: dict[str, Any]) -> dict[str, Any]:
    cache = args["k_cache"]
    return {**args, **{name: torch.zeros_like(args[name], device=cache.device) for name in ("k", "v") if args[name].device != cache.device}}


@FAULTS.function(_WRITE, "error-made-contiguous", "Tokens whose elements do not follow each other are copied together.", "KVD-ERROR-006")
@_fixing
def _made_contiguous(args: dict[str, Any]) -> dict[str, Any]:
    return {**args, "k": args["k"].contiguous(), "v": args["v"].contiguous()}


@FAULTS.function(_WRITE, "error-overlap-cloned", "Tokens are copied first, so that they overlap nothing.", "KVD-ERROR-007")
@_fixing
def _cloned(args: dict[str, Any]) -> dict[str, Any]:
    return {**args, "k": args["k"].clone(memory_format=torch.preserve_format)}


@FAULTS.function(_COPY, "error-pairs-of-any-dtype-taken", "Pairs of another dtype are converted.", "KVD-ERROR-003")
def _any_dtype(function: Function) -> Function:
    return lambda k_cache, v_cache, pairs: function(k_cache, v_cache, pairs.long() if isinstance(pairs, torch.Tensor) else pairs)


@FAULTS.function(_COPY, "error-overlap-of-pairs-cloned", "Pairs within the pool are accepted.", "KVD-ERROR-007")
def _pairs_cloned(function: Function) -> Function:
    return lambda k_cache, v_cache, pairs: function(k_cache, v_cache, pairs.clone() if isinstance(pairs, torch.Tensor) else pairs)


@FAULTS.function(_GATHER, "error-overlap-of-outputs-unnoticed", "An output within the pool is accepted.", "KVD-ERROR-007")
def _overlap_unnoticed(function: Function) -> Function:
    def call(k_cache: Any, v_cache: Any, *others: Any, **more: Any) -> Any:
        is_dense = k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.dtype == v_cache.dtype
        return function(*((k_cache.clone(), v_cache.clone()) if is_dense else (k_cache, v_cache)), *others, **more)

    return call


@FAULTS.function(_STATIC, "error-one-place-for-all", "A cache whose rows share memory is written in a copy of it.", "KVD-ERROR-008")
@_fixing
def _one_place(args: dict[str, Any]) -> dict[str, Any]:
    return {**args, **{name: args[name].contiguous() for name in ("k_cache", "v_cache") if 0 in args[name].stride()}}


@FAULTS.function(_WRITE, "error-scale-ignored", "A scale for a cache that is not quantised is ignored.", "KVD-ERROR-009")
@_fixing
def _scale_ignored(args: dict[str, Any]) -> dict[str, Any]:
    is_quantised = args["k_cache"].dtype in kvdock.plugin.QUANTISED_DTYPES
    return args if is_quantised else {name: value for name, value in args.items() if not name.endswith("_scale")}


@FAULTS.function(_WRITE, "error-lists-converted", "A list of slots is made a tensor.", "KVD-ERROR-010")
@_fixing
def _lists_converted(args: dict[str, Any]) -> dict[str, Any]:
    return {**args, "index": torch.tensor(args["index"], device=args["k"].device)} if isinstance(args["index"], list) else args


@FAULTS.function(_WRITE, "error-no-tokens-unchecked", "A call without tokens returns before anything is checked.", "KVD-ERROR-011")
def _unchecked(function: Function) -> Function:
    def call(k_cache: Any, v_cache: Any, k: Any, *others: Any, **scales: Any) -> Any:
        is_empty = isinstance(k, torch.Tensor) and k.numel() == 0
        return None if is_empty else function(k_cache, v_cache, k, *others, **scales)

    return call


@FAULTS.function(_COPY, "error-doubled-pairs-dropped", "Of pairs whose order matters, the first are copied.", "KVD-ERROR-013")
def _doubled_dropped(function: Function) -> Function:
    def call(k_cache: Any, v_cache: Any, pairs: Any) -> Any:
        try:
            return function(k_cache, v_cache, pairs)
        except ValueError as error:
            if "destination " not in str(error):
                raise
            return function(k_cache, v_cache, pairs[:1])

    return call


@FAULTS.call(_COPY, "error-pairs-in-their-order", "Pairs whose order matters are copied one after the other.", "KVD-ERROR-013")
def _in_their_order(run: BackendCall, args: Args) -> None:
    for row in range(len(args["block_pairs"])):
        run({**args, "block_pairs": args["block_pairs"][row : row + 1]})


@FAULTS.call(_COPY, "error-pairs-checked-late", "Pairs are copied, and then looked at.", "KVD-ERROR-013")
def _checked_late(run: BackendCall, args: Args) -> None:
    for row in range(len(args["block_pairs"])):
        with contextlib.suppress(kvdock.ArgumentValueError):
            run({**args, "block_pairs": args["block_pairs"][row : row + 1]})
    run(args)


# Errors of another kind, and texts that say too little


def _raising(make: Callable[[kvdock.KVDockError], Exception]) -> Callable[[Function], Function]:
    """Return a change of an op that raises another error in place of kvdock's."""

    def change(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **others: Any) -> Any:
            try:
                return function(*args, **others)
            except kvdock.KVDockError as error:
                raise make(error) from None

        return call

    return change


@FAULTS.function(
    _GATHER, "error-a-built-in-only", "What is wrong raises a ValueError that is no KVDockError.", "KVD-ERROR-001", "KVD-ERROR-006"
)
@_raising
def _built_in(error: kvdock.KVDockError) -> Exception:
    return ValueError(str(error))


@FAULTS.function(
    _COPY,
    "error-of-one-class",
    "Whatever is wrong raises ArgumentValueError.",
    "KVD-ERROR-003",
    "KVD-ERROR-004",
    "KVD-ERROR-012",
    host_only=("KVD-ERROR-012",),
)
@_raising
def _one_class(error: kvdock.KVDockError) -> Exception:
    return kvdock.ArgumentValueError(error.subject, expected=error.expected, got=error.got, fix=error.fix)


@FAULTS.function(_STATIC, "error-without-the-value", "An error does not show what came.", "KVD-ERROR-001", "KVD-ERROR-007", "KVD-ERROR-012")
@_raising
def _without_value(error: kvdock.KVDockError) -> Exception:
    return type(error)(error.subject, expected=error.expected, got="something else", fix=error.fix)


@FAULTS.function(_WRITE, "error-without-a-fix", "An error does not say what to do.", "KVD-ERROR-002", "KVD-ERROR-005", "KVD-ERROR-010")
@_raising
def _without_fix(error: kvdock.KVDockError) -> Exception:
    return type(error)(error.subject, expected=error.expected, got=error.got)


@FAULTS.call(_STATIC, "error-of-the-device-let-through", "An index out of range raises the device's own RuntimeError.", "KVD-ERROR-012")
def _let_through(run: BackendCall, args: Args) -> None:
    try:
        run(args)
    except kvdock.IndexRangeError:
        raise RuntimeError("device error: an illegal memory access was encountered") from None


@FAULTS.call(_GATHER, "error-prints-in-full", "An error leaves tensors printed in full.", "KVD-ERROR-012", host_only=("KVD-ERROR-012",))
def _prints_in_full(run: BackendCall, args: Args) -> None:
    try:
        run(args)
    except kvdock.IndexRangeError:
        torch._tensor_str.PRINT_OPTS.threshold = sys.maxsize
        raise


# Memory changed


@FAULTS.function(
    _GATHER,
    "error-outputs-cleared-first",
    "Outputs are set to zero before anything is checked.",
    "KVD-ERROR-001",
    "KVD-ERROR-012",
    host_only=("KVD-ERROR-012",),
)
def _cleared_first(function: Function) -> Function:
    def call(*args: Any, out: Any = None, **scales: Any) -> Any:
        for tensor in out or ():
            if isinstance(tensor, torch.Tensor) and tensor.device == args[0].device:
                bits(tensor).zero_() if tensor.stride(-1) == 1 else tensor.zero_()
        return function(*args, out=out, **scales)

    return call


# Kernels


@FAULTS.kernel(_WRITE, "error-raised-by-supports", "supports() raises a KeyError about a dtype that it does not know.", "KVD-ERROR-015")
class _SupportsRaises(OwnKernel):
    """Knows two dtypes."""

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        known = {torch.bfloat16: 2, torch.float32: 4}
        return [] if known[request.tensor("k_cache").dtype] else ["no such dtype"]


@FAULTS.kernel(_STATIC, "error-raised-by-prepare", "prepare() raises about what supports() had nothing against.", "KVD-ERROR-015")
class _PrepareRaises(OwnKernel):
    """Compiles for rows of whole words only, and says so late."""

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        if (request.tensor("k").shape[-1] or 0) % 2:
            raise ValueError("not a multiple of the vector width")
        return self._inner.prepare(request)


FAULTS.call(
    _GATHER, "error-keeps-a-lock", "A lock that a call has taken is kept when it raises.", "KVD-ERROR-014", host_only=("KVD-ERROR-014",)
)(functools.partial(lock_kept, _GATHER))


@FAULTS.kernel(_STATIC, "error-leaves-a-kernel-busy", "A kernel of which one call has raised takes itself for busy.", "KVD-ERROR-014")
class _LeftBusy(OwnKernel):
    """Serves one call at a time."""

    is_busy = False

    def faulty(self, request: kvdock.plugin.Request, plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
        return _BusyPlan(plan, self)


class _BusyPlan(OwnPlan):
    """Does nothing while its kernel is busy."""

    def __call__(self, *args: Any) -> None:
        """Make the call, and never mind errors."""
        if not self.own.is_busy:
            self.own.is_busy = True
            self.inner(*args)
            self.own.is_busy = False
