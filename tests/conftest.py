"""What must be so before any test imports torch, and before the first test runs."""

import contextlib
import gc
import os

import pytest

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


def _set_apart() -> None:
    gc.collect()
    gc.freeze()
