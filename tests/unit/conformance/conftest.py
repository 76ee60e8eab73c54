from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _forked(forks: None) -> None:
    """Most of these tests start a child, which imports torch."""
