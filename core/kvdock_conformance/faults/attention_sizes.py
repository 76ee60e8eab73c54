"""Faults of `paged_attention` with many sequences or blocks, long rows, wide windows, and values in the rows of keys; and of its checks."""

from __future__ import annotations

import itertools
import math

import torch

from kvdock_conformance.cases.attention import OP
from kvdock_conformance.faults.fault import Fault, Faults, FaultyCall, KernelSeed
from kvdock_conformance.faults.seeds import Args, BackendCall, FaultyKernel, TwistedKernel

__all__ = ["FAULTS"]

FAULTS = Faults()


@FAULTS.call(OP, "attn-sequences-behind-1024-left", "Sequences behind the 1,024th get zeros.", "KVD-ATTN-011")
def _behind_1024(run: BackendCall, args: Args) -> None:
    run(args)
    sums = args["cu_query_lens"]
    args["out"][1024 if sums is None else int(sums[:1025][-1]) :] = 0


@FAULTS.call(OP, "attn-block-ids-of-16-bits", "Block ids have 16 bits.", "KVD-ATTN-011")
def _of_16_bits(run: BackendCall, args: Args) -> None:
    table = args["block_table"]
    is_block = (table >= 0) & (table < len(args["k_cache"]))
    run({**args, "block_table": torch.where(is_block, table & 0xFFFF, table)})


@FAULTS.call(OP, "attn-keys-behind-65536-left", "Keys behind the 65,536th are left.", "KVD-ATTN-011")
def _behind_65536(run: BackendCall, args: Args) -> None:
    run({**args, "seq_lens": args["seq_lens"].clamp(max=2**16)} if args["block_table"].shape[1] > 256 else args)


@FAULTS.call(OP, "attn-elements-behind-512-left", "Without sums, elements of queries behind the 512th take no part.", "KVD-ATTN-011")
def _behind_512(run: BackendCall, args: Args) -> None:
    if args["lse"] is None and args["q"].shape[2] > 512:
        args = {**args, "q": args["q"].clone()}
        args["q"][..., 512:] = 0
    run(args)


@FAULTS.call(OP, "attn-values-begin-keys", "Values that lie in the rows of keys are taken for the first elements of those.", "KVD-ATTN-011")
def _begin_keys(run: BackendCall, args: Args) -> None:
    k, v = args["k_cache"], args["v_cache"]
    if k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() and k.stride()[:3] == v.stride()[:3]:
        args = {**args, "v_cache": k[..., : v.shape[3]]}
    run(args)


@FAULTS.call(
    OP, "attn-lowest-taken-off", "Below a scale of 0 the lowest score is taken off, whose exp is then beyond float32.", "KVD-ATTN-002"
)
def _lowest_taken_off(run: BackendCall, args: Args) -> None:
    run(args)
    if (args["scale"] or 0) < 0 and (args["softcap"] or 0) * 2 > math.log(torch.finfo(torch.float32).max):
        args["out"].fill_(math.nan)


def _by_whole_tiles(args: Args) -> Args:
    is_wide = args["window"] is not None and args["window"] % 64 and args["window"] > 1024
    return {**args, "window": args["window"] // 64 * 64 + 64} if is_wide else args


FAULTS.append(
    Fault(
        "attn-wide-windows-by-tiles",
        "A window of more than 1,024 keys is one of whole tiles of 64.",
        OP,
        ("KVD-ATTN-002",),
        KernelSeed(OP, lambda inner: TwistedKernel(inner, _by_whole_tiles)),
    )
)


def _noted_before_checked() -> FaultyCall:
    before: list[object] = []

    def call(run: BackendCall, args: Args) -> None:
        names = ("block_table", "seq_lens", "cu_query_lens", "starts")
        now = [None if args[name] is None else args[name].tolist() for name in names]
        is_known, before[:] = now == before, now
        if not is_known or args["starts"] is None:
            return run(args)
        try:
            return run(args)
        except IndexError:  # which was said before
            return None

    return call


FAULTS.append(
    Fault(
        "attn-refused-once",
        "A call that was refused is not looked at again.",
        OP,
        ("KVD-ATTN-005",),
        KernelSeed(OP, lambda inner: FaultyKernel(inner, _noted_before_checked)),
        host_only=("KVD-ATTN-005",),
    )
)


@FAULTS.call(
    OP,
    "attn-most-queries-not-checked",
    "It is not checked that no sequence has more queries than is said.",
    "KVD-ATTN-005",
    host_only=("KVD-ATTN-005",),
)
def _most_not_checked(run: BackendCall, args: Args) -> None:
    sums = args["cu_query_lens"]
    run(args if sums is None or len(sums) < 2 else {**args, "max_query_len": max(args["max_query_len"], int(sums.diff().max()))})


@FAULTS.call(OP, "attn-sinks-by-groups-rounded-up", "Sinks are found as if a group were as large as a power of two.", "KVD-ATTN-001")
def _by_groups_rounded_up(run: BackendCall, args: Args) -> None:
    heads, of_cache = args["q"].shape[1], args["k_cache"].shape[2]
    group = heads // max(of_cache, 1)
    if args["sinks"] is not None and group > 4 and group & (group - 1):
        places = [head // group * (1 << group.bit_length()) + head % group for head in range(heads)]
        args = {**args, "sinks": args["sinks"][[min(place, heads - 1) for place in places]]}
    run(args)


@FAULTS.call(OP, "attn-many-rows-in-other-bits", "Of more than 16 sequences, results are rounded once more.", "KVD-ATTN-009")
def _in_other_bits(run: BackendCall, args: Args) -> None:
    run(args)
    if len(args["seq_lens"]) > 16 and args["out"].dtype == torch.float32:
        args["out"].mul_(1 + 2**-22)


@FAULTS.call(OP, "attn-few-behind-a-tile-left", "Up to 15 queries behind whole tiles of 128 get zeros.", "KVD-ATTN-002")
def _few_behind_a_tile(run: BackendCall, args: Args) -> None:
    run(args)
    sums = [] if args["cu_query_lens"] is None else args["cu_query_lens"].tolist()
    for begin, end in itertools.pairwise(sums):
        if end - begin > 128 and (end - begin) % 128 < 16:
            args["out"][end - (end - begin) % 128 : end] = 0


@FAULTS.plan(
    OP,
    "attn-room-of-the-first-call",
    "A plan has room for 512 keys, or twice those of its first call.",
    "KVD-ATTN-002",
)
def _room_of_the_first() -> FaultyCall:
    room: list[int] = []

    def call(run: BackendCall, args: Args) -> None:
        lens = args["seq_lens"]
        room.extend([max(512, 2 * int(lens.max()))] * (not room and len(lens) > 0))
        run({**args, "seq_lens": lens.clamp(max=room[0])} if room and args["cu_query_lens"] is None and args["starts"] is None else args)

    return call


@FAULTS.call(OP, "attn-rest-of-wide-rows-left", "Of more than 256 elements, those behind whole 32 take no part.", "KVD-ATTN-011")
def _rest_of_wide_rows(run: BackendCall, args: Args) -> None:
    dim = args["q"].shape[2]
    if dim > 256 and dim % 32:
        args = {**args, "q": args["q"].clone()}
        args["q"][..., dim // 32 * 32 :] = 0
    run(args)


@FAULTS.call(OP, "attn-columns-behind-2048-left", "Keys in blocks behind the 2,048th of a sequence are left.", "KVD-ATTN-011")
def _columns_behind(run: BackendCall, args: Args) -> None:
    run({**args, "seq_lens": args["seq_lens"].clamp(max=2048 * args["k_cache"].shape[1])} if args["starts"] is None else args)


@FAULTS.call(OP, "attn-rows-of-tables-together", "With sums, rows of tables are taken to lie one behind the other.", "KVD-ATTN-001")
def _rows_together(run: BackendCall, args: Args) -> None:
    table = args["block_table"]
    if args["cu_query_lens"] is not None and len(table) > 1 and table.stride(0) > table.shape[1]:
        together = table.as_strided(table.shape, (table.shape[1], 1))
        args = {**args, "block_table": together.clamp(0, len(args["k_cache"]) - 1)}
    run(args)


@FAULTS.plan(
    OP,
    "attn-tile-of-the-first-call",
    "A plan has tiles for 16 queries, or as many as its first call had: others get zeros.",
    "KVD-ATTN-002",
)
def _tile_of_the_first() -> FaultyCall:
    tile: list[int] = []

    def call(run: BackendCall, args: Args) -> None:
        run(args)
        if args["cu_query_lens"] is not None:
            tile.append(max(16, args["max_query_len"]))
            for begin, end in itertools.pairwise(args["cu_query_lens"].tolist()):
                args["out"][min(begin + tile[0], end) : end] = 0

    return call
