"""Ops of a plugin for tests of the kit: between them they have all that a schema can say. `register` brings them to a child."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from kvdock import runtime
from kvdock.plugin import KVDOCK_API, Arg, Op, OpSchema, Relation, Role
from support_plugins import CallKernel, module

_FLOATS = (torch.float32, torch.bfloat16)
_INTS = (torch.int64, torch.int32)


def _mix(pool: Any, x: Any, where: Any, gain: Any, shift: Any, sign: Any) -> None:
    """Write rows times gain, plus or minus a shift that is one for all, to places; a negative one is padding."""
    added = int(shift) if sign == "plus" else -int(shift)
    rows = x.float() * (1.0 if gain is None else gain[:, None]) + added
    good = where.flatten() >= 0
    pool.index_copy_(0, where.flatten()[good].long(), rows.to(pool.dtype).flatten(0, -3)[good])


def _mix_reference(pool: Any, x: Any, where: Any, gain: Any, shift: Any, sign: Any) -> None:
    for row, place in zip(x.flatten(0, -3), where.flatten().tolist(), strict=True):
        for head in range(pool.shape[1] if place >= 0 else 0):
            scaled = row[head].float() * (1.0 if gain is None else gain[head])
            pool[place, head] = scaled + int(shift) * (1 if sign == "plus" else -1)


def _mix_draw(sizes: Mapping[str, int], choose: random.Random) -> dict[str, Any]:
    places = [-1 if place % 7 == 5 else place for place in choose.sample(range(sizes["N"]), sizes["..."])]
    return {"where": places, "shift": [choose.randrange(-3, 4)], "sign": "minus"}


MIX = Op(
    OpSchema(
        "zoo_mix_",
        (
            Arg("pool", Role.MUTATED, ("N H D",), _FLOATS),
            Arg("x", Role.TENSOR, ("... H D",), _FLOATS, same_dtype="pool"),
            Arg("where", Role.TENSOR, ("...",), _INTS),
            Arg("gain", Role.TENSOR, ("H",), (torch.float32,), optional=True, host=True),
            Arg("shift", Role.RUNTIME_INT, ("", "*one"), _INTS),
            Arg("sign", Role.STATIC),
        ),
        (
            Relation("one == 1", "shift", "one number", "pass a tensor of shape []"),
            Relation("lead0 <= N", "x", "at most {N} rows", "call it for fewer"),
            Relation("lead0 * lead1 <= N", "x", "at most {N} rows", "call it for fewer"),
        ),
    ),
    portable=CallKernel(_mix),
    reference=_mix_reference,
    draw=_mix_draw,
)


def _pick(x: Any, which: Any, mask: Any, out: Any) -> None:
    out.zero_()
    out[mask] = x[which[mask].long()]


def _pick_reference(x: Any, which: Any, mask: Any, out: Any) -> None:
    for place, (row, taken) in enumerate(zip(which.tolist(), mask.tolist(), strict=True)):
        out[place] = x[row] if taken else 0


def _pick_draw(sizes: Mapping[str, int], choose: random.Random) -> dict[str, Any]:
    count, rows = range(sizes["m"]), sizes["n"]
    return {"which": [choose.randrange(rows) if rows else 0 for _ in count], "mask": [rows > 0 and choose.random() < 0.7 for _ in count]}


PICK = Op(
    OpSchema(
        "zoo_pick",
        (
            Arg("x", Role.TENSOR, ("*n D",), _FLOATS),
            Arg("which", Role.TENSOR, ("*m",), _INTS),
            Arg("mask", Role.TENSOR, ("*m",), (torch.bool,)),
            Arg("out", Role.MUTATED, ("*m D",), _FLOATS, same_dtype="x", returned=True),
        ),
    ),
    portable=CallKernel(_pick),
    reference=_pick_reference,
    draw=_pick_draw,
)


def _sum(total: Any, x: Any) -> None:
    total.add_(x.sum(0))


def _sum_reference(total: Any, x: Any) -> None:
    for row in reversed(x):
        total += row


SUM = Op(
    OpSchema("zoo_sum_", (Arg("total", Role.MUTATED, ("D",), (torch.float32,)), Arg("x", Role.TENSOR, ("*n D",), (torch.float32,)))),
    portable=CallKernel(_sum),
    reference=_sum_reference,
    tolerance=1e-4,
)

OPS = {op.schema.name: op for op in (MIX, PICK, SUM)}


def _bring(ops: list[Op], name: str = "zoo") -> None:
    runtime.default().registry.register(module(name, KVDOCK_API=KVDOCK_API, kvdock_ops=lambda: ops), name)


def register() -> None:
    """Bring the ops to this process, as a plugin."""
    _bring(list(OPS.values()))


def register_exact() -> None:
    """Bring the sum to this process, which is to be bit for bit what its reference says, and is not."""
    _bring([attrs.evolve(SUM, tolerance=0.0)])


def _exits(sizes: Mapping[str, int], choose: random.Random) -> dict[str, Any]:
    os._exit(7)


def register_undrawable() -> None:
    """Bring ops whose cases cannot be drawn."""
    args = (Arg("y", Role.MUTATED, ("D",), _FLOATS), Arg("x", Role.TENSOR, ("*n",), _INTS))
    for name, draw in (("zoo_silent", None), ("zoo_exits", _exits)):
        _bring([Op(OpSchema(name, args), SUM.portable, _sum_reference, draw)], name)
