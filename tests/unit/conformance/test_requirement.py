from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

import kvdock
from kvdock_conformance.checking.served import SERVED
from kvdock_conformance.requirement import Capability, Case, Extended, Level, Requirement, Requirements, at_level
from kvdock_conformance.requirements import load
from support_conformance import never, requirement


@pytest.mark.parametrize(
    "name", ["KVD-WRITE-7", "KVD-OP-007@", "KVD-OP-007@a b", "KVD-WRITE-0007", "WRITE-007", "KVD-write-007", "KVD-WRITE-007 ", ""]
)
def test_an_id_has_one_form(name: str) -> None:
    with pytest.raises(kvdock.ArgumentValueError, match=r"expected KVD-<AREA>-<three digits>, got .*Fix: such as KVD-WRITE-007"):
        Requirement(name, "It is so.", "area", never, list)


@pytest.mark.parametrize("sentence", ["it is so.", "It is so", "", "It is so. It is not."])
def test_a_sentence_is_one_sentence(sentence: str) -> None:
    with pytest.raises(kvdock.ArgumentValueError, match=r"KVD-TEST-001: sentence: expected one sentence, got"):
        requirement(sentence=sentence)


class Holder:
    def check(self, target: Any, data: Any) -> None: ...


@pytest.mark.parametrize("check", [lambda target, data: None, Holder().check, 3])
def test_a_check_can_be_found_by_its_name(check: Any) -> None:
    with pytest.raises(kvdock.ArgumentValueError, match=r"Requirement: check: expected a function of a module, got .*repro.py"):
        requirement(check=check)
    with pytest.raises(kvdock.ArgumentValueError, match=r"Capability: reasons: expected a function of a module"):
        Capability("x", check, never)


def test_an_id_is_given_once() -> None:
    first = requirement(1)
    every = Requirements([first])
    every.add(first)  # itself again is no harm
    with pytest.raises(
        kvdock.ArgumentValueError, match=r"requirement KVD-TEST-001: expected an id that no other requirement has, got that of 'It is so.'"
    ):
        every.add(requirement(1, sentence="It is otherwise."))
    assert list(every) == [first]


def test_an_unknown_id_lists_those_of_its_area() -> None:
    every = Requirements([requirement(1), requirement(2)])
    assert every["KVD-TEST-002"].id == "KVD-TEST-002"
    with pytest.raises(kvdock.ArgumentValueError, match=r"expected one of KVD-TEST-001, KVD-TEST-002, got 'KVD-TEST-003'"):
        every["KVD-TEST-003"]
    with pytest.raises(kvdock.ArgumentValueError, match=r"expected one of KVD-TEST-001, KVD-TEST-002, got 'nonsense'"):
        every["nonsense"]


def test_levels_and_areas_select() -> None:
    core, more, other = requirement(1), requirement(2, level=Level.EXTENDED), requirement(3, area="other")
    every = Requirements([core, more, other])
    assert list(every.select(Level.CORE)) == [core, other]
    assert list(every.select(Level.EXTENDED)) == [core, more, other]
    assert list(every.select(Level.EXTENDED, "paged_caching_")) == [core, more]
    assert every.areas == ["paged_caching_", "other"]
    with pytest.raises(kvdock.ArgumentValueError, match=r"op: expected one of paged_caching_, other, got 'paged_cachin'"):
        every.select(Level.CORE, "paged_cachin")


def test_cases_have_levels_and_names_of_their_own() -> None:
    both = [Case("a", {}), Case("b", {}, Level.EXTENDED)]
    assert requirement(cases=lambda: both).selected(Level.CORE) == both[:1]
    assert requirement(cases=lambda: both).selected(Level.EXTENDED) == both
    with pytest.raises(kvdock.ArgumentValueError, match=r"KVD-TEST-001: cases: expected at least one.*got none"):
        requirement(cases=lambda: both[1:]).selected(Level.CORE)
    with pytest.raises(kvdock.ArgumentValueError, match=r"got 'a' more than once"):
        requirement(cases=lambda: [both[0], both[0]]).selected(Level.CORE)


def test_cases_of_the_extended_level_are_drawn_where_it_is_asked() -> None:
    drawn: list[Level] = []

    def of(level: Level) -> Iterable[Case]:
        drawn.append(level)
        return [Case(level.value, {}, level)]

    def cases() -> Iterator[Case | Extended]:
        for level in Level:
            yield from at_level(level, functools.partial(of, level))

    one = requirement(cases=cases)
    assert [case.name for case in one.selected(Level.CORE)] == ["core"]
    assert drawn == [Level.CORE]
    assert [case.name for case in one.selected(Level.EXTENDED)] == ["core", "extended"]
    assert drawn == [Level.CORE, Level.CORE, Level.EXTENDED]


@pytest.mark.slow  # draws every case; a run at core level, which `make test` has, sends the core ones to a child as JSON
def test_every_requirement_of_the_kit_has_cases_that_json_can_hold() -> None:
    import json

    every = load()
    assert len(every) >= 24
    for item in every:
        cases = item.selected(Level.EXTENDED)
        assert [json.loads(json.dumps(case.data)) for case in cases] == [case.data for case in cases], item.id
        assert cases, item.id
        assert item.level is Level.EXTENDED or any(case.level is Level.CORE for case in cases), f"{item.id}: checked at its own level"


def test_requirements_are_numbered_in_order_and_say_something_of_their_own() -> None:
    every = list(load())
    for area in load().areas:
        ids = [item.id for item in every if item.area == area]
        assert ids == sorted(ids), "in order, so that the next free number is seen at once"
    own = [item for item in every if "@" not in item.id]  # what is asked of any op may be asked of some in the same words
    assert len({item.sentence for item in own}) == len(own)


def test_requirements_about_calls_may_be_unsupported() -> None:
    for item in load():
        if item.area in ("paged_caching_", "static_update_", "gather_paged", "copy_blocks_"):
            assert item.needs is SERVED, f"{item.id}: a backend without the op is tested the other way round"
