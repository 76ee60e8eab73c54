"""Faults of `paged_attention` at values that are seldom passed: of scale, cap and counts, and of starts behind a call like it."""

from __future__ import annotations

import functools
import math

import torch

from kvdock_conformance.cases.attention import OP
from kvdock_conformance.faults.descriptors import of_the_key_pool
from kvdock_conformance.faults.fault import Fault, Faults, FaultyCall, KernelSeed
from kvdock_conformance.faults.seeds import Args, BackendCall, FaultyKernel, TwistedKernel
from kvdock_conformance.faults.tensors import at_or_before

__all__ = ["FAULTS"]

FAULTS = Faults()


def _scale_of_none(args: Args) -> Args:
    return {**args, "scale": args["scale"] or None}


FAULTS.append(
    Fault(
        "attn-scale-of-none",
        "A scale of 0 is taken for none.",
        OP,
        ("KVD-ATTN-001",),
        KernelSeed(OP, lambda inner: TwistedKernel(inner, _scale_of_none)),
    )
)


@FAULTS.call(
    OP, "attn-cap-without-maximum", "The largest score is not taken off capped ones, whose exp is then beyond float32.", "KVD-ATTN-002"
)
def _cap_without_maximum(run: BackendCall, args: Args) -> None:
    run(args)
    if args["softcap"] is not None and args["lse"] is not None:
        args["out"].masked_fill_(args["lse"][..., None] > math.log(torch.finfo(torch.float32).max), math.nan)


@FAULTS.call(
    OP, "attn-one-at-most-is-decode", "Where no sequence has more than one query, query b is taken for that of sequence b.", "KVD-ATTN-001"
)
def _one_at_most(run: BackendCall, args: Args) -> None:
    sums = args["cu_query_lens"]
    if sums is not None and args["max_query_len"] == 1:
        args = {**args, "cu_query_lens": torch.arange(len(sums), device=sums.device).clamp(max=len(args["q"])).to(sums.dtype)}
    run(args)


@FAULTS.call(
    OP,
    "attn-storages-taken-for-even",
    "Queries, keys and values at a multiple of 16 bytes of their storage are taken to be at such an address.",
    "KVD-ATTN-001",
    by_address=True,
)
def _even_storages(run: BackendCall, args: Args) -> None:
    run({**args, **{name: at_or_before(args[name], by_place=True) for name in ("q", "k_cache", "v_cache")}})


@FAULTS.call(OP, "attn-index-address-rounded-to-16", "Indices begin at the multiple of 16 bytes at or before them.", "KVD-ATTN-001")
def _rounded_index(run: BackendCall, args: Args) -> None:
    names = ("block_table", "seq_lens", "cu_query_lens", "starts", "sinks")
    run({**args, **{name: at_or_before(args[name]) for name in names if args[name] is not None}})


FAULTS.plan(
    OP,
    "attn-values-by-the-keys",
    "A plan finds the pool of values by the address of that of keys, of the first call.",
    f"KVD-OP-004@{OP}",
)(of_the_key_pool)


@FAULTS.call(OP, "attn-exponential-of-the-cap", "Without sums, nothing is taken off scores before exp, also at a cap.", "KVD-ATTN-002")
def _exponential_of_the_cap(run: BackendCall, args: Args) -> None:
    run(args)
    if args["lse"] is None and (args["softcap"] or 0) > math.log(torch.finfo(torch.float32).max):
        args["out"].fill_(math.nan)


@FAULTS.call(
    OP, "attn-heads-behind-64-left", "Of the queries' heads of one head of the cache, those behind the 64th get zeros.", "KVD-ATTN-001"
)
def _heads_behind_64(run: BackendCall, args: Args) -> None:
    run(args)
    args["out"].unflatten(1, (args["k_cache"].shape[2], -1))[:, :, 64:] = 0


def _window_of_32_bits(args: Args) -> Args:
    return args if args["window"] is None else {**args, "window": max((args["window"] + 2**31) % 2**32 - 2**31, 1)}


FAULTS.append(
    Fault(
        "attn-window-of-32-bits",
        "The upper half of a window is ignored.",
        OP,
        ("KVD-ATTN-001",),
        KernelSeed(OP, lambda inner: TwistedKernel(inner, _window_of_32_bits)),
    )
)


def _summed_before() -> FaultyCall:
    before: list[object] = []

    def call(run: BackendCall, args: Args) -> None:
        names = ("block_table", "seq_lens", "cu_query_lens")
        now = [None if args[name] is None else int(args[name].sum()) for name in names]
        if now == before:
            blocks, room = len(args["k_cache"]), args["block_table"].shape[1] * args["k_cache"].shape[1]
            args = {**args, "block_table": args["block_table"].clamp(0, blocks - 1), "seq_lens": args["seq_lens"].clamp(0, room)}
        run(args)
        before[:] = now

    return call


FAULTS.append(
    Fault(
        "attn-checked-by-sums",
        "Lengths and blocks are not checked where they add up to those of the call before.",
        OP,
        ("KVD-ATTN-005",),
        KernelSeed(OP, lambda inner: FaultyKernel(inner, _summed_before)),
        host_only=("KVD-ATTN-005",),
    )
)


@FAULTS.call(
    OP,
    "attn-checked-by-the-last-query",
    "With a window, blocks in front of what a sequence's last query sees are not checked.",
    "KVD-ATTN-005",
    host_only=("KVD-ATTN-005",),
)
def _by_the_last_query(run: BackendCall, args: Args) -> None:
    if args["window"] is not None:
        table, block = args["block_table"], args["k_cache"].shape[1]
        first = (args["seq_lens"] - args["window"]).clamp(min=0) // block
        is_before = torch.arange(table.shape[1], device=table.device) < first[:, None]
        args = {**args, "block_table": torch.where(is_before, table.clamp(0, len(args["k_cache"]) - 1), table)}
    run(args)


def _checked_before() -> FaultyCall:
    before: list[object] = []

    def call(run: BackendCall, args: Args) -> None:
        now = [None if args[name] is None else args[name].tolist() for name in ("block_table", "seq_lens", "cu_query_lens")]
        if now == before and args["starts"] is not None:
            args = {**args, "starts": torch.minimum(args["starts"].clamp(min=0), args["seq_lens"])}
        run(args)
        before[:] = now

    return call


FAULTS.append(
    Fault(
        "attn-starts-not-checked-again",
        "Starts are not checked where lengths, sums and blocks are those of the call before.",
        OP,
        ("KVD-ATTN-005",),
        KernelSeed(OP, lambda inner: FaultyKernel(inner, _checked_before)),
        host_only=("KVD-ATTN-005",),
    )
)


@FAULTS.call(
    OP,
    "attn-starts-of-padding-unchecked",
    "A start of a sequence without tokens is not looked at.",
    "KVD-ATTN-005",
    host_only=("KVD-ATTN-005",),
)
def _starts_of_padding(run: BackendCall, args: Args) -> None:
    if args["starts"] is not None:
        args = {**args, "starts": torch.where(args["seq_lens"] == 0, 0, args["starts"])}
    run(args)


def _checked_for_another_pool() -> FaultyCall:
    before: list[object] = []

    def call(run: BackendCall, args: Args) -> None:
        now = [args["block_table"].tolist(), args["seq_lens"].tolist()]
        run({**args, "block_table": args["block_table"].clamp(max=len(args["k_cache"]) - 1)} if now == before else args)
        before[:] = now

    return call


FAULTS.append(
    Fault(
        "attn-blocks-checked-for-another-pool",
        "Blocks are not checked where they are those of the call before, whose pool may have had more.",
        OP,
        ("KVD-ATTN-005",),
        KernelSeed(OP, lambda inner: FaultyKernel(inner, functools.cache(_checked_for_another_pool))),  # one for all plans
        host_only=("KVD-ATTN-005",),
    )
)


@FAULTS.call(OP, "attn-keys-cut-to-half", "In float16, keys are cut so that products with queries are of float16, too.", "KVD-ATTN-012")
def _keys_cut(run: BackendCall, args: Args) -> None:
    if args["q"].dtype == torch.float16 and args["q"].numel():
        most = torch.finfo(torch.float16).max / max(float(args["q"].abs().max()), 1.0)
        args = {**args, "k_cache": args["k_cache"].nan_to_num(0, 0, 0).clamp(-most, most)}
    run(args)


@FAULTS.call(
    OP, "attn-hidden-at-minus-ten-thousand", "Keys behind a query weigh as if their score were -10,000, not minus infinity.", "KVD-ATTN-012"
)
def _hidden_at_minus_ten_thousand(run: BackendCall, args: Args) -> None:
    run(args)
    if args["lse"] is not None and args["lse"].numel() and -math.inf < float(args["lse"].max()) < -10_000:
        run({**args, "causal": False})


@FAULTS.call(OP, "attn-sink-of-exp", "The sum with a sink is infinite where exp of that is beyond float32.", "KVD-ATTN-012")
def _sink_of_exp(run: BackendCall, args: Args) -> None:
    run(args)
    if args["sinks"] is not None and args["lse"] is not None:
        args["lse"].masked_fill_(args["sinks"] > math.log(torch.finfo(torch.float32).max), math.inf)


@FAULTS.call(OP, "attn-rest-of-large-blocks", "Of blocks of more than 128 keys, what is behind a multiple of 128 is left.", "KVD-ATTN-011")
def _rest_of_large_blocks(run: BackendCall, args: Args) -> None:
    run(args)
    if args["k_cache"].shape[1] > 128 and args["k_cache"].shape[1] % 128:
        args["out"].zero_()


@FAULTS.call(OP, "attn-values-summed-in-half", "In float16, weighted values are summed in that, and divided then.", "KVD-ATTN-012")
def _summed_in_half(run: BackendCall, args: Args) -> None:
    run(args)
    if args["out"].dtype == torch.float16 and args["out"].numel():
        args["out"].masked_fill_(args["out"].abs().double() * int(args["seq_lens"].max()) > torch.finfo(torch.float16).max, math.inf)


@FAULTS.call(OP, "attn-one-row-of-the-table", "Of sequences with one row of the table in memory, only the first has it.", "KVD-ATTN-001")
def _one_row_of_the_table(run: BackendCall, args: Args) -> None:
    if args["block_table"].stride(0) == 0 and len(args["block_table"]) > 1:
        args = {**args, "block_table": args["block_table"].clone()}
        args["block_table"][1:] = 0
    run(args)


@FAULTS.call(OP, "attn-one-head-taken-for-dense", "Keys of one head for all are read as if each had its own.", "KVD-ATTN-001")
def _one_head_taken_for_dense(run: BackendCall, args: Args) -> None:
    if args["k_cache"].stride(2) == 0 and args["k_cache"].shape[2] > 1:
        args = {**args, "k_cache": args["k_cache"].roll(1, 1).clone()}
    run(args)
