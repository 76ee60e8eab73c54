"""Which requirements are too dear for Triton's interpreter, which runs each program of a grid in Python."""

from __future__ import annotations

import pytest

from kvdock_conformance.cases.computing import COMPUTING
from kvdock_conformance.requirement import Case, Level, Requirement

_ATTENTION = "KVD-OP-{}@paged_attention"
_MINUTES = (
    *("KVD-WRITE-025", "KVD-GATHER-030", "KVD-COPY-028", "KVD-STATIC-023"),
    *map(_ATTENTION.format, ("001", "004", "005")),  # of up to 257 sequences; `KVD-ATTN-001` asks of small ones
)
_SLOW = (
    *(
        "KVD-FUZZ-001",
        "KVD-COPY-017",
        "KVD-RESOURCE-003",
        "KVD-RESOURCE-008",
        "KVD-RESOURCE-011",
        "KVD-READ-003",
        "KVD-ATTN-002",
        "KVD-ATTN-009",
        "KVD-HYGIENE-017",
        *("KVD-THREAD-001", "KVD-THREAD-002", "KVD-THREAD-003"),
    ),
    *map(_ATTENTION.format, ("006", "008", "010", "011", "012", "013", "014", "015")),
)


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` looks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out calls of up to 4,097 tokens in every pair of properties: a GPU has them; `KVD-FUZZ-001` draws such pairs in small calls."""
    for item in items:
        if item.path.name == "test_triton_interpreted.py" and item.path.parent.name == "backends":
            code = item.name.partition("[")[2].rstrip("]")
            if code in _MINUTES:
                item.add_marker(pytest.mark.skip(reason="takes minutes under Triton's interpreter; `kvdock conformance` asks it of a GPU"))
            if code in _SLOW:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _what_computes_is_asked_elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave ops that compute out of requirements that go over every op: a case takes seconds or minutes. A GPU has them."""
    own = Requirement.selected

    def selected(self: Requirement, level: Level) -> list[Case]:
        shared = self.area not in COMPUTING
        return [case for case in own(self, level) if not (shared and _ops_of(case) & {*COMPUTING})]

    if request.path.name == "test_triton_interpreted.py":
        monkeypatch.setattr(Requirement, "selected", selected)


def _ops_of(case: Case) -> set[str]:
    return {call["op"] for call in case.data.get("calls", ())} | {case.data.get("op", "")}
