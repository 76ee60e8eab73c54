"""The table of moves: what faults are made of moves as the ops do, and names requirements that there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvdock_conformance import reference
from kvdock_conformance.cases.copies import Copy
from kvdock_conformance.cases.paged import Gather, Write
from kvdock_conformance.cases.static import Update
from kvdock_conformance.checking.memory import Arenas
from kvdock_conformance.faults import families, load
from kvdock_conformance.faults.fault import Args
from kvdock_conformance.faults.moves import MOVES, Move
from kvdock_conformance.requirement import Case
from kvdock_conformance.requirements import load as requirements

CASES: dict[str, Case] = {
    "write": Write("x", [3, -1, 23, 0, 24, 7], (2, 3), pool="hnd").case(),
    "gather": Gather("x", [3, 23, 0, 7], (2, 2), rows="padded heads").case(),
    "copy": Copy("x", [(0, 5), (-1, 2), (3, 9), (1, 4)], pool="odd steps").case(),
    "static": Update("x", [0, 12, 5]).case(),
}
BEYOND = {"write": ["slot_mapping[1, 1]"], "gather": [], "copy": ["block_pairs[2, 1]"], "static": ["cache_lengths[1]"]}


def memory_of(prefix: str) -> tuple[Arenas, Args]:
    """Return the memory of a case, and its arguments."""
    memory = Arenas(CASES[prefix].data["arenas"], torch.device("cpu"))
    return memory, {name: memory.tensor(spec) for name, spec in CASES[prefix].data["calls"][0]["args"].items()}


def as_reference(move: Move, args: Args) -> None:
    """Do what an op means."""
    getattr(reference, move.op)(*args.values())


@pytest.mark.parametrize("prefix", MOVES)
def test_moving_in_plain_torch_is_what_the_op_means(prefix: str) -> None:
    (got, args), (right, twins) = memory_of(prefix), memory_of(prefix)
    MOVES[prefix].move(args)
    as_reference(MOVES[prefix], twins)
    assert all(bool((a == b).all()) for a, b in zip(got.bytes, right.bytes, strict=True))


@pytest.mark.parametrize("prefix", MOVES)
def test_a_call_of_which_nothing_is_changed_is_that_call(prefix: str) -> None:
    move, (right, twins) = MOVES[prefix], memory_of(prefix)
    as_reference(move, twins)
    for change in (
        lambda run, args: move.again(run, args),
        lambda run, args: move.partly(run, args, lambda rows: rows),
        lambda run, args: move.dropping(run, args, lambda places: places.at < 0),
        lambda run, args: move.with_index(run, args, lambda index: index),
    ):
        got, args = memory_of(prefix)
        change(lambda args: as_reference(move, args), args)
        assert all(bool((a == b).all()) for a, b in zip(got.bytes, right.bytes, strict=True))


@pytest.mark.parametrize("prefix", MOVES)
def test_what_is_dropped_stays_as_it_was(prefix: str) -> None:
    move, (before, _), (got, args) = MOVES[prefix], memory_of(prefix), memory_of(prefix)
    move.dropping(lambda args: as_reference(move, args), args, lambda places: places.at >= 0)
    assert all(bool((a == b).all()) for a, b in zip(got.bytes, before.bytes, strict=True))


@pytest.mark.parametrize("prefix", MOVES)
def test_places_out_of_range_have_the_names_that_errors_give_them(prefix: str) -> None:
    assert MOVES[prefix].beyond(memory_of(prefix)[1]) == BEYOND[prefix]


@pytest.mark.parametrize("move", MOVES.values(), ids=list(MOVES))
def test_each_requirement_of_a_move_has_a_role(move: Move) -> None:
    ids = [item.id for item in requirements() if item.area == move.op]
    assert [move.killer(role) for role in move.roles.split()] == ids


@pytest.mark.parametrize("move", MOVES.values(), ids=list(MOVES))
def test_a_name_of_its_own_is_that_of_a_fault(move: Move) -> None:
    assert {f"{move.prefix}-{own}" for own in move.names.values()} <= {fault.name for fault in families.FAULTS}


def test_a_fault_of_a_family_is_seeded_for_each_move_that_has_what_it_is_about() -> None:
    named: dict[str, Any] = load()
    assert {f"{prefix}-dim-rounded-down-to-16" for prefix in MOVES} <= set(named)
    assert "static-slot-zero-is-padding" not in named
    assert named["gather-beyond-the-pool-silent"].host_only == ("KVD-GATHER-004",)
    assert named["write-beyond-the-pool-silent"].host_only == ()
