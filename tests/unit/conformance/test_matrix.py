"""The matrix of requirements and faults is a page of the documents, and it is what the kit holds now."""

from __future__ import annotations

import attrs
import pytest

from kvdock_conformance import faults
from kvdock_conformance.faults.fault import Fault, FunctionSeed
from kvdock_conformance.matrix import main, page
from kvdock_conformance.requirement import Level, Requirements
from kvdock_conformance.requirements import load
from support_conformance import requirement
from support_docs import ROOT

PAGE = ROOT / "docs" / "backends" / "conformance-matrix.md"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_the_page_is_what_the_program_writes(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert PAGE.read_text(encoding="utf-8") == capsys.readouterr().out, "after a change to requirements or faults: make matrix"


def test_it_has_a_row_for_each_requirement_and_each_fault() -> None:
    rows = [cells(line) for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    first = [row[0] for row in rows]
    for item in load():
        assert first.count(item.id.partition("@")[0]) == 1
    for fault in faults.load().values():
        (killers,) = [row[2] for row in rows if row[0] == f"`{fault.name}`"]
        assert [name.removesuffix("*") for name in killers.split(", ")] == [name.removeprefix("KVD-") for name in fault.killers]
        assert [name.endswith("*") for name in killers.split(", ")] == [name in fault.host_only for name in fault.killers]


def test_rows_of_a_small_kit() -> None:
    first = requirement(1)
    every = Requirements([first, requirement(2, level=Level.EXTENDED)])
    made = Fault("x|y", "Is wrong.", first.area, ("KVD-TEST-001", "KVD-TEST-002"), FunctionSeed(first.area, lambda function: function))
    text = page(every, {"x|y": attrs.evolve(made, host_only=("KVD-TEST-002",))})
    assert f"## `{first.area}`" in text
    assert "| `x\\|y` | Is wrong. | TEST-001, TEST-002* |" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| KVD-TEST-002")]
    assert cells(row)[2] == "extended"
    assert cells(row)[-1].strip(" |") == "1"
    assert "2\nrequirements and 1 seeded faults" in text
