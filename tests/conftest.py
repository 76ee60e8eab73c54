"""What must be so before any test imports torch, and before the first test runs."""

import contextlib
import gc
import logging
import os
from collections import defaultdict
from collections.abc import Iterator

import pytest

from support_forked import Server, forking
from support_slow import FEW, QUICK, combination_of, covering, examples

with contextlib.suppress(ImportError):  # what runs on a GPU's machine needs none
    from hypothesis import settings

    # An example that takes long on a busy machine is not wrong.
    settings.register_profile("kvdock", deadline=None, max_examples=examples(100))
    settings.load_profile("kvdock")

# Waiting threads must sleep: pytest-xdist runs as many processes as there are cores, and tests with two torch threads in each
# take twenty times as long when OpenMP's threads spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while tests are collected, in each worker: it takes a sixth of the time, and nothing of it is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` looks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave combinations of parameters to `make test-all` where they multiply: `make test` runs as few as have each value."""
    functions: dict[tuple[pytest.Item | pytest.Collector | None, str], list[pytest.Item]] = defaultdict(list)
    for item in items if QUICK else ():
        if not item.get_closest_marker("slow"):
            functions[item.parent, item.name.partition("[")[0]].append(item)
    for several in functions.values():
        kept = covering([*map(combination_of, several)]) if len(several) > FEW else range(len(several))
        for place, item in enumerate(several):
            if place not in kept:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of later garbage collections, for which many tests ask."""
    _set_apart()
    for name in logging.root.manager.loggerDict:
        # pytest adds a handler to each logger that hands nothing on, six times in a test: torch has forty, a tenth of a short test.
        if name.partition(".")[0] == "torch" and name != "torch.__trace":
            logging.getLogger(name).propagate = True


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Leave out what a folder's tests have imported and drawn, too: there are hundreds of MiB of cases."""
    if nextitem and nextitem.path.parent != item.path.parent:
        _set_apart()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[Server | None]:
    """The process that has imported torch; none in `make test-all`, where scripts start as users start them."""
    server = Server() if QUICK else None
    yield server
    if server:
        server.close()


@pytest.fixture(scope="module")
def forks(fork_server: Server | None) -> Iterator[None]:
    """Fork the scripts that a module's tests start: see `support_forked`."""
    with forking(fork_server) if fork_server else contextlib.nullcontext():
        yield


def _set_apart() -> None:
    gc.collect()
    gc.freeze()
