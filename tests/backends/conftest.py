"""Which requirements are too dear for `make test`, and for Triton's interpreter, which runs each program of a grid in Python."""

from __future__ import annotations

import random

import pytest
import torch

from kvdock_conformance.cases.computing import COMPUTING
from kvdock_conformance.requirement import Case, Level, Requirement
from support_slow import QUICK

_OP_OF_ATTENTION = "KVD-OP-{}@paged_attention"
_PAIRS = ("KVD-WRITE-025", "KVD-GATHER-030", "KVD-COPY-028", "KVD-STATIC-023")
_OF_LATENTS = ("KVD-MLA-014", "KVD-MLAREAD-014")  # rows of every size; the CPU backend is asked of them
_MINUTES = (*_PAIRS, *map(_OP_OF_ATTENTION.format, ("001", "004", "005")))  # of up to 257 sequences; `KVD-ATTN-001` asks of small ones
_OF_ATTENTION = (*map(_OP_OF_ATTENTION.format, ("004", "005", "014")), "KVD-ATTN-002")
_AROUND = tuple(map("KVD-{}-".format, ("DESC", "DEVICE", "ERROR", "FUZZ", "HYGIENE", "READ", "RESOURCE", "THREAD")))
_SLOW = {
    # What a fresh interpreter imports, and how it ends, is asked in `tests/architecture` and `tests/unit/descriptors` too.
    "test_cpu.py": (*_OF_ATTENTION, *map("KVD-HYGIENE-{}".format, ("001", "014", "017")), "KVD-READ-003", "KVD-THREAD-003"),
    # `tests/unit/prefix/test_faults.py` asks two processes alike.
    "test_prefix_caches.py": ("KVD-PREFIX-015",),
    # `KVD-FUZZ-001` draws such pairs in small calls, and the CPU backend is asked all the same: what is around a call is kvdock's own.
    "test_own.py": (*_PAIRS, *_OF_LATENTS, *_AROUND, "KVD-ATTN-002", "KVD-OP-"),
    # What is asked of plans, threads, memory and surroundings takes the interpreter seconds. What kernels write and compute stays.
    "test_triton_interpreted.py": (
        *_AROUND,
        *_OF_LATENTS,
        "KVD-COPY-017",
        "KVD-SWAP-022",
        *map("KVD-ATTN-{}".format, ("001", "002", "003", "005", "006", "009", "011")),
        "KVD-OP-",
    ),
}
"""By file, what `make test-all` asks only: requirements, and areas of them."""

_DRAWN = {"test_prefix_caches.py": 4, "test_triton_interpreted.py": 4}
"""By file, how many cases of a requirement `make test` asks at most: of other files 5. `make test-all` asks each."""


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` looks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out calls of up to 4,097 tokens in every pair of properties: a GPU has them; `KVD-FUZZ-001` draws such pairs in small calls."""
    said = set()
    for item in items:
        if item.path.parent.name == "backends":
            code = item.name.partition("[")[2].rstrip("]")
            if item.path.name in ("test_cuda.py", "test_rocm.py") and not torch.cuda.is_available():
                if item.path in said:  # where there is no GPU, one item says so in `make test`
                    item.add_marker(pytest.mark.slow)
                said.add(item.path)
            if item.path.name == "test_triton_interpreted.py" and code in _MINUTES:
                item.add_marker(pytest.mark.skip(reason="takes minutes under Triton's interpreter; `kvdock conformance` asks it of a GPU"))
            if code.startswith(_SLOW.get(item.path.name, ())):
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _fewer_cases(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask some cases only: in `make test` of any backend, and of the interpreter of requirements that go over every op.

    There a case of an op that computes takes seconds or minutes: it is asked elsewhere, and a GPU has them.
    """
    own, count = Requirement.selected, _DRAWN.get(request.path.name, 5)
    is_interpreted = request.path.name == "test_triton_interpreted.py"

    def selected(self: Requirement, level: Level) -> list[Case]:
        cases = own(self, level)
        if is_interpreted and self.area not in COMPUTING:
            cases = [case for case in cases if not _ops_of(case) & {*COMPUTING}]
        if QUICK and len(cases) > count:
            drawn = random.Random(self.id).sample(range(len(cases)), count)  # noqa: S311 - the same in every run
            cases = [cases[number] for number in sorted(drawn)]
        return cases

    monkeypatch.setattr(Requirement, "selected", selected)


def _ops_of(case: Case) -> set[str]:
    return {call["op"] for call in case.data.get("calls", ())} | {case.data.get("op", "")}
