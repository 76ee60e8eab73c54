"""An op of a plugin that copies, ``acme_swap_``: what a stranger writes. `support_swap_kit` is what the kit needs for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvdock import runtime
from kvdock.plugin import COPY_DTYPES, HOST, KVDOCK_API, Arg, Descriptor, IndexRangeError, Kernel, Op, OpSchema, Request, Role, as_bits
from support_plugins import module

OP = "acme_swap_"


def swap_reference(k_cache: torch.Tensor, v_cache: torch.Tensor, block_pairs: torch.Tensor) -> list[tuple[int, int]]:
    """Exchange the blocks of each pair; return the places of ids beyond the pool, whose pairs are left."""
    skipped, count = [], k_cache.shape[0]
    for number, (a, b) in enumerate(block_pairs.tolist()):
        skipped += [(number, side) for side, block in enumerate((a, b)) if block >= count and min(a, b) >= 0]
        if 0 <= a < count and 0 <= b < count:
            for cache in (as_bits(k_cache), as_bits(v_cache)):
                cache[a], cache[b] = cache[b].clone(), cache[a].clone()
    return skipped


class Swap(Descriptor):
    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, block_pairs: torch.Tensor) -> None:
        count, pairs = k_cache.shape[0], block_pairs.long()
        beyond = (pairs >= count) & (pairs >= 0).all(1, keepdim=True)
        if k_cache.device == HOST and beyond.any():
            number, side = beyond.nonzero()[0].tolist()
            raise IndexRangeError(f"{OP}: block_pairs[{number}, {side}]", expected=f"a block below {count}", got=int(pairs[number, side]))
        a, b = pairs[((pairs >= 0) & (pairs < count)).all(1)].unbind(1)
        for cache in (as_bits(k_cache), as_bits(v_cache)):
            there = cache[a]
            cache[a] = cache[b]
            cache[b] = there


class SwapKernel(Kernel):
    def supports(self, request: Request) -> Sequence[str]:
        return ()

    def prepare(self, request: Request) -> Descriptor:
        return Swap()


SWAP_BLOCKS = Op(
    OpSchema(
        OP,
        (
            Arg("k_cache", Role.MUTATED, ("NB block Hk Dk",), COPY_DTYPES),
            Arg("v_cache", Role.MUTATED, ("NB block Hv Dv",), COPY_DTYPES, same_dtype="k_cache"),
            Arg("block_pairs", Role.TENSOR, ("*N 2",), (torch.int32, torch.int64)),
        ),
    ),
    portable=SwapKernel(),
    reference=swap_reference,
    draw=lambda sizes, choose: {"block_pairs": _pairs(sizes["NB"], sizes["N"])},
)


def _pairs(blocks: int, count: int) -> list[int]:
    """Return pairs of neighbours, each block once, and padding behind them."""
    return [block if block < blocks // 2 * 2 else -1 for block in range(2 * count)]


def register() -> None:
    """Bring the op to this process, with a kernel of the CPU backend's own, and its requirements and faults to the kit."""
    import support_swap_kit
    from kvdock_conformance import faults, requirements

    registry = runtime.default().registry
    registry.register(module("swap", KVDOCK_API=KVDOCK_API, kvdock_ops=lambda: [SWAP_BLOCKS]), "swap")
    registry.register_kernel("cpu", OP, SwapKernel())
    for item in support_swap_kit.REQUIREMENTS:
        requirements.load().add(item)
    every = {**faults.load(), **{fault.name: fault for fault in support_swap_kit.FAULTS}}
    vars(faults)["load"] = lambda: every
