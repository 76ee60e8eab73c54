"""Every target that an op can run on, as a fixture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from opskit import TARGETS, Memory, Target, active, torch_threads
from opskit.interpreted import INTERPRETED, WHY_NOT

ALL = TARGETS if WHY_NOT else (*TARGETS, pytest.param(INTERPRETED, id="interpreted", marks=pytest.mark.slow))
"""With Triton's interpreter only where it was asked for: `tests/unit/test_triton_interpreted.py` asks."""


@pytest.fixture(params=ALL)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """Run the test on each target, through the public functions."""
    chosen: Target = request.param
    with active(chosen.runtime, "portable" if chosen.name == "portable" else None), torch_threads(chosen.threads):
        yield chosen


@pytest.fixture
def memory(target: Target) -> Memory:
    """Return memory on the target's device."""
    return Memory(target.device)
