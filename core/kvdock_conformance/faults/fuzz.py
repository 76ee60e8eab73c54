"""Faults where two properties meet, which random calls find."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from kvdock_conformance.cases.attention import OP as ATTENTION
from kvdock_conformance.cases.every_op import OPS
from kvdock_conformance.faults.fault import Args, BackendCall, Faults, FaultyCall
from kvdock_conformance.faults.repeats import Rebuilt
from kvdock_conformance.faults.tensors import restrided, store

__all__ = ["FAULTS"]

FAULTS = Faults("fuzz")
_WRITE, _STATIC, _GATHER, _COPY = OPS


@FAULTS.call(_WRITE, "fuzz-float32-taken-for-dense", "Pools of float32 are written as if they were dense.", "KVD-FUZZ-001")
def _taken_for_dense(run: BackendCall, args: Args) -> None:
    if args["k_cache"].dtype == torch.float32:  # not by a changed view: a plan may have the strides that it was made with
        for pool, rows in ((args["k_cache"], args["k"]), (args["v_cache"], args["v"])):
            store(restrided(pool, torch.empty(pool.shape, device="meta").stride()), rows, args)
    else:
        run(args)


@FAULTS.call(_GATHER, "fuzz-int32-slots-in-few-rows", "Of slots of 32 bits in rows, the last row is left out.", "KVD-FUZZ-001")
def _few_rows(run: BackendCall, args: Args) -> None:
    if args["slot_mapping"].dtype == torch.int32 and args["slot_mapping"].dim() == 2 and len(args["slot_mapping"]) > 1:
        args = {**args, **{name: args[name][:-1] for name in ("slot_mapping", "k_out", "v_out")}}
    run(args)


def _known_by_version(name: str) -> FaultyCall:
    """Return a call that takes an argument's values for those that it has kept, where neither tensor nor version is another."""
    kept: list[tuple[Any, int, torch.Tensor]] = []

    def call(run: BackendCall, args: Args) -> None:
        given = args[name]
        if not isinstance(given, torch.Tensor) or given.is_inference():
            return run(args)
        if not (kept and kept[0][0]() is given and kept[0][1] == given._version):
            kept[:] = [(weakref.ref(given), given._version, given.clone())]
        return run({**args, name: kept[0][2]})

    return call


FAULTS.call(_COPY, "fuzz-pairs-known-by-version", "Pairs are read again where their version has changed.", "KVD-FUZZ-001")(
    _known_by_version("block_pairs")
)
FAULTS.call(_WRITE, "fuzz-values-known-by-version", "Values are read again where their version has changed.", "KVD-FUZZ-001")(
    _known_by_version("v")
)


@FAULTS.call(_STATIC, "fuzz-an-int-counts-on", "A length that is an int is taken for the one behind the last call's.", "KVD-FUZZ-001")
def _counts_on(run: BackendCall, args: Args) -> None:
    length, new, room = args["cache_lengths"], args["k"].shape[2], args["k_cache"].shape[2]
    if isinstance(length, int):
        next_one = _NEXT.get(args["k_cache"].data_ptr(), 0)
        length = next_one if length and 0 < next_one <= room - new else length
        _NEXT[args["k_cache"].data_ptr()] = length + new
    run({**args, "cache_lengths": length})


_NEXT: dict[int, int] = {}


@FAULTS.call(_GATHER, "fuzz-main-thread-only", "Gathers of eight slots and more raise in any thread but the main one.", "KVD-FUZZ-001")
def _main_thread_only(run: BackendCall, args: Args) -> None:
    if args["slot_mapping"].numel() >= 8 and threading.current_thread() is not threading.main_thread():
        raise ValueError("signal only works in main thread of the main interpreter")
    run(args)


@FAULTS.plan(ATTENTION, "fuzz-contexts-never-shrink", "A context is as long as in the call before, where it was longer.", "KVD-FUZZ-001")
def _never_shrink() -> FaultyCall:
    before: list[torch.Tensor] = []

    def call(run: BackendCall, args: Args) -> None:
        lens = args["seq_lens"]
        longer = torch.maximum(lens, before[0]) if before and before[0].shape == lens.shape else lens
        before[:] = [lens.clone()]
        run({**args, "seq_lens": longer})

    return call


@FAULTS.planned(_GATHER, "fuzz-values-behind-keys", "Values that lay behind keys are put there again.", "KVD-FUZZ-001", by_address=True)
class _BehindKeys(Rebuilt):
    """Repeats a call on the address of keys, if the first had both in one tensor."""

    def fix(self, *args: Any) -> Callable[..., None]:
        fixed, (k_out, v_out) = super().fix(*args), args[3:5]
        step = v_out.data_ptr() - k_out.data_ptr()
        if k_out.shape != v_out.shape or step != k_out.numel() * k_out.element_size():
            return fixed
        return lambda *values: fixed(*values[:4], values[3] + step, *values[5:])
