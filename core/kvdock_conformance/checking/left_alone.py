"""What belongs to the user and is no setting: the current folder, and what the garbage collector looks through."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from collections.abc import Iterator

from kvdock_conformance.checking.failure import NonconformanceError

__all__ = ["folder_left_empty", "nothing_frozen"]


@contextlib.contextmanager
def folder_left_empty() -> Iterator[None]:
    """Work in an empty folder for a block.

    Raises:
        NonconformanceError: something is in it then.
    """
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.chdir(folder):
            yield
        left = os.listdir(folder)
        if left:
            raise NonconformanceError("the current folder behind calls", expected="empty, as before", got=", ".join(sorted(left)))


@contextlib.contextmanager
def nothing_frozen() -> Iterator[None]:
    """Let the collector look through no less behind a block. To count takes milliseconds.

    Raises:
        NonconformanceError: more is frozen then. Less may be, where something has ended.
    """
    frozen = gc.get_freeze_count()
    yield
    now = gc.get_freeze_count()
    if now > frozen:
        raise NonconformanceError("objects that are frozen behind calls", expected=frozen, got=now)
