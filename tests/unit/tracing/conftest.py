"""What each test starts with: nothing compiled, and warnings of torch's own compiler about itself let through."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let torch's compiler warn of what it does itself."""
    for item in items:
        if "tracing" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("default:::torch"))


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
