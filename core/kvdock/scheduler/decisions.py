"""A digest of what a manager was told and what it decided, which ranks compare: they must decide alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentValueError
from kvdock.prefix.ownership import OneThread

__all__ = ["Decisions", "Digested", "Noting"]

_BEGIN = b"kvdock decisions 1\0"


class Decisions:
    """A chain: each entry goes into the digest of all that follow."""

    __slots__ = ("_sha",)

    def __init__(self) -> None:
        self._sha = hashlib.sha256(_BEGIN)

    def note(self, what: bytes, *values: npt.NDArray[Any] | int) -> None:
        """Add an entry. Integers of any kind count alike, so that ranks may pass them in different ones."""
        for each in values:
            data = np.asarray(each).astype("<i8").tobytes()
            self._sha.update(b"%b %d\0" % (what, len(data)))
            self._sha.update(data)

    def digest(self) -> bytes:
        """Return the digest so far, 32 bytes."""
        return self._sha.digest()


class Noting(Protocol):
    """What notes its decisions where somebody wants them."""

    decisions: Decisions | None


class Digested(OneThread):
    """Base of a manager: its digest, once somebody wants one. Until then nothing is noted, and nothing is paid for it.

    A manager says in ``_noting`` what decides: its allocators, and what has the token ids.
    """

    _decisions: Decisions | None = None
    _noting: Iterable[Noting]

    def keep_digest(self) -> None:
        """Note from now on, for `digest`: token ids, and which blocks are handed out and given back, in their order.

        All ranks begin at the same call, such as right behind the constructor. A second call changes nothing.
        """
        self._enter()
        if self._decisions is None:
            self._decisions = Decisions()
            for each in self._noting:
                each.decisions = self._decisions

    def digest(self) -> bytes:
        """Return a digest of what was decided since `keep_digest`, 32 bytes: ranks that were fed the same calls have the same.

        Ranks that once decided differently differ from then on. `kvdock.distributed.check_alike` compares them.

        Raises:
            ArgumentValueError: nothing is noted.
        """
        self._enter()
        if self._decisions is None:
            expected, fix = "keep_digest() before", "call it when the manager is made, on every rank"
            raise ArgumentValueError("CacheManager.digest", expected=expected, got="a manager that notes nothing", fix=fix)
        return self._decisions.digest()
