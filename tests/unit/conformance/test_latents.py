"""What the kit asks of latents: its cases, its reference, and calls of latents as faults see them."""

from __future__ import annotations

import random

import pytest
import torch

from kvdock_conformance import reference
from kvdock_conformance.cases.latents import DRAWN, LatentCall
from kvdock_conformance.checking.memory import Arenas
from kvdock_conformance.faults import load
from kvdock_conformance.faults.fault import Args
from kvdock_conformance.faults.latents import LATENT_READ, LATENT_WRITE
from kvdock_conformance.faults.moves import Move
from kvdock_conformance.requirement import Case, Level
from kvdock_conformance.requirements import load as requirements
from kvdock_conformance.requirements.latents import ASKED

CASES: dict[str, Case] = {
    "mla_caching_": LatentCall("mla_caching_", "x", [3, -1, 23, 0, 24, 7], (2, 3), pool="padded slots", rows="fused kv").case(),
    "mla_gather": LatentCall("mla_gather", "x", [3, 23, 0, 7], (2, 2), rows="padded tokens").case(),
}
MOVES = {move.op: move for move in (LATENT_WRITE, LATENT_READ)}
each_op = pytest.mark.parametrize("op", MOVES)


def memory_of(op: str) -> tuple[Arenas, Args]:
    """Return the memory of a case, and its arguments."""
    memory = Arenas(CASES[op].data["arenas"], torch.device("cpu"))
    return memory, {name: memory.tensor(spec) for name, spec in CASES[op].data["calls"][0]["args"].items()}


def mean(op: str, args: Args) -> None:
    getattr(reference, op)(*args.values())


def same(got: Arenas, right: Arenas) -> bool:
    return all(bool((a == b).all()) for a, b in zip(got.bytes, right.bytes, strict=True))


@each_op
def test_the_reference_puts_one_part_behind_the_other(op: str) -> None:
    _, args = memory_of(op)
    mean(op, args)
    slots, pool = args["slot_mapping"], args["kv_cache"].view(torch.int16)
    parts = [args[name].view(torch.int16) for name in args if name.startswith(("kv_c", "k_pe")) and name != "kv_cache"]
    assert len(parts) == 2
    rows = torch.cat(parts, -1)
    for place in ((row, column) for row in range(slots.shape[0]) for column in range(slots.shape[1])):
        slot = int(slots[place])
        if 0 <= slot < 24:
            assert torch.equal(pool[slot // 4, slot % 4, 0], rows[place])
        elif op == "mla_gather":
            assert not rows[place].any()


@each_op
def test_moving_keys_and_values_is_what_the_op_means(op: str) -> None:
    (got, args), (right, twins) = memory_of(op), memory_of(op)
    move: Move = MOVES[op]
    move.move(move.seen(lambda changed: None, args)[1])
    mean(op, twins)
    assert same(got, right)


@each_op
def test_a_call_of_which_nothing_is_changed_is_that_call(op: str) -> None:
    right, twins = memory_of(op)
    mean(op, twins)
    got, args = memory_of(op)
    run, pair = MOVES[op].seen(lambda changed: mean(op, changed), args)
    MOVES[op].with_index(run, pair, lambda index: index)
    assert same(got, right)
    got, args = memory_of(op)
    run, pair = MOVES[op].seen(lambda changed: mean(op, changed), args)
    MOVES[op].with_index(run, pair, lambda index: torch.full_like(index, -1))
    assert not same(got, right)


@each_op
def test_each_thing_that_is_asked_is_a_requirement_with_cases_and_faults(op: str) -> None:
    for role, _, _ in ASKED:
        item = requirements()[MOVES[op].killer(role)]
        assert item.area == op
        names = [case.name for case in item.selected(Level.EXTENDED)]
        assert names, item.id
        assert len(names) == len(set(names)), item.id
        assert [fault for fault in load().values() if item.id in fault.killers], item.id


@each_op
def test_drawn_slots_are_distinct_and_in_the_pool(op: str) -> None:
    for seed in range(50):
        sizes = {"NB": seed % 4 + 1, "block": 4, "...": seed % 21}
        slots = DRAWN[op].draw(sizes, random.Random(seed))["slot_mapping"]  # noqa: S311 - the same in every run
        assert len(slots) == sizes["..."]
        good = [slot for slot in slots if slot >= 0]
        assert len(good) == len(set(good))
        assert all(slot < sizes["NB"] * 4 for slot in good)
