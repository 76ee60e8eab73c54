"""The op as data: what it takes, what it writes, and which sizes must agree."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from kvdock.plugin import COPY_DTYPES, Arg, Op, OpSchema, Relation, Role

from .portable import RopeCaching
from .reference import rope_caching_

__all__ = ["ROPE_CACHING"]

_INDICES = (torch.int32, torch.int64)
_DTYPES = tuple(dtype for dtype in COPY_DTYPES if dtype.is_floating_point)


def _draw(sizes: Mapping[str, int], choose: random.Random) -> dict[str, Sequence[int]]:
    """Say what the schema cannot: positions that cos and sin have, and slots of the pool, none twice, some of them padding."""
    tokens, slots = sizes["T"], range(sizes["NB"] * sizes["block"])
    places = [*choose.sample(slots, min(tokens, len(slots))), *[-1] * tokens][:tokens]
    return {
        "positions": [choose.randrange(sizes["P"]) for _ in range(tokens)],
        "slot_mapping": [-2 if choose.random() < 0.1 else place for place in choose.sample(places, tokens)],
    }


ROPE_CACHING = Op(
    OpSchema(
        "rope_caching_",
        (
            Arg("k_cache", Role.MUTATED, ("NB block Hk Dk",), _DTYPES),
            Arg("v_cache", Role.MUTATED, ("NB block Hv Dv",), _DTYPES, same_dtype="k_cache"),
            Arg("k", Role.TENSOR, ("*T Hk Dk",), _DTYPES, same_dtype="k_cache"),
            Arg("v", Role.TENSOR, ("*T Hv Dv",), _DTYPES, same_dtype="v_cache"),
            Arg("cos", Role.TENSOR, ("P half",), (torch.float32,)),
            Arg("sin", Role.TENSOR, ("P half",), (torch.float32,)),
            Arg("positions", Role.TENSOR, ("*T",), _INDICES),
            Arg("slot_mapping", Role.TENSOR, ("*T",), _INDICES),
        ),
        (Relation("Dk == 2 * half", "cos", "one number for each pair of the {Dk} elements of a key", "pass cos and sin of [P, Dk / 2]"),),
    ),
    portable=RopeCaching(),
    reference=rope_caching_,
    draw=_draw,
)
