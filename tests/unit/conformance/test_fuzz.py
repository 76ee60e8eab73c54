"""Random calls: they are good calls, the same for the same seed, and what fails is made small."""

from __future__ import annotations

import datetime
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvdock
from kvdock.ops.catalog import CATALOG
from kvdock.ops.validate import validate
from kvdock_conformance import fuzz as fuzzing
from kvdock_conformance import reports
from kvdock_conformance.cases.random_calls import FUZZABLE, SeededChooser, random_case
from kvdock_conformance.checking.drawn import check_drawn
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.memory import Arenas
from kvdock_conformance.checking.target import Target
from kvdock_conformance.faults import find
from kvdock_conformance.fuzz import FUZZED, check_fuzz, fuzz, with_fuzz
from kvdock_conformance.requirements import load
from kvdock_conformance.run import EXIT_FAILED, EXIT_INCOMPLETE, ConformanceRun, run
from kvdock_conformance.verdict import Verdict
from support_conformance import chosen, plan

HOST = torch.device("cpu")


@pytest.mark.parametrize("op", FUZZABLE)
def test_what_is_drawn_is_a_good_call(op: str) -> None:
    for seed in range(30):
        data = random_case(SeededChooser(seed), (op,))
        memory = Arenas(data["arenas"], HOST)
        for call in data["calls"]:
            args = {name: memory.tensor(spec) for name, spec in call["args"].items()}
            validate(CATALOG[op], tuple(args.get(name) for name in CATALOG[op].arg_names))
        assert data == random_case(SeededChooser(seed), (op,)), "the same in every run"


def test_every_op_of_kvdock_can_be_fuzzed() -> None:
    assert {*FUZZABLE} == {*CATALOG}


@pytest.mark.parametrize(
    "name",
    [
        "swap-strides-of-the-source",
        "swap-sources-cleared",
        "mla-token-strides-ignored",
        "mla-keys-into-values",
        "mlaread-padding-ends-the-call",
        "mlaread-error-names-another-place",
    ],
)
def test_what_is_drawn_by_a_schema_finds_faults_of_its_op(name: str) -> None:
    fault, target = find(name), Target("cpu")

    def check_all() -> None:
        for seed in range(60):
            check_drawn(target, random_case(SeededChooser(seed), (fault.area,)))

    check_all()
    with fault.seeded(target), pytest.raises(NonconformanceError):
        check_all()


def test_what_is_drawn_has_what_meets_in_faults() -> None:
    every = [random_case(SeededChooser(seed)) for seed in range(200)]
    writes = [call["args"] for data in every for call in data["calls"] if call["op"] == "paged_caching_"]
    assert {spec["slot_mapping"]["dtype"] for spec in writes} == {"int32", "int64"}
    assert {spec["k"]["dtype"] for spec in writes if "k_scale" not in spec} == {"bfloat16", "float16", "float32", "float64", "uint8"}
    assert {len(spec["slot_mapping"]["shape"]) for spec in writes} == {1, 2}
    assert any(
        spec["k_cache"]["shape"] == spec["v_cache"]["shape"] and spec["k_cache"]["strides"] != spec["v_cache"]["strides"] for spec in writes
    )
    assert any(spec["k_cache"]["shape"][1] > 512 for spec in writes)
    assert any(len(data["calls"]) > 6 for data in every)
    assert any(data.get("returned") for data in every), "reads without outputs of their own"
    assert any("k_scale" in call["args"] for data in every for call in data["calls"]), "quantised pools"
    assert {bool(data.get("elsewhere")) for data in every} == {True, False}
    assert {bool(call.get("again")) for data in every for call in data["calls"][1:]} == {True, False}
    assert {spec["k"]["arena"] == spec["v"]["arena"] for spec in writes} == {True, False}, "keys and values in one tensor"
    lengths = [call["args"]["cache_lengths"] for data in every for call in data["calls"] if call["op"] == "static_update_"]
    assert {"int" if isinstance(each, int) else len(each["shape"]) for each in lengths} == {"int", 1}
    assert any(spec["k_cache"]["shape"][0] * spec["k_cache"]["shape"][1] > 2**15 for spec in writes)


def test_what_is_drawn_plain_is_in_range() -> None:
    def places(data: dict[str, Any]) -> Iterator[bool]:
        for call in data["calls"]:
            values = call["args"].get("slot_mapping", {}).get("values", [])
            yield all(slot < math.prod(call["args"]["k_cache"]["shape"][:2]) for slot in values)

    ops = ("paged_caching_", "gather_paged")
    assert {good for seed in range(100) for good in places(random_case(SeededChooser(seed), ops))} == {True, False}
    every = [random_case(SeededChooser(seed), ops, is_plain=True) for seed in range(100)]
    assert all(good for data in every for good in places(data))
    assert not any("returned" in data or "k_scale" in call["args"] for data in every for call in data["calls"])


@pytest.mark.slow
def test_a_good_backend_passes_and_says_how_many_calls_did() -> None:
    about = plan("good", load())
    outcome = fuzz(about, 0.05, seed=7)
    assert outcome.verdict is Verdict.PASSED
    assert outcome.requirement.id == FUZZED
    (case,) = outcome.cases
    assert case.name.endswith(" random calls with seed 7")
    assert case.data["count"] > 10


def test_what_fails_is_made_small_and_can_be_run_again(tmp_path: Path) -> None:
    about = plan("raises", load(), area="paged_caching_")
    outcome = fuzz(about, 0.2)
    (case,) = outcome.failed
    assert "no memory left" in str(case.failure)
    (call,) = case.data["calls"]
    assert call["args"]["k"]["shape"] == [1, 1, 8], "the plainest call there is fails too"
    found = ConformanceRun(about, {}, [outcome], datetime.datetime.now(datetime.UTC), 0)
    assert found.exit_code == EXIT_FAILED
    reports.write(found, tmp_path)
    script = (tmp_path / "failures" / FUZZED / "repro.py").read_text(encoding="utf-8")
    assert "check_drawn(target, CASE)" in script
    assert fuzz(about, 0.2).failed[0].data == case.data, "the same for the same seed"


@pytest.mark.slow
def test_what_crashes_is_found_too() -> None:
    outcome = fuzz(plan("exits", load(), area="paged_caching_"), 0.05)
    assert "exit code 7" in str(outcome.failed[0].failure)


@pytest.mark.slow
def test_a_backend_that_cannot_be_opened_leaves_it_open() -> None:
    about = plan("nobody", load())
    outcome = fuzz(about, 0.05)
    assert outcome.verdict is Verdict.NOT_RUN
    assert ConformanceRun(about, {}, [outcome], datetime.datetime.now(datetime.UTC), 0).exit_code == EXIT_INCOMPLETE


@pytest.mark.parametrize(
    ("settings", "minutes", "text"),
    [
        ({}, 0, "fuzz: expected more than 0 minutes, got 0"),
        ({"area": "errors"}, 1, "fuzz: expected a backend, and if any --op one of paged_caching_"),
        ({"kind": "prefix"}, 1, "got --prefix"),
    ],
)
def test_what_cannot_be_fuzzed_is_refused(settings: dict[str, str], minutes: float, text: str) -> None:
    with pytest.raises(kvdock.ArgumentValueError, match=text):
        check_fuzz(plan("good", load(), **settings), minutes)


def test_without_hypothesis_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(kvdock.ArgumentValueError, match="pip install hypothesis"):
        check_fuzz(plan("good", load()), 1)


@pytest.mark.slow
def test_what_came_of_it_stands_among_the_cases_of_its_requirement() -> None:
    every = [run(plan("good", chosen([FUZZED]))).outcomes[0]]
    more = fuzz(plan("good", load()), 0.01)
    (merged,) = with_fuzz(every, more)
    assert [case.name for case in merged.cases] == [*(case.name for case in every[0].cases), more.cases[0].name]
    assert fuzzing.with_fuzz([], more)[0].cases == more.cases


@pytest.mark.slow
def test_the_kit_does_not_need_hypothesis_to_be_imported() -> None:
    code = "import sys; sys.modules['hypothesis'] = None; import kvdock.cli.conformance, kvdock_conformance.fuzz"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
