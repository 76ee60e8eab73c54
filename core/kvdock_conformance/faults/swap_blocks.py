"""Faults of ``swap_blocks_``: those of any op that copies, and some of two pools."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import attrs
import torch

import kvdock
from kvdock_conformance.faults.families import faults_of
from kvdock_conformance.faults.fault import Args, BackendCall, Fault, Faults, FaultyCall
from kvdock_conformance.faults.moves import COPY, Move, Places
from kvdock_conformance.faults.ops import CallSeed, never_nothing
from kvdock_conformance.faults.tensors import flip_byte, restrided
from kvdock_conformance.requirements.swap_blocks import ROLES

__all__ = ["FAULTS", "SWAP"]


def _limits(args: Args) -> torch.Tensor:
    return torch.tensor([len(args["src_cache"]), len(args["dst_cache"])], device=args["block_pairs"].device)


def _places(args: Args) -> Places:
    pairs = args["block_pairs"]
    good = ((pairs >= 0) & (pairs < _limits(args))).all(1)
    return Places(good.nonzero()[:, 0], (pairs[good, 0].long(),), (pairs[good, 1].long(),))


def _beyond(args: Args) -> list[str]:
    pairs = args["block_pairs"]
    return [f"block_pairs{place}" for place in ((pairs >= _limits(args)) & (pairs >= 0).all(1, keepdim=True)).nonzero().tolist()]


def _left_out(run: BackendCall, args: Args) -> None:
    beyond = (args["block_pairs"] >= _limits(args)).any(1, keepdim=True)
    run({**args, "block_pairs": torch.where(beyond, -1, args["block_pairs"])})


SWAP: Move = attrs.evolve(
    COPY,
    op="swap_blocks_",
    prefix="swap",
    roles=ROLES,
    pairs=(("src_cache", "dst_cache"),) * 2,
    places=_places,
    limit=lambda args: len(args["dst_cache"]),
    beyond=_beyond,
    left_out=_left_out,
)
FAULTS: Faults = faults_of(SWAP)


_OP, _KILLER = SWAP.op, SWAP.killer


@FAULTS.call(_OP, "swap-source-and-destination-exchanged", "Blocks go from dst to src.", _KILLER("moved"), _KILLER("ends"))
def _exchanged(run: BackendCall, args: Args) -> None:
    run({**args, "block_pairs": args["block_pairs"].flip(1)})


@FAULTS.call(_OP, "swap-sources-cleared", "Blocks are moved: the sources are cleared.", _KILLER("bytes"), _KILLER("inputs"))
def _cleared(run: BackendCall, args: Args) -> None:
    run(args)
    if len(source := SWAP.places(args).source[0]):
        flip_byte(args["src_cache"], int(args["src_cache"][source[0]].storage_offset()))


@FAULTS.call(_OP, "swap-one-limit-for-both", "Ids of both pools are held to the blocks of the destination.", _KILLER("beyond"))
def _one_limit(run: BackendCall, args: Args) -> None:
    beyond = (args["block_pairs"] >= len(args["dst_cache"])).nonzero().tolist()
    if beyond and any(place not in SWAP.beyond(args) for place in (f"block_pairs{at}" for at in beyond)):
        raise kvdock.IndexRangeError(f"{_OP}: block_pairs{beyond[0]}", expected="a block of the pool", got="another")
    run(args)


@FAULTS.call(_OP, "swap-equal-numbers-refused", "A destination that has a source's number is an error.", _KILLER("moved"))
def _as_in_one_pool(run: BackendCall, args: Args) -> None:
    pairs = args["block_pairs"]
    if bool(torch.isin(pairs[:, 0], pairs[:, 1]).any()):
        raise kvdock.ArgumentValueError(f"{_OP}: block_pairs", expected="destinations that are no source", got="others", fix="pass others")
    run(args)


@FAULTS.call(_OP, "swap-doubled-destinations-taken", "Of pairs with one destination the last wins, without an error.", _KILLER("doubled"))
def _doubled_taken(run: BackendCall, args: Args) -> None:
    dst = args["block_pairs"][:, 1]
    again = (dst[:, None] == dst[None, :]).triu(1).any(1) if len(dst) < 5000 else torch.zeros_like(dst, dtype=torch.bool)
    run({**args, "block_pairs": torch.where(again[:, None], -1, args["block_pairs"])})


@FAULTS.call(_OP, "swap-strides-of-the-source", "Both pools are gone through by the strides of the source.", _KILLER("orders"))
def _one_order(run: BackendCall, args: Args) -> None:
    strides = args["src_cache"].stride()
    fits = args["src_cache"].shape == args["dst_cache"].shape and 0 not in strides
    SWAP.again(
        run, args, lambda name, tensor: restrided(tensor, strides) if name == "dst_cache" and fits and _holds(tensor, strides) else tensor
    )


def _holds(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a tensor's memory has room for other strides."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, strides, strict=True)) + int(tensor.storage_offset())
    return last < tensor.untyped_storage().nbytes() // tensor.element_size()


@FAULTS.call(_OP, "swap-last-of-five-left", "Of five pairs the last that is good is left.", _KILLER("sides"))
def _last_left(run: BackendCall, args: Args) -> None:
    SWAP.dropping(
        run, args, lambda places: (places.at == places.at.amax(0) if len(places.at) else places.at > 0) & (len(args["block_pairs"]) == 5)
    )


@FAULTS.call(
    _OP, "swap-equal-numbers-of-one-tensor-left", "Within one tensor, a block of the same number is taken for itself.", _KILLER("parts")
)
def _equal_left(run: BackendCall, args: Args) -> None:
    is_one = args["src_cache"].untyped_storage().data_ptr() == args["dst_cache"].untyped_storage().data_ptr()
    SWAP.dropping(run, args, lambda places: (places.source[0] == places.to[0]) & is_one)


@FAULTS.call(
    _OP, "swap-many-to-heads-outside-left", "Of many pairs, blocks whose heads lie outside of their slots are left.", _KILLER("meeting")
)
def _many_to_hnd(run: BackendCall, args: Args) -> None:
    to = args["dst_cache"]
    is_about = len(args["block_pairs"]) > 32 and to.stride(2) > to.stride(1)
    SWAP.dropping(run, args, lambda places: (places.at >= 0) & is_about)


@FAULTS.call(
    _OP, "swap-sources-behind-the-destination-refused", "A source is held to the blocks of a smaller destination.", _KILLER("ends")
)
def _held_to_destination(run: BackendCall, args: Args) -> None:
    beyond = (args["block_pairs"][:, 0] >= len(args["dst_cache"])).nonzero().flatten().tolist()
    if beyond:
        raise kvdock.IndexRangeError(f"{_OP}: block_pairs[{beyond[0]}, 0]", expected="a block of the destination", got="another")
    run(args)


@FAULTS.call(_OP, "swap-bytes-in-32-bits", "Blocks more than 4 GiB into a pool are left.", _KILLER("parts"))
def _bytes_in_32_bits(run: BackendCall, args: Args) -> None:
    to, pairs = args["dst_cache"], args["block_pairs"].clone()
    pairs[pairs[:, 1] * (to.stride(0) * to.element_size()) >= 1 << 32] = -1
    run({**args, "block_pairs": pairs})


@FAULTS.plan(
    _OP,
    "swap-source-of-the-first-call",
    "The source of a plan's first call is that of calls the other way, too.",
    _KILLER("repeated"),
)
def _source_of_the_first() -> FaultyCall:
    first: list[tuple[int, int]] = []

    def call(run: BackendCall, args: Args) -> None:
        source, to = args["src_cache"], args["dst_cache"]
        first.append((source.data_ptr(), to.data_ptr()))
        is_back = first[0] == first[-1][::-1] and (source.shape, source.stride()) == (to.shape, to.stride())
        run({**args, "src_cache": to, "dst_cache": source} if is_back else args)

    return call


@FAULTS.call(_OP, "swap-locks-in-the-order-of-pools", "Each pool has a lock; that of the source is taken first.", _KILLER("in-and-out"))
def _locked_in_order(run: BackendCall, args: Args) -> None:
    with contextlib.ExitStack() as stack:
        for name in ("src_cache", "dst_cache"):
            stack.enter_context(_LOCKS[args[name].data_ptr()])
        run(args)


_LOCKS: dict[int, Any] = collections.defaultdict(threading.RLock)


@FAULTS.function(_OP, "swap-error-without-a-fix", "Errors do not say how to fix it.", *map(_KILLER, ("doubled", "host-read", "refused")))
def _without_a_fix(function: Callable[..., None]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        try:
            function(*args)
        except (kvdock.ArgumentValueError, kvdock.IndexRangeError) as error:
            raise type(error)(error.subject, expected=error.expected, got=error.got) from error

    return call


FAULTS.append(
    Fault("swap-works-without-pairs", "A call without pairs changes a byte.", _OP, (_KILLER("nothing"),), CallSeed(_OP, never_nothing))
)
