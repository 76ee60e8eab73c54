"""Which requirements are too dear for `make test`, and for Triton's interpreter, which runs each program of a grid in Python."""

from __future__ import annotations

import pytest

from kvdock_conformance.cases.computing import COMPUTING
from kvdock_conformance.requirement import Case, Level, Requirement

_OP_OF_ATTENTION = "KVD-OP-{}@paged_attention"
_PAIRS = ("KVD-WRITE-025", "KVD-GATHER-030", "KVD-COPY-028", "KVD-STATIC-023")
_MINUTES = (*_PAIRS, *map(_OP_OF_ATTENTION.format, ("001", "004", "005")))  # of up to 257 sequences; `KVD-ATTN-001` asks of small ones
_SLOW = {
    # What plans, threads, memory and surroundings are asked: each takes the interpreter seconds. What kernels write and compute stays.
    "test_triton_interpreted.py": {
        "KVD-FUZZ-001",
        "KVD-COPY-017",
        *map("KVD-ATTN-{}".format, ("002", "003", "005", "006", "009")),
        *map("KVD-DESC-{}".format, ("002", "003", "004", "013", "014", "015")),
        *("KVD-DEVICE-008", "KVD-ERROR-015"),
        *map("KVD-HYGIENE-{}".format, ("001", "013", "014", "017")),
        *map("KVD-READ-{}".format, ("001", "003")),
        *map("KVD-RESOURCE-{}".format, ("001", "002", "003", "004", "007", "008", "010", "011", "012")),
        *map("KVD-THREAD-{}".format, ("001", "002", "003", "004")),
        *map(_OP_OF_ATTENTION.format, ("002", "006", "007", "008", "009", "010", "011", "012", "013", "014", "015", "018")),
    },
    # `KVD-FUZZ-001` draws such pairs in small calls, and the CPU backend is asked all the same.
    "test_own.py": {
        *_PAIRS,
        "KVD-ATTN-002",
        *map("KVD-HYGIENE-{}".format, ("001", "014", "017")),
        "KVD-READ-003",
        "KVD-RESOURCE-011",
        "KVD-THREAD-004",
        *map(_OP_OF_ATTENTION.format, ("004", "005", "014")),
    },
}
"""By file, what `make test-all` asks only."""


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` looks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out calls of up to 4,097 tokens in every pair of properties: a GPU has them; `KVD-FUZZ-001` draws such pairs in small calls."""
    for item in items:
        if item.path.parent.name == "backends":
            code = item.name.partition("[")[2].rstrip("]")
            if item.path.name == "test_triton_interpreted.py" and code in _MINUTES:
                item.add_marker(pytest.mark.skip(reason="takes minutes under Triton's interpreter; `kvdock conformance` asks it of a GPU"))
            if code in _SLOW.get(item.path.name, ()):
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
