"""Ops that plugins bring: their cases come from their schemas, what is wrong with them is noticed, and what cannot be drawn is said."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.ops.catalog import CATALOG
from kvdock.ops.validate import validate
from kvdock.plugin import Arg, Op, OpSchema, Relation, Role
from kvdock_conformance import faults, requirements
from kvdock_conformance.cases.any_op import AnyCall, factors_of
from kvdock_conformance.cases.drawing import Drawing
from kvdock_conformance.cases.swaps import DRAWN as SWAPS
from kvdock_conformance.checking.memory import Arenas
from kvdock_conformance.expected import read
from kvdock_conformance.faults.ops import FAULTS
from kvdock_conformance.prove import prove_one
from kvdock_conformance.requirement import Case, Level, Requirements, cases_at
from kvdock_conformance.requirements.ops import REQUIREMENTS, drawn, of_op
from kvdock_conformance.run import run
from kvdock_conformance.session import ConformancePlan, Session
from kvdock_conformance.verdict import Verdict
from support_conformance import CHILD, TESTS
from support_ops import MIX, OPS, PICK, SUM
from support_slow import every, first_of

SEEDED_INTO = {"op-outputs-empty": "zoo_pick"}
"""What a fault is seeded into, if not into `MIX`: it has no outputs that are returned."""


def plan(setup: str = "support_ops:register", **settings: Any) -> ConformancePlan:
    return ConformancePlan("cpu", requirements.load(), setup=setup, command=CHILD, **settings)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(plan()) as opened:
        yield opened


@pytest.fixture(scope="module")
def asked(session: Session) -> Requirements:
    return Requirements(session.brought())


def real(case: Case) -> list[dict[str, Any]]:
    memory = Arenas(case.data["arenas"], torch.device("cpu"))
    return [{name: memory.tensor(spec) for name, spec in call["args"].items()} for call in case.data["calls"]]


@pytest.mark.parametrize("op", first_of(OPS))
def test_every_op_passes_what_it_is_asked(session: Session, asked: Requirements, op: str) -> None:
    own = [item for item in asked if item.area == op]
    for item in own:
        outcome = session.requirement(item, Level.CORE)
        assert outcome.verdict is Verdict.PASSED, (item.id, outcome.reason, [(case.name, case.failure) for case in outcome.failed[:1]])
    missing = {item.id for item in REQUIREMENTS} - {item.id.partition("@")[0] for item in own}
    assert missing == {*_NOT_OF_PLUGINS, *(["KVD-OP-018"] if op != "zoo_pick" else [])}, "only pick returns"


_NOT_OF_PLUGINS = ("KVD-OP-024", "KVD-OP-025", "KVD-OP-029", "KVD-OP-030")
"""What is not asked of plugins' ops: any may add to what is there, and refuse other indices."""


@pytest.mark.parametrize(
    "name", every(3, [name for name, fault in FAULTS.items() if name != "op-error-kept" and fault.killers[0] not in _NOT_OF_PLUGINS])
)
def test_a_fault_is_noticed_by_each_requirement_that_should(session: Session, asked: Requirements, name: str) -> None:
    fault = FAULTS[name].of(SEEDED_INTO.get(name, "zoo_mix_"))
    proof = prove_one(session, fault, asked)
    assert proof.verdict == "killed", f"{name}: {proof.verdict}, missed by {proof.missed} {proof.reason}"


def test_no_requirement_is_without_a_fault_and_each_id_is_there_once() -> None:
    assert {item.id for item in REQUIREMENTS} == {killer for fault in FAULTS.values() for killer in fault.killers}
    assert [item.id for item in REQUIREMENTS] == [f"KVD-OP-{number:03}" for number in range(1, len(REQUIREMENTS) + 1)]


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_drawn_calls_are_good_and_every_two_properties_meet(op: Op) -> None:
    (every,) = [cases_at(Level.EXTENDED, item.cases(op)) for item in REQUIREMENTS if item.id == "KVD-OP-001"]
    seen: set[tuple[str, int]] = set()
    for case in every:
        (args,) = real(case)
        validate(op.schema, tuple(args.get(name) for name in op.schema.arg_names))
        seen |= {(name, min(value.numel(), 2)) for name, value in args.items() if isinstance(value, torch.Tensor)}
    written = [arg.name for arg in op.schema.mutated]
    assert {(name, count) for name in written for count in (1, 2)} <= seen, "sizes of 1 and others"
    assert len({case.name for case in every}) == len(every)
    meeting = [case.name for case in every if "odd gaps" in case.name]
    assert len(factors_of(op.schema, "even")) < 3 or any("odd address" in name for name in meeting)


def test_optional_arguments_are_there_and_absent_and_a_host_int_is_an_int_and_a_tensor() -> None:
    calls = [args for item in REQUIREMENTS[:1] for case in cases_at(Level.EXTENDED, item.cases(MIX)) for args in real(case)]
    assert {"gain" in args for args in calls} == {True, False}
    assert {type(args["shift"]) for args in calls} == {int, torch.Tensor}
    assert {args["where"].dim() for args in calls} == {1, 2}
    assert {args["sign"] for args in calls} == {"minus"}
    assert max(len(args["where"]) for args in calls) > 64, "the pool grows with the tokens that relations let in"


def test_what_is_drawn_is_what_the_plugin_says() -> None:
    given: list[dict[str, int]] = []

    def draw(sizes: Mapping[str, int], choose: random.Random) -> dict[str, Any]:
        given.append(dict(sizes))
        return {"which": [1] * 9, "mask": [True] * 9, "x": [0.5, -2.0] * 9}

    call = AnyCall(attrs.evolve(PICK, draw=draw)).settled(n=2, m=3, D=4)
    assert call is not None
    from kvdock_conformance.cases.any_op import in_turn

    (args,) = real(Case("x", in_turn([call])))
    assert given == [{"n": 2, "m": 3, "D": 4, "...": 1}]
    assert args["which"].tolist() == [1, 1, 1]
    assert args["mask"].tolist() == [True] * 3
    assert args["x"].tolist() == [[0.5, -2.0, 0.5, -2.0]] * 2


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (attrs.evolve(MIX, draw=None), "Op zoo_mix_: draw: expected values of where, which the schema cannot say, got values of nothing"),
        (attrs.evolve(PICK, draw=lambda sizes, choose: {"which": [0], "mask": [True] * 999}), r"draw: which: expected \d+ numbers for"),
        (attrs.evolve(PICK, draw=lambda sizes, choose: {"which": 3, "mask": 3}), r"draw: which: expected \d+ numbers for .*, got 3"),
        (attrs.evolve(SUM, schema=attrs.evolve(SUM.schema, relations=(Relation("D == D + n", "x", "", ""),))), "got D == D [+] n"),
    ],
)
def test_what_cannot_be_drawn_says_why(op: Op, text: str) -> None:
    with pytest.raises(ArgumentValueError, match=text):
        drawn(op)


def test_an_op_without_anything_to_say_needs_no_draw() -> None:
    assert len(drawn(attrs.evolve(SUM, draw=None))) == len(REQUIREMENTS)
    with pytest.raises(ArgumentTypeError, match="Op: draw: expected a function, got 3"):
        attrs.evolve(SUM, draw=3)


def test_an_op_that_cannot_be_drawn_is_left_open() -> None:
    """One whose plugin ends the process that draws, too."""
    with Session(plan("support_ops:register_undrawable")) as opened:
        outcomes = [opened.requirement(item, Level.CORE) for item in opened.brought()]
    assert {outcome.verdict for outcome in outcomes} == {Verdict.NOT_RUN}, "the exit code is that of incomplete"
    open_ones = {outcome.requirement.area: outcome.reason for outcome in outcomes}
    assert open_ones.pop("zoo_silent").startswith("ArgumentValueError: Op zoo_silent: draw: expected values of x")
    assert open_ones.pop("zoo_exits") == "the process that draws its cases ended with exit code 7"
    assert open_ones == {}


@pytest.mark.slow
def test_an_op_is_asked_by_its_name_and_a_wrong_name_lists_those_there_are() -> None:
    found = run(plan(area="zoo_sum_", limit_s=30.0))
    assert {outcome.requirement.area for outcome in found.outcomes} == {"zoo_sum_"}
    assert found.exit_code == 0
    assert "KVD-WRITE-001" in found.plan.left_out()
    assert "KVD-OP-001@zoo_mix_" in found.plan.left_out()
    with pytest.raises(ArgumentValueError, match=r"op: expected one of paged_caching_, .*zoo_sum_, got 'zoo_sam_'"):
        run(plan(area="zoo_sam_"))


@pytest.mark.slow
def test_where_nothing_can_be_opened_the_op_that_is_wanted_is_not_run() -> None:
    found = run(plan("support_conformance:crash", area="zoo_sum_"))
    assert {outcome.verdict for outcome in found.outcomes} == {Verdict.NOT_RUN}
    assert "crashed with SIGKILL" in found.outcomes[0].reason
    assert found.exit_code == 3


@pytest.mark.slow
def test_a_computed_number_may_be_as_far_off_as_its_plugin_says() -> None:
    found = run(plan("support_ops:register_exact", area="zoo_sum_"))
    assert "KVD-OP-001@zoo_sum_" in {outcome.requirement.id for outcome in found.failed}, "other orders of adding differ in the last bits"


@pytest.mark.slow
def test_a_failure_of_an_op_has_a_script_that_needs_no_kit(tmp_path: Path) -> None:
    from kvdock_conformance import reports

    found = run(plan("support_ops:register_exact", area="zoo_sum_"))
    reports.write(found, tmp_path)
    script = tmp_path / "failures" / "KVD-OP-001@zoo_sum_" / "repro.py"
    text = script.read_text(encoding="utf-8")
    assert "and the plugin that brings zoo_sum_" in text
    assert "import kvdock_conformance" not in text
    done = subprocess.run([sys.executable, str(script)], env=_with_tests(), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
    assert "zoo_sum_, call 0: total" in done.stderr


def _with_tests() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"}


def test_a_failure_of_an_op_may_be_expected(tmp_path: Path) -> None:
    file = tmp_path / "expected.toml"
    entry = '[[expected]]\nrequirement = "{}"\nreason = "known"\nlink = "https://example.com"\nexpires = 2999-01-01\n'
    file.write_text(entry.format("KVD-OP-001@zoo_sum_"))
    assert set(read(file, requirements.load())) == {"KVD-OP-001@zoo_sum_"}
    file.write_text(entry.format("KVD-OP-999@zoo_sum_"))
    with pytest.raises(ArgumentValueError, match="KVD-OP-001@zoo_sum_"):
        read(file, requirements.load())


def test_ids_name_the_op() -> None:
    assert requirements.find("KVD-OP-002@zoo_mix_").area == "zoo_mix_"
    assert requirements.find("KVD-WRITE-001") is requirements.load()["KVD-WRITE-001"]
    made = list(of_op("x", {"KVD-OP-002": [{"name": "a", "data": {}, "level": "extended"}]}))
    assert [(item.id, item.selected(Level.EXTENDED)[0].name) for item in made] == [("KVD-OP-002@x", "a")]
    assert faults.find("op-input-changed@x").killers == ("KVD-OP-001@x", "KVD-OP-002@x")
    assert faults.find("op-input-changed@x").area == "x"
    assert list(faults.of_ops(made)) == ["op-input-changed@x"]
    assert faults.of_ops(made)["op-input-changed@x"].killers == ("KVD-OP-002@x",), "of those that are asked"


def test_a_fault_of_padding_is_one_of_ops_that_have_padding(asked: Requirements) -> None:
    assert [name for name in faults.of_ops(asked) if name.startswith("op-padding")] == ["op-padding-written@zoo_mix_"]


def test_the_ops_of_kvdock_could_be_drawn_too() -> None:
    """The drawing knows no op: given how slots are drawn, it makes good calls of kvdock's own."""
    named = attrs.evolve(CATALOG["paged_caching_"], name="zoo_paged_")
    made = Op(named, SUM.portable, lambda *args: None, lambda sizes, choose: {"slot_mapping": [-1] * sizes["..."]})
    for case in cases_at(Level.EXTENDED, REQUIREMENTS[0].cases(made)):
        for args in real(case):
            validate(made.schema, tuple(args.get(name) for name in made.schema.arg_names))


def test_a_schema_of_one_static_vector_has_no_run_time_cases() -> None:
    schema = OpSchema("zoo_flat_", (Arg("total", Role.MUTATED, ("D",), (torch.float32,)),))
    made = drawn(Op(schema, SUM.portable, lambda total: None))
    assert made["KVD-OP-003"] == [], "nothing of it can be 0"
    assert [case["name"] for case in made["KVD-OP-005"]] == ["the same again", "pools of their own"]


@pytest.mark.parametrize(
    "on_host", [(), ("src_cache",), ("dst_cache",), ("src_cache", "dst_cache"), ("src_cache", "dst_cache", "block_pairs")]
)
def test_a_call_has_a_pool_on_the_device_it_is_made_on(on_host: tuple[str, ...]) -> None:
    """With both pools of a swap in host memory it would be the host's, and its pairs could not lie anywhere else."""
    made = AnyCall(SWAPS, {f"{name} place": "host" for name in on_host}).settled()
    assert made is not None
    drawing = Drawing()
    views = made.arguments(drawing)
    found = {name for name, view in views.items() if drawing.arenas[view.arena].get("host", False)}
    assert found == {*on_host} - ({"src_cache"} if len(on_host) > 1 else set())
