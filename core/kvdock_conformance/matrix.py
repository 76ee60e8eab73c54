"""The matrix of requirements and faults as a page: ``python -m kvdock_conformance.matrix > docs/backends/conformance-matrix.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvdock_conformance import faults, requirements
from kvdock_conformance.faults.fault import Fault
from kvdock_conformance.kinds import KINDS
from kvdock_conformance.requirement import Requirement, Requirements

__all__ = ["main", "page"]

_HEAD = """\
# What the conformance kit asks, and which faults prove that it notices

Made by `make matrix` from `kvdock_conformance.requirements` and `kvdock_conformance.faults`; a test compares. {requirements}
requirements, {faults} seeded faults, each of them a backend (or a prefix cache) that is wrong in one way.

`tests/unit/conformance/test_faults.py` seeds every fault, into the CPU backend or the radix prefix cache, and asserts both ways:
each requirement that a row names fails with the fault, and passes at the same cases without it. An eighth of the faults runs in
`make test`, all of them in `make test-all`. No requirement is without a fault. `kvdock conformance --backend NAME --prove` seeds
them into another backend's own kernels, on its own device.

* **level**: *core* is what an engine needs; *extended* adds the long and the large cases.
* **unless it says no**: a backend that does not claim this is asked the other way round: it must say why, refuse, and change nothing.
* **needs**: what a machine must have for the requirement to be checked there. Elsewhere its refusal is verified.
* **noticed by**: ids without `KVD-`. Each of them must fail with the fault. Those marked `*` notice it only in host memory, where
  an index out of range must raise; `--prove` does not hold other backends to them.
"""


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table; empty columns are left out."""
    every = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    kept = [index for index in range(len(columns)) if any(row[index] for row in every)]
    for row in (columns, ["---"] * len(columns), *every):
        yield f"| {' | '.join(row[index] for index in kept)} |"


def _requirement_row(requirement: Requirement, mutants: int) -> tuple[str, ...]:
    needs = requirement.needs.name if requirement.needs else ""
    return requirement.id, requirement.sentence, requirement.level.value, needs, requirement.hardware, str(mutants)


def _fault_row(fault: Fault) -> tuple[str, ...]:
    killers = [name.removeprefix("KVD-") + ("*" if name in fault.host_only else "") for name in fault.killers]
    return f"`{fault.name}`", fault.sentence, ", ".join(killers)


def _area(area: str, asked: Sequence[Requirement], seeded: Sequence[Fault]) -> Iterator[str]:
    yield from ("", f"## `{area}`", "")
    counts = {item.id: sum(item.id in fault.killers for fault in seeded) for item in asked}
    columns = ("requirement", "what must be so", "level", "unless it says no: it", "needs", "faults")
    yield from _table(columns, [_requirement_row(item, counts[item.id]) for item in asked])
    yield ""
    yield from _table(("fault", "what is wrong", "noticed by"), map(_fault_row, seeded))


def page(every: Requirements, seeded: Mapping[str, Fault]) -> str:
    """Return the page.

    Args:
        every: the requirements of all kinds.
        seeded: the faults by name.
    """
    lines = [_HEAD.format(requirements=len(every), faults=len(seeded)).rstrip()]
    for kind in KINDS:
        asked = every.of_kind(kind)
        for area in asked.areas:
            lines += _area(area, [item for item in asked if item.area == area], [fault for fault in seeded.values() if fault.area == area])
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page to stdout."""
    sys.stdout.write(page(requirements.load(), faults.load()))


if __name__ == "__main__":
    main()
