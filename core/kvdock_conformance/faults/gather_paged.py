"""Faults of ``gather_paged`` alone. Those that writes and copies have too are in `families`, those of results in `gather_results`."""

from __future__ import annotations

import torch

from kvdock_conformance.faults.fault import Args, BackendCall, Faults, FaultyCall
from kvdock_conformance.faults.moves import GATHER
from kvdock_conformance.faults.tensors import bits, in_range

__all__ = ["FAULTS"]

FAULTS = Faults()
_OP = GATHER.op


def _as_padding(run: BackendCall, args: Args, taken: torch.Tensor) -> None:
    run({**args, "slot_mapping": torch.where(taken, -1, args["slot_mapping"])})


@FAULTS.call(_OP, "gather-padding-left-as-it-was", "The rows of padding keep what the outputs held.", "KVD-GATHER-003", "KVD-GATHER-023")
def _padding_left(run: BackendCall, args: Args) -> None:
    padding, written = args["slot_mapping"] < 0, GATHER.written(args)
    kept = [rows[padding] for rows in written]
    run(args)
    for rows, before in zip(written, kept, strict=True):
        rows[padding] = ~before  # inverted: a new tensor may happen to be zeros


@FAULTS.call(_OP, "gather-padding-clears-the-gap-too", "Where a token is padding, what lies behind its heads is cleared.", "KVD-GATHER-002")
def _gap_cleared(run: BackendCall, args: Args) -> None:
    run(args)
    out = args["k_out"]
    gap = min((out.stride(i) for i in range(out.dim() - 1) if out.shape[i] > 1), default=out.shape[-1])
    if gap > out.shape[-1]:
        wide = out.as_strided((*out.shape[:-1], out.shape[-1] + 1), out.stride())
        wide[args["slot_mapping"] < 0] = 0


@FAULTS.call(_OP, "gather-first-row-of-a-batch", "Of a batch of rows, the first is read.", "KVD-GATHER-007")
def _first_row(run: BackendCall, args: Args) -> None:
    is_batch = args["slot_mapping"].dim() == 2
    GATHER.dropping(run, args, lambda places: (places.to[0] > 0) & is_batch)


@FAULTS.call(_OP, "gather-repeated-slots-once", "A slot that occurs again reads as zeros.", "KVD-GATHER-009")
def _repeated_once(run: BackendCall, args: Args) -> None:
    flat = args["slot_mapping"].reshape(-1)
    again = (flat[:, None] == flat[None, :]).tril(-1).any(1) if len(flat) < 1000 else torch.zeros_like(flat, dtype=torch.bool)
    _as_padding(run, args, again.reshape(args["slot_mapping"].shape) & in_range(args))


# Expanded pools


@FAULTS.call(_OP, "gather-expanded-blocks-beyond-the-first", "Of a pool whose blocks are one, the first block is read.", "KVD-GATHER-022")
def _expanded_blocks(run: BackendCall, args: Args) -> None:
    is_expanded = any(args[cache].stride(0) == 0 for cache, _ in GATHER.pairs)
    _as_padding(run, args, (args["slot_mapping"] >= args["k_cache"].shape[1]) & in_range(args) & is_expanded)


@FAULTS.call(_OP, "gather-expanded-slots-as-rows", "A slot stride of 0 is taken for the length of a row.", "KVD-GATHER-022")
def _expanded_slots(run: BackendCall, args: Args) -> None:
    def longer(name: str, pool: torch.Tensor) -> torch.Tensor:
        blocks, slots = pool.shape[:2]
        if not name.endswith("_cache") or pool.stride(1) or slots == 1 or pool.stride(0) == 0:
            return pool
        place = torch.arange(blocks * slots, device=pool.device).reshape(blocks, slots) % blocks
        return pool[place, 0]  # the row that lies so many behind, as long as there is one

    GATHER.again(run, args, longer)


# Repeated calls


@FAULTS.plan(_OP, "gather-padding-remembered", "Once a plan has seen padding at a position, it stays padding.", "KVD-GATHER-026")
def _padding_remembered() -> FaultyCall:
    seen: dict[torch.Size, torch.Tensor] = {}

    def call(run: BackendCall, args: Args) -> None:
        slots = args["slot_mapping"]
        seen[slots.shape] = seen.get(slots.shape, torch.zeros_like(slots, dtype=torch.bool)) | (slots < 0)
        _as_padding(run, args, seen[slots.shape])

    return call


@FAULTS.call(_OP, "gather-zeros-of-one-slot-once", "Of a slot mapping with a step of 0, zeros are written once.", "KVD-GATHER-006")
def _zeros_once(run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"]
    is_about = slots.numel() > 1 and not any(slots.stride()) and bool((slots < 0).all())
    run(args)
    if is_about:
        bits(args["v_out"])[(0,) * (slots.dim() - 1)][1:] = 5


@FAULTS.call(
    _OP, "gather-rest-of-rows-left", "Of rows of a batch, tokens behind whole 32 are read of the first row alone.", "KVD-GATHER-007"
)
def _rest_of_rows(run: BackendCall, args: Args) -> None:
    whole = args["slot_mapping"].shape[-1] // 32 * 32
    before = {name: bits(args[name])[1:, whole:].clone() for name in ("k_out", "v_out") if args["slot_mapping"].dim() == 2 and whole}
    run(args)
    for name, rest in before.items():
        bits(args[name])[1:, whole:] = rest
