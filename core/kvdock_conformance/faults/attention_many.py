"""Faults of `paged_attention` with many sequences, many heads, and groups of no power of two."""

from __future__ import annotations

from kvdock_conformance.cases.attention import OP
from kvdock_conformance.faults.fault import Args, BackendCall, Faults
from kvdock_conformance.faults.tensors import bits

__all__ = ["FAULTS"]

FAULTS = Faults()


def _group(args: Args) -> int:
    """Return of how many query heads a group has; 0 where that is a power of two, few, or the only group."""
    heads, of_cache = args["q"].shape[1], args["k_cache"].shape[2]
    group = int(heads // max(of_cache, 1))
    return group if of_cache > 1 and group > 4 and group & (group - 1) else 0


@FAULTS.call(
    OP,
    "attn-last-head-of-odd-groups",
    "In groups of no power of two, with a window and starts, the last head is one before.",
    "KVD-ATTN-001",
)
def _last_head(run: BackendCall, args: Args) -> None:
    run(args)
    if (group := _group(args)) and args["window"] is not None and args["starts"] is not None:
        args["out"][:, 2 * group - 1] = args["out"][:, 2 * group - 2]


@FAULTS.call(
    OP,
    "attn-lengths-of-later-sequences-not-checked",
    "Behind eight sequences, one whose length is negative is padding.",
    "KVD-ATTN-005",
    host_only=("KVD-ATTN-005",),
)
def _later_lengths(run: BackendCall, args: Args) -> None:
    lens = args["seq_lens"]
    is_about = len(lens) > 8 and bool((lens[:8] >= 0).all())
    run({**args, "seq_lens": lens.clamp(min=0), "starts": None} if is_about and bool((lens < 0).any()) else args)


@FAULTS.call(OP, "attn-many-chunks-in-other-bits", "Of more than 16 chunks, elements have another last bit.", "KVD-ATTN-009")
def _in_other_bits(run: BackendCall, args: Args) -> None:
    run(args)
    if args["cu_query_lens"] is not None and len(args["seq_lens"]) > 16:
        bits(args["out"]).bitwise_xor_(1)


@FAULTS.call(OP, "attn-heads-of-many-queries-left", "What is behind 65,535 heads of queries is zeros.", "KVD-ATTN-013")
def _heads_of_many(run: BackendCall, args: Args) -> None:
    run(args)
    if (heads := args["q"].shape[1]) and args["q"].shape[0] * heads > 2**16 - 1:
        args["out"][(2**16 - 1) // heads :] = 0
