"""The page that `make aot` writes: a row for each op and architecture, and what differs, by name."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from kvdock_triton.aot_page import Result, page

PLAIN = Result(
    "gather_paged", "8x128 NHD 1-D align 16", "sm_90", 16, registers=20, spills=0, shared=0, load=16, store=16, narrowest_store=16
)
NARROW_CLASS = attrs.evolve(PLAIN, variant="8x128 NHD 1-D align 4", alignment=4, registers=36, load=8, store=4, narrowest_store=4)
RECORD = Path(__file__).parents[2] / "docs" / "benchmarks" / "aot.md"


def test_a_row_for_each_op_and_architecture() -> None:
    other = attrs.evolve(PLAIN, target="gfx942", registers=11)
    said = page([PLAIN, other, NARROW_CLASS, attrs.evolve(PLAIN, variant="x", registers=22)], {"Triton": "3.6.0"})
    rows = [line for line in said.splitlines() if line.startswith("| gather_paged")]
    assert rows == [
        "| gather_paged | sm_90 | 3 | 22 | 36 | 8x128 NHD 1-D align 4 | 0 | 16 |",
        "| gather_paged | gfx942 | 1 | 11 | 11 | 8x128 NHD 1-D align 16 | 0 | 16 |",
    ]
    assert "**4 kernels that move bits: 0 spill registers, 0 have accesses narrower than their alignment class.**" in said
    assert "* Triton 3.6.0," in said
    assert said.endswith("None: no spills, no shared memory, and every access as wide as the alignment class.\n")


@pytest.mark.parametrize(
    ("changes", "fault", "said"),
    [
        ({"spills": 8}, True, "spills 8"),
        ({"load": 8}, True, "accesses of 8 bytes"),
        ({"narrowest_store": 4}, True, "accesses of 4 bytes"),
        ({"shared": 512}, False, "512 bytes of shared memory"),
        ({"alignment": 8}, False, "stores of 16 bytes"),
    ],
)
def test_what_differs_is_named(changes: dict[str, int], fault: bool, said: str) -> None:
    odd = attrs.evolve(PLAIN, **changes)
    assert bool(odd.faults) is fault
    text = page([PLAIN, odd], {})
    assert text.splitlines()[-1] == f"* gather_paged 8x128 NHD 1-D align 16, sm_90: {said}"
    assert f"{int('spills' in changes)} spill registers, {int(fault and 'spills' not in changes)} have" in text


def test_kernels_that_compute_may_spill_and_say_where() -> None:
    spilling = attrs.evolve(PLAIN, kernel="paged_attention", computes=True, spills=8, narrowest_store=4)
    text = page([PLAIN, spilling, attrs.evolve(spilling, spills=0)], {})
    assert "**1 kernels that move bits: 0 spill registers, 0 have" in text
    assert "2 kernels of attention, which compute: 1 spill registers, on sm_90." in text
    assert "| paged_attention | sm_90 | 2 | 20 | 20 | 8x128 NHD 1-D align 16 | 8 | 16 |" in text
    assert text.splitlines()[-1].startswith("None: ")
    assert "\n0 of them have accesses narrower" in text
    narrow = attrs.evolve(spilling, load=8)
    assert (narrow.faults, narrow.differences) == ([], ["accesses of 8 bytes"])
    text = page([PLAIN, narrow], {})
    assert "0 spill registers, 0 have accesses narrower" in text, "those that move bits are not blamed for it"
    assert "\n1 of them have accesses narrower" in text
    assert text.splitlines()[-1].startswith("* paged_attention ")


def test_of_many_that_differ_the_first_are_named_and_the_rest_counted() -> None:
    lines = page([attrs.evolve(PLAIN, spills=1)] * 13, {}).splitlines()
    assert lines[-1] == "* and 3 more"
    assert sum(line.endswith("sm_90: spills 1") for line in lines) == 10


def test_the_record_is_short_and_nothing_in_it_spills() -> None:
    text = RECORD.read_text(encoding="utf-8")
    assert text.count("\n") <= 85
    assert "0 spill registers, 0 have accesses narrower than" in text
