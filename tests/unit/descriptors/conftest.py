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
