"""Everything here needs a GPU, and is skipped with a reason where torch sees none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder."""
    is_here = {path: HERE in path.parents for path in {item.path for item in items}}
    for item in items:
        if is_here[item.path]:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


@pytest.fixture(autouse=True)
def fast_calls_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settle a call the first time that its strides are read, so that few repeats are enough to launch what was settled."""
    monkeypatch.setattr("kvdock.ops.signatures.FIRST_WORTH", 1)
