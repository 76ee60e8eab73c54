"""Faults of `paged_attention`, each a little off: by one token, one block, one factor or one row."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from kvdock.interface import TensorMeta
from kvdock_conformance.cases.attention import OP
from kvdock_conformance.checking.meaning import BOUNDS
from kvdock_conformance.faults.fault import Fault, Faults, KernelSeed
from kvdock_conformance.faults.ops import CallSeed, mistakes_ignored
from kvdock_conformance.faults.seeds import Args, BackendCall, TwistedKernel

__all__ = ["FAULTS"]

FAULTS = Faults()


def _call(name: str, sentence: str, *numbers: int, host_only: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """Add a fault of a call, which requirements of these numbers notice."""
    return FAULTS.call(OP, f"attn-{name}", sentence, *_ids(numbers), host_only=host_only)


def _ids(numbers: tuple[int, ...]) -> list[str]:
    return [f"KVD-ATTN-{number:03}" for number in numbers]


def _twist(name: str, sentence: str, *numbers: int) -> Callable[[Callable[[Args], Args]], Callable[[Args], Args]]:
    """Add a fault that is a function of the arguments, in a request and in a call."""

    def add(twist: Callable[[Args], Args]) -> Callable[[Args], Args]:
        seed = KernelSeed(OP, lambda inner: TwistedKernel(inner, twist))
        FAULTS.append(Fault(f"attn-{name}", sentence, OP, tuple(_ids(numbers)), seed))
        return twist

    return add


def _room(args: Args) -> int:
    return int(args["block_table"].shape[1] * args["k_cache"].shape[1])


def _queries(args: Args) -> torch.Tensor:
    """Return how many queries each sequence has."""
    return torch.ones_like(args["seq_lens"]) if args["cu_query_lens"] is None else args["cu_query_lens"].diff()


# Which keys are seen


@_call("keys-behind-16-thousand-left", "No more than 16,384 keys of a sequence are seen.", 10)
def _some_thousand(run: BackendCall, args: Args) -> None:
    run({**args, "seq_lens": args["seq_lens"].clamp(max=16384)})


@_call("one-past-the-end", "A sequence is taken for one token longer, where its table has room.", 1, 2)
def _one_past(run: BackendCall, args: Args) -> None:
    lens = args["seq_lens"]
    longer = torch.where(lens > 0, lens + 1, lens)
    run({**args, "seq_lens": torch.where((longer - 1) % args["k_cache"].shape[1] == 0, lens, longer)})


@_call("last-partial-block-ignored", "The last block of a sequence is ignored where it is not full.", 1, 2)
def _partial_ignored(run: BackendCall, args: Args) -> None:
    lens, block = args["seq_lens"], args["k_cache"].shape[1]
    whole = lens // block * block
    starts = torch.zeros_like(lens) if args["starts"] is None else args["starts"]
    run({**args, "seq_lens": torch.where((whole >= _queries(args)) & (whole >= starts), whole, lens)})


@_twist("window-one-short", "A window has one key less.", 1, 2)
def _window_short(args: Args) -> Args:
    return args if args["window"] in (None, 1) else {**args, "window": args["window"] - 1}


@_twist("window-one-long", "A window has one key more.", 1, 2)
def _window_long(args: Args) -> Args:
    return args if args["window"] is None else {**args, "window": args["window"] + 1}


@_twist("starts-ignored", "Every sequence is seen from its beginning.", 2, 7)
def _starts_ignored(args: Args) -> Args:
    return {**args, "starts": None}


@_twist("cause-ignored", "Queries see the keys behind their own.", 1, 2)
def _cause_ignored(args: Args) -> Args:
    return {**args, "causal": False}


@_twist("split-forgotten", "The first of several splits of 256 keys is forgotten.", 2)
def _split_forgotten(args: Args) -> Args:
    lens, starts = args["seq_lens"], args["starts"]
    if isinstance(lens, TensorMeta):
        return {**args, "starts": lens}
    starts = torch.zeros_like(lens) if starts is None else starts
    return {**args, "starts": torch.where((lens > 512) & (lens - 256 > starts + _queries(args)), starts + 256, starts).to(lens.dtype)}


# What is made of them


@_twist("sinks-missing", "Sinks take no part.", 1, 2, 4, 8)
def _sinks_missing(args: Args) -> Args:
    return {**args, "sinks": None}


@_twist("scale-twice", "Scores are multiplied by the scale twice.", 1, 2)
def _scale_twice(args: Args) -> Args:
    scale = args["q"].shape[2] ** -0.5 if args["scale"] is None else args["scale"]
    return {**args, "scale": scale * scale}


@_twist("cap-ignored", "Scores have no cap.", 1, 2)
def _cap_ignored(args: Args) -> Args:
    return {**args, "softcap": None}


@_call("cap-after-the-mask", "Hidden keys of a sequence's blocks get the lowest score that a cap leaves, in place of none.", 2)
def _cap_after_mask(run: BackendCall, args: Args) -> None:
    run(args)
    if args["softcap"] is None or args["block_table"].numel() == 0:
        return
    lens, block, batch = args["seq_lens"].long(), args["k_cache"].shape[1], len(args["seq_lens"])
    rows = torch.arange(batch, device=lens.device).repeat_interleave(_queries(args))
    hidden = ((lens % block > 0) * (block - lens % block))[rows]  # behind the end
    last = args["block_table"].gather(1, ((lens - 1).clamp(min=0) // block)[:, None])[:, 0].long()
    is_hidden = torch.arange(block, device=lens.device) >= (lens % block)[:, None]
    values = args["v_cache"][last.clamp(0, len(args["v_cache"]) - 1)].double() * is_hidden[..., None, None]
    group = args["q"].shape[1] // args["v_cache"].shape[2]
    mean = (values.sum(1)[rows] / hidden.clamp(min=1)[:, None, None]).repeat_interleave(group, 1)
    share = hidden * math.exp(-args["softcap"]) / (hidden * math.exp(-args["softcap"]) + lens[rows].clamp(min=1))
    args["out"].copy_((1 - share)[:, None, None] * args["out"].double() + share[:, None, None] * mean)


@_call("heads-interleaved", "Query head h reads head h modulo their number, in place of the group's.", 1, 2)
def _interleaved(run: BackendCall, args: Args) -> None:
    heads, group = args["k_cache"].shape[2], args["q"].shape[1] // args["k_cache"].shape[2]
    order = torch.arange(heads * group, device=args["q"].device).view(group, heads).t().flatten()
    back = order.argsort()
    turned = {name: args[name] if args[name] is None else args[name].index_select(1, order) for name in ("q", "out", "lse")}
    run({**args, **turned, "sinks": None if args["sinks"] is None else args["sinks"][order]})
    for name in ("out", "lse"):
        if args[name] is not None:
            args[name].copy_(turned[name].index_select(1, back))


@_call("sums-in-base-2", "Sums are logarithms to base 2.", 1, 2, 7, 8)
def _base_2(run: BackendCall, args: Args) -> None:
    run(args)
    if args["lse"] is not None:
        args["lse"].div_(math.log(2))


@_call("weights-in-half", "Results are rounded to bits of bfloat16, whatever their dtype.", 1, 2)
def _rounded(run: BackendCall, args: Args) -> None:
    run(args)
    args["out"].copy_(args["out"].bfloat16())


@_call("just-outside", "Results are off by half as much again as they may be.", 1, 2, 7, 8)
def _just_outside(run: BackendCall, args: Args) -> None:
    run(args)
    for result in (args["out"], args["lse"]):
        if result is not None:
            result.add_((result.abs() + 1) * (1.5 * BOUNDS[result.dtype]))


# What may be anything


def _spoiled(args: Args, is_touched: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Add 0 times some values of each sequence's last block to its results; given places in that block, returns which."""
    table, lens, block = args["block_table"], args["seq_lens"].long(), args["v_cache"].shape[1]
    if table.numel() == 0:
        return
    last = table.gather(1, ((lens - 1).clamp(min=0) // block)[:, None])[:, 0].long().clamp(0, len(args["v_cache"]) - 1)
    places = torch.arange(block, device=lens.device) - ((lens - 1) % block)[:, None]
    values = torch.where((is_touched(places) & (lens > 0)[:, None])[..., None, None], args["v_cache"][last], 0)
    group = args["q"].shape[1] // args["v_cache"].shape[2]
    each = (values.sum(1) * 0).repeat_interleave(group, 1).repeat_interleave(_queries(args), 0)
    args["out"][: len(each)] += each


@_call("end-not-a-number", "0 times the values behind a sequence's end is added.", 1, 3)
def _end_spoils(run: BackendCall, args: Args) -> None:
    run(args)
    _spoiled(args, lambda places: places > 0)


@_call("later-not-a-number", "0 times the values of a sequence's last block is added to all its queries.", 3)
def _later_spoils(run: BackendCall, args: Args) -> None:
    run(args)
    _spoiled(args, lambda places: places <= 0)


def _later_infinite(run: BackendCall, args: Args, which: float) -> None:
    """Make a call, and add 0 times what is infinite of the values of a sequence's last block to all its queries."""
    run(args)
    values = args["v_cache"]
    _spoiled({**args, "v_cache": torch.where(values == which, values, 0)}, lambda places: places <= 0)


for _text, _which in (("infinite", math.inf), ("minus-infinite", -math.inf)):
    _call(f"later-{_text}", f"0 times the values of a sequence's last block that are {_which} is added to all its queries.", 3)(
        functools.partial(_later_infinite, which=_which)
    )


@_call("padding-left", "What a query that sees nothing would get is left as it was.", 1, 4)
def _padding_left(run: BackendCall, args: Args) -> None:
    before = args["out"].clone()
    run(args)
    padding = (args["seq_lens"] == 0).repeat_interleave(_queries(args))
    args["out"].copy_(torch.where(padding[:, None, None], before[: len(padding)], args["out"]))


@_call("size-by-the-batch", "With an even number of queries, each result is a bit off.", 9)
def _by_the_batch(run: BackendCall, args: Args) -> None:
    run(args)
    if args["out"].shape[0] % 2 == 0:
        args["out"].mul_(1 + torch.finfo(args["out"].dtype).eps)


# What is refused, and what comes back


@_call("out-of-range-cut", "Lengths are cut to the table and block ids to the pool, and neither is said nor counted.", 5)
def _cut(run: BackendCall, args: Args) -> None:
    lens = args["seq_lens"].clamp(0, _room(args))
    run({**args, "seq_lens": lens, "block_table": args["block_table"].clamp(0, args["k_cache"].shape[0] - 1)})


FAULTS.append(Fault("attn-mistakes-ignored", "A call that is wrong does nothing.", OP, ("KVD-ATTN-006",), CallSeed(OP, mistakes_ignored)))


@FAULTS.function(OP, "attn-output-made-anew", "An output that is given is not used.", "KVD-ATTN-008")
def _made_anew(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, out: Any = None, **options: Any) -> Any:
        return function(*args, **options)

    return call
