"""Faults where two properties meet, which random calls find."""

from __future__ import annotations

import torch

from kvdock_conformance.cases.every_op import OPS
from kvdock_conformance.faults.fault import Args, BackendCall, Faults
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
