"""What must be so before any test imports torch, and before the first test runs."""

import contextlib
import gc
import os
from collections.abc import Iterator

import pytest

from support_forked import Server, forking

with contextlib.suppress(ImportError):  # what runs on a GPU's machine needs none
    from hypothesis import settings

    # An example that takes long on a busy machine is not wrong.
    settings.register_profile("kvdock", deadline=None)
    settings.load_profile("kvdock")

# Waiting threads must sleep: pytest-xdist runs as many processes as there are cores, and tests with two torch threads in each
# take twenty times as long when OpenMP's threads spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of later garbage collections, for which many tests ask."""
    _set_apart()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Leave out what a folder's tests have imported and drawn, too: there are hundreds of MiB of cases."""
    if nextitem and nextitem.path.parent != item.path.parent:
        _set_apart()


@pytest.fixture(scope="session")
def fork_server(request: pytest.FixtureRequest) -> Iterator[Server | None]:
    """The process that has imported torch; none in `make test-all`, where scripts start as users start them."""
    if request.config.option.markexpr != "not slow":
        yield None
        return
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def forks(fork_server: Server | None) -> Iterator[None]:
    """Fork the scripts that a module's tests start: see `support_forked`."""
    with forking(fork_server) if fork_server else contextlib.nullcontext():
        yield


def _set_apart() -> None:
    gc.collect()
    gc.freeze()
