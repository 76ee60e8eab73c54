"""Cases in which properties meet: every two values of two factors occur together, in few cases, the same each time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest

from kvdock_conformance.cases.pairs import copies, covering, slot_calls, updates
from kvdock_conformance.requirement import Case, Extended, Level, cases_at
from support_slow import first_of

FACTORS = {"a": (1, 2, 3, 4), "b": ("x", "y", "z"), "c": (False, True), "d": range(5)}


def test_every_two_values_meet() -> None:
    found = covering(FACTORS)
    for one, other in itertools.combinations(FACTORS, 2):
        assert {(made[one], made[other]) for made in found} == set(itertools.product(FACTORS[one], FACTORS[other]))


def test_each_combination_has_one_value_of_each_factor() -> None:
    assert all(set(made) == set(FACTORS) and all(made[name] in FACTORS[name] for name in FACTORS) for made in covering(FACTORS))


def test_combinations_are_few() -> None:
    most = sum(1 for _ in itertools.product(*FACTORS.values()))
    assert 4 * 5 <= len(covering(FACTORS)) <= 4 * 5 + 4 < most


def test_the_same_arguments_give_the_same_combinations() -> None:
    assert covering(FACTORS, 3) == covering(FACTORS, 3) != covering(FACTORS, 4)


def test_two_factors_give_all_there_is() -> None:
    assert len(covering({"a": (1, 2), "b": (3, 4, 5)})) == 6


def test_values_that_are_kept_apart_meet_nowhere_and_all_others_do() -> None:
    found = covering(FACTORS, apart=[(("a", 4), ("c", True)), (("d", 0), ("b", "x"))])
    for one, other in itertools.combinations(FACTORS, 2):
        left = {("a", "c"): {(4, True)}, ("b", "d"): {("x", 0)}}.get((one, other), set())
        assert {(made[one], made[other]) for made in found} == set(itertools.product(FACTORS[one], FACTORS[other])) - left


@pytest.mark.parametrize("cases", first_of([slot_calls("paged_caching_"), slot_calls("gather_paged"), copies, updates]))
def test_cases_are_few_enough_for_core_and_have_names_of_their_own(cases: Callable[[], Iterable[Case | Extended]]) -> None:
    made = cases_at(Level.EXTENDED, cases())
    core = [case for case in made if case.level is Level.CORE]
    assert 25 <= len(core) <= 350
    assert len({case.name for case in made}) == len(made)


def test_slots_written_are_distinct_in_numbers_around_powers_of_two_and_reach_to_the_first_beyond() -> None:
    counts = set()
    for args in (call["args"] for case in cases_at(Level.EXTENDED, slot_calls("paged_caching_")()) for call in case.data["calls"]):
        blocks, block = args["k_cache"]["shape"][:2]
        good = [slot for slot in args["slot_mapping"]["values"] if slot >= 0]
        assert len(set(good)) == len(good)
        assert max(good, default=0) <= blocks * block
        if len(args["slot_mapping"]["shape"]) == 1:
            counts.add(args["slot_mapping"]["shape"][0])
    assert counts.issuperset({255, 256, 257, 4095, 4096, 4097, 65_535, 65_536, 65_537})


@pytest.mark.parametrize("op", first_of(["gather_paged", "paged_caching_"]))
def test_what_seems_to_be_a_run_is_none(op: str) -> None:
    seen = dict.fromkeys(("two swapped", "one skipped", "backwards", "some padding"), 0)
    for case in cases_at(Level.EXTENDED, slot_calls(op)()):
        for how in [how for how in seen if f"one run, {how}" in case.name]:
            seen[how] += 1
            slots = case.data["calls"][:4][-1]["args"]["slot_mapping"]["values"]
            run = range(min(slots[0], slots[-1]), max(slots[0], slots[-1]) + 1)
            has_its_ends = how != "one skipped" or op == "gather_paged"
            assert (len(run) == len(slots)) == has_its_ends, case.name
            assert slots != list(run), case.name
    assert all(seen.values()), seen


def test_copies_and_updates_seem_to_be_runs_too() -> None:
    ends = {True: 0, False: 0}
    for case in cases_at(Level.EXTENDED, copies()):
        pairs = case.data["calls"][0]["args"]["block_pairs"]["values"]
        if "destinations, two swapped" in case.name:
            assert pairs[-1] - pairs[1] == len(pairs) // 2 - 1
            assert pairs[1::2] != list(range(pairs[1], pairs[-1] + 1))
    for case in cases_at(Level.EXTENDED, updates()):
        lengths = case.data["calls"][0]["args"]["cache_lengths"]
        if "lengths alike" in case.name and "too long" not in case.name:
            ends[lengths["values"][0] == lengths["values"][-1]] += 1
            assert len(set(lengths["values"])) > 1
    assert all(ends.values())
