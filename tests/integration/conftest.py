from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _forked(forks: None) -> None:
    """Let what needs an interpreter of its own have torch at once."""
