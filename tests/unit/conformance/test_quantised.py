"""The requirements about quantised pools, which no built-in backend serves yet: a kernel that does it right passes them."""

from __future__ import annotations

import pytest

from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock_conformance.cases.random_calls import SeededChooser, random_case
from kvdock_conformance.checking.drawn import check_drawn
from kvdock_conformance.checking.served import reasons_against
from kvdock_conformance.checking.target import Target
from kvdock_conformance.faults.quantised import QuantisedKernel, Quantises, Reads
from kvdock_conformance.requirement import Case, Level
from kvdock_conformance.requirements import load
from kvdock_conformance.stand_ins import StandIn, register_backend

WRITES, READS = load()["KVD-WRITE-022"], load()["KVD-GATHER-028"]


class Writer(QuantisedKernel):
    """Serves quantised caches."""

    descriptor = Quantises


class Reader(QuantisedKernel):
    """Serves quantised pools."""

    descriptor = Reads


@pytest.fixture(scope="session")  # a name is registered once in a process, whose tests of other modules may come in between
def target() -> Target:
    kernels = {"paged_caching_": Writer(PORTABLE_KERNELS["paged_caching_"]), "gather_paged": Reader(PORTABLE_KERNELS["gather_paged"])}
    register_backend(StandIn("quantises", kernels))
    return Target("quantises")


@pytest.mark.parametrize("case", WRITES.selected(Level.CORE), ids=lambda case: case.name)
def test_what_is_stored_right_passes(target: Target, case: Case) -> None:
    assert WRITES.needs is not None
    assert list(WRITES.needs.reasons(target, case.data)) == []
    WRITES.check(target, case.data)


@pytest.mark.parametrize("case", READS.selected(Level.CORE), ids=lambda case: case.name)
def test_what_is_read_right_passes(target: Target, case: Case) -> None:
    assert READS.needs is not None
    assert list(READS.needs.reasons(target, case.data)) == []
    READS.check(target, case.data)


@pytest.mark.parametrize("op", ["paged_caching_", "gather_paged"])
def test_what_is_drawn_of_quantised_pools_passes(target: Target, op: str) -> None:
    drawn = [data for data in (random_case(SeededChooser(seed), (op,)) for seed in range(120)) if "k_scale" in data["calls"][0]["args"]]
    assert len(drawn) > 3
    for data in drawn:
        assert list(reasons_against(target, data)) == []
        check_drawn(target, data)
