"""Many faults over tiers, files and transfers: nothing is lost that was promised, and nothing wrong is served.

``KVDOCK_FAULTS=10000 pytest -m slow -s tests/faults`` injects so many, and prints what they were. A history that ends otherwise is
named by its kind and seed: ``KVDOCK_FAULTS_SEED`` begins with another.
"""

from __future__ import annotations

import os
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvdock.errors import KVDockWarning
from support_fault_files import file_history
from support_fault_mixed import mixed_history
from support_fault_tiers import tier_history
from support_faults import Faults
from support_world import transfer_history

HISTORIES: dict[str, Callable[[Faults], None]] = {
    "tiers": tier_history,
    "files": file_history,
    "transfers": transfer_history,
    "all three": mixed_history,
}


@contextmanager
def told_of_tiers() -> Iterator[None]:
    """Let managers warn of tiers that fail."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KVDockWarning)
        yield


class Record:
    """Counts what was injected, and how it ended."""

    def __init__(self) -> None:
        self.injected, self.kept, self.ends = Counter[tuple[str, str]](), Counter[tuple[str, str]](), Counter[tuple[str, str, str]]()
        self.broken: list[str] = []

    def run(self, part: str, seed: int) -> None:
        """Run a history; where it does not end as promised none of its faults did."""
        faults = Faults(random.Random(f"{part} {seed}"))  # noqa: S311 - what is drawn is a test case
        try:
            with told_of_tiers():
                HISTORIES[part](faults)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self.broken.append(f"{part}, seed {seed}: {''.join(traceback.format_exception(error, limit=-5))}")
            faults.note("a history that did not end as promised")
        else:
            self.kept.update({(part, kind): count for kind, count in faults.injected.items()})
        self.injected.update({(part, kind): count for kind, count in faults.injected.items()})
        self.ends.update({(part, *end): count for end, count in faults.ends.items()})

    def of(self, part: str) -> int:
        return sum(count for (of, _), count in self.injected.items() if of == part)

    def table(self) -> str:
        """Return all of it as Markdown."""
        lines = ["| in histories of | fault | injected | ended as promised | how |", "|---|---|---:|---:|---|"]
        for (part, kind), count in sorted(self.injected.items(), key=lambda item: ([*HISTORIES].index(item[0][0]), item[0][1])):
            how = "; ".join(f"{end}: {times}" for (of, what, end), times in sorted(self.ends.items()) if (of, what) == (part, kind))
            lines.append(f"| {part} | {kind} | {count:,} | {self.kept[part, kind]:,} | {how} |")
        lines.append(f"| all | | {self.injected.total():,} | {self.kept.total():,} | |")
        beside = Counter[str]()
        for (_, kind, end), times in self.ends.items():
            beside.update({end: times} if not kind else {})
        return "\n".join([*lines, "", "Beside them: " + ", ".join(f"{times:,} {end}" for end, times in sorted(beside.items())) + "."])


@pytest.mark.parametrize("part", ["tiers", "transfers", "all three"])
def test_a_few_faults(part: str) -> None:
    faults = Faults(random.Random(part))  # noqa: S311 - as above
    with told_of_tiers():
        HISTORIES[part](faults)
    assert faults.injected.total() > 5


@pytest.mark.slow
def test_many_faults() -> None:
    total, seed = int(os.environ.get("KVDOCK_FAULTS", "400")), int(os.environ.get("KVDOCK_FAULTS_SEED", "0"))
    record, begun, started = Record(), Counter[str](), time.monotonic()
    while record.injected.total() < total:
        part = min(HISTORIES, key=record.of)  # a quarter of each
        record.run(part, seed + begun[part])
        begun[part] += 1
    print(f"\n{dict(begun)} histories from seed {seed} on, {time.monotonic() - started:.0f} s\n\n{record.table()}")
    assert not record.broken, "\n".join(record.broken)
    assert record.kept == record.injected
    assert min(map(record.of, HISTORIES)) >= total // 8, "faults of every part"
