"""Every test here runs Triton's kernels under its interpreter, by the name of a backend that a third party could have written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from opskit import Memory, Target, active
from opskit.interpreted import INTERPRETED, WHY_NOT


@pytest.fixture(autouse=True)
def target() -> Iterator[Target]:
    """Serve `kvdock.ops` by the interpreted kernels."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    with active(INTERPRETED.runtime, "acme"):
        yield INTERPRETED


@pytest.fixture
def memory(target: Target) -> Memory:
    """Return memory that kernels can address."""
    return Memory(target.device)
