from __future__ import annotations

from collections.abc import Iterator

import pytest

from support_scripts import Interpreters


@pytest.fixture(scope="session")
def interpreters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreters]:
    """Run scripts that exit and fork."""
    made = Interpreters(tmp_path_factory.mktemp("scripts"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def fast_calls_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a call be settled the first time that its strides are read, so that few repeats are enough to see what comes of it."""
    monkeypatch.setattr("kvdock.ops.signatures.FIRST_WORTH", 1)
