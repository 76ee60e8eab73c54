"""Faults of ``paged_caching_`` alone. Those that reads and copies have too are in `families`, those of scales in `scales`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import kvdock
from kvdock.plugin import Descriptor, Kernel, Request
from kvdock_conformance.faults.fault import Args, BackendCall, Faults
from kvdock_conformance.faults.moves import WRITE
from kvdock_conformance.faults.tensors import capacity, in_range, restrided, store

__all__ = ["FAULTS"]

FAULTS = Faults()
_OP = WRITE.op


@FAULTS.call(_OP, "write-first-row-of-a-batch", "Of a batch of rows, the first is written.", "KVD-WRITE-007")
def _first_row(run: BackendCall, args: Args) -> None:
    is_batch = args["slot_mapping"].dim() == 2
    WRITE.dropping(run, args, lambda places: (places.source[0] > 0) & is_batch)


@FAULTS.call(_OP, "write-equal-slots-dropped", "A slot that occurs twice is not written.", "KVD-WRITE-009")
def _equal_slots_dropped(run: BackendCall, args: Args) -> None:
    _, inverse, counts = torch.unique(args["slot_mapping"], return_inverse=True, return_counts=True)
    run({**args, "slot_mapping": torch.where((counts > 1)[inverse] & in_range(args), -1, args["slot_mapping"])})


@FAULTS.call(_OP, "write-equal-slots-shift-the-rows", "Equal slots are written once, by rows in the order of slots.", "KVD-WRITE-009")
def _shifted(run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"]
    distinct = torch.unique(slots[in_range(args)])
    if int(in_range(args).sum()) == distinct.numel() or not bool((slots < capacity(args)).all()):
        run(args)
        return
    k, v = (args[name].flatten(0, slots.dim() - 1)[: len(distinct)] for name in ("k", "v"))
    run({**args, "k": k, "v": v, "slot_mapping": distinct})


@FAULTS.call(_OP, "write-head-stride-of-tokens-ignored", "Heads of a token are taken to follow each other without a gap.", "KVD-WRITE-018")
def _head_stride_ignored(run: BackendCall, args: Args) -> None:
    def close(name: str, rows: torch.Tensor) -> torch.Tensor:
        is_wide = not name.endswith("_cache") and rows.stride(-2) > rows.shape[-1]
        return restrided(rows, (*rows.stride()[:-2], rows.shape[-1], 1)) if is_wide else rows

    WRITE.again(run, args, close)


@FAULTS.call(_OP, "write-tokens-beside-the-pool-refused", "Tokens in one storage with their pool are refused.", "KVD-WRITE-017")
def _beside(run: BackendCall, args: Args) -> None:
    for rows, cache in WRITE.pairs:
        if args[cache].untyped_storage().data_ptr() == args[rows].untyped_storage().data_ptr():
            raise kvdock.ArgumentValueError(f"{_OP}: {rows}", expected="memory of its own", got=f"that of {cache}", fix="copy it")
    run(args)


@FAULTS.kernel(_OP, "write-stale-plan-after-a-stride-change", "A plan is found by shapes alone, whatever the strides.", "KVD-WRITE-024")
class _StalePlan(Kernel):
    """Keeps the first pool's strides for each shape."""

    def __init__(self, inner: Kernel) -> None:
        self._inner = inner
        self._strides: dict[Any, Any] = {}

    def supports(self, request: Request) -> Sequence[str]:
        return self._inner.supports(request)

    def prepare(self, request: Request) -> Descriptor:
        """Return the plan of the first request with these shapes."""
        k_cache = request.tensor("k_cache")
        first = self._strides.setdefault((k_cache.shape, k_cache.dtype), k_cache.strides)
        return self._inner.prepare(request) if first == k_cache.strides else _OldStrides(first or ())


class _OldStrides(Descriptor):
    """Writes keys by strides that were those of another pool."""

    def __init__(self, strides: Sequence[int]) -> None:
        self._strides = strides

    def __call__(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, *scales: Any
    ) -> None:
        args = {"k_cache": k_cache, "slot_mapping": slots}
        store(restrided(k_cache, self._strides), k, args)
        store(v_cache, v, args)
