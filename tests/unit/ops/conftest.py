"""Every target that an op can run on, as a fixture, and fast calls from the first repeat on."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from kvdock.ops import signatures
from opskit import SINGLE, Memory, Target, active, torch_threads


def interpreted() -> tuple[Any, ...]:
    """Return Triton's interpreter as a target where it was asked for: `tests/unit/test_triton_interpreted.py` asks."""
    if importlib.util.find_spec("kvdock_triton") is None:
        return ()
    from opskit.interpreted import INTERPRETED, WHY_NOT

    return () if WHY_NOT else (pytest.param(INTERPRETED, id="interpreted", marks=pytest.mark.slow),)


ALL = (*SINGLE, *interpreted())


@pytest.fixture(params=ALL)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """Run the test on each target, with one thread unless it names `TARGETS`, through the public functions."""
    chosen: Target = request.param
    with active(chosen.runtime, "portable" if chosen.name == "portable" else None), torch_threads(chosen.threads):
        yield chosen


@pytest.fixture
def memory(target: Target) -> Memory:
    """Return memory on the target's device."""
    return Memory(target.device)


@pytest.fixture(autouse=True)
def soon(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a fast call of a pattern of strides the first time that it is read, so that a few repeats go each way there is.

    Tests that use `real_number` wait as long as a program does.
    """
    if "real_number" not in request.fixturenames:
        monkeypatch.setattr(signatures, "FIRST_WORTH", 1)


@pytest.fixture
def real_number() -> int:
    """Return how often a pattern of strides is read before it is settled, and leave it so: see `soon`."""
    return signatures.FIRST_WORTH
