"""The current folder, which belongs to the user."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

from kvdock_conformance.checking.failure import NonconformanceError

__all__ = ["folder_left_empty"]


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
