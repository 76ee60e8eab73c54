"""What comes back from saving and loading, and who hears how far they are."""

from __future__ import annotations

from collections.abc import Callable

import attrs

__all__ = ["Loaded", "Meter", "Progress", "Saved"]

Progress = Callable[[int, int], object]
"""``progress(done, total)``, in bytes, from time to time and at the end. What it raises ends the work; then nothing was changed, but that
prefixes which `load_pool` has loaded by then stay."""


@attrs.frozen
class Saved:
    """What was saved.

    Args:
        num_prefixes: prefixes, those that begin with others counted too.
        num_tokens: tokens in blocks that were saved, each block once.
        nbytes: bytes of all files.
        num_files: 1, or the number of parts and the file that names them.
    """

    num_prefixes: int
    num_tokens: int
    nbytes: int
    num_files: int


@attrs.frozen
class Loaded:
    """What was loaded.

    Args:
        num_prefixes: prefixes of the file that are cached now.
        num_saved: prefixes in the file.
        num_tokens: tokens of these prefixes, each block once.
        num_loaded: tokens whose blocks were read; the others were cached before.
    """

    num_prefixes: int
    num_saved: int
    num_tokens: int
    num_loaded: int


class Meter:
    """Tells how many bytes are done.

    Args:
        progress: who is told; None for nobody.
        total: bytes in all.
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, nbytes: int) -> None:
        """Note that so many more are done."""
        self._done += nbytes
        if self._progress is not None and nbytes:
            self._progress(min(self._done, self._total), self._total)

    def finish(self) -> None:
        """Note that all are."""
        if self._progress is not None and self._done < self._total:
            self.add(self._total - self._done)
