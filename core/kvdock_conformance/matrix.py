"""The matrix of requirements and faults as a page: ``python -m kvdock_conformance.matrix > docs/backends/conformance-matrix.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvdock_conformance import faults, requirements
from kvdock_conformance.faults.fault import Fault
from kvdock_conformance.kinds import KINDS
from kvdock_conformance.requirement import Requirement, Requirements
from kvdock_conformance.requirements.ops import REQUIREMENTS as OP_REQUIREMENTS

__all__ = ["ANY_OP", "main", "page"]

ANY_OP = "any_op_of_a_plugin"
_ANY = f"@{ANY_OP}"

_HEAD = """\
# The conformance matrix: requirements, and the faults that prove the checks

Made by `make matrix` from `kvdock_conformance.requirements` and `kvdock_conformance.faults`; a test compares. {requirements}
requirements and {faults} seeded faults. Each fault is a backend (or a prefix cache) that is wrong in one way.

`tests/unit/conformance/test_faults.py` seeds every fault into the CPU backend or the radix prefix cache. It checks that each
requirement in the row fails with the fault, and passes the same cases without it. `make test` runs some of each area's faults,
`make test-all` all of them. Every requirement has a fault. `kvdock conformance --backend NAME --prove` seeds the faults into another
backend's own kernels, on its own device.

The last table is about ops that plugins bring, and about `paged_attention`: each is asked all of it, by cases that its schema makes, and
reported as `KVD-OP-001@rope_caching_`. `tests/unit/conformance/test_any_op.py` seeds these faults into ops of a plugin.

* **level**: *core* is what an engine needs; *extended* adds the long and the large cases.
* **capability**: a backend may say that it lacks this. The kit then checks the refusal instead: the backend must say why, refuse,
  and change nothing.
* **needs**: what a machine must have to check the requirement. Without it, the kit checks the refusal.
* **noticed by**: ids without `KVD-`. Each of these requirements must fail with the fault. Those marked `*` notice it only in host
  memory, where an index out of range must raise; `--prove` does not ask other backends for them.
"""


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table; empty columns are left out."""
    every = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    kept = [index for index in range(len(columns)) if any(row[index] for row in every)]
    for row in (columns, ["---"] * len(columns), *every):
        yield f"| {' | '.join(row[index] for index in kept)} |"


def _requirement_row(requirement: Requirement, mutants: int) -> tuple[str, ...]:
    needs = requirement.needs.name if requirement.needs else ""
    return requirement.id.removesuffix(_ANY), requirement.sentence, requirement.level.value, needs, requirement.hardware, str(mutants)


def _fault_row(fault: Fault) -> tuple[str, ...]:
    killers = [name.removeprefix("KVD-").removesuffix(_ANY) + ("*" if name in fault.host_only else "") for name in fault.killers]
    return f"`{fault.name.removesuffix(_ANY)}`", fault.sentence, ", ".join(killers)


def _area(area: str, asked: Sequence[Requirement], seeded: Sequence[Fault]) -> Iterator[str]:
    yield from ("", f"## `{area}`", "")
    counts = {item.id: sum(item.id in fault.killers for fault in seeded) for item in asked}
    columns = ("requirement", "what must be so", "level", "capability", "needs", "faults")
    yield from _table(columns, [_requirement_row(item, counts[item.id]) for item in asked])
    yield ""
    yield from _table(("fault", "what is wrong", "noticed by"), map(_fault_row, seeded))


def page(every: Requirements, seeded: Mapping[str, Fault], of_ops: Sequence[Requirement] = ()) -> str:
    """Return the page.

    Args:
        every: the requirements of all kinds.
        seeded: the faults by name, those of `ANY_OP` too.
        of_ops: the requirements of each op that a plugin brings, as those of `ANY_OP`.
    """
    count = sum("@" not in item.id for item in every) + len(of_ops)
    lines = [_HEAD.format(requirements=count, faults=len(seeded)).rstrip()]
    for kind in KINDS:
        asked = every.of_kind(kind)
        for area in asked.areas:
            own = [item for item in asked if item.area == area and "@" not in item.id]
            lines += _area(area, own, [fault for fault in seeded.values() if fault.area == area])
    lines += _area(ANY_OP, of_ops, [fault for fault in seeded.values() if fault.area == ANY_OP]) if of_ops else ()
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page to stdout."""
    of_ops = [item.of(ANY_OP) for item in OP_REQUIREMENTS]
    sys.stdout.write(page(requirements.load(), {**faults.load(), **faults.of_ops(of_ops)}, of_ops))


if __name__ == "__main__":
    main()
