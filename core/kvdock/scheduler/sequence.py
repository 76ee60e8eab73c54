"""One sequence of a `CacheManager`: its token ids, its blocks, and how far both are good.

::

    tokens:   0 ........ cached_len ........ computed ........ num_tokens
    blocks:   | 7 | 3 | 12 | 5 | 9 | 1 |                      ceil(num_tokens / block_size)
              |<-- shared -->|<- own ->|                      shared ones belong to the prefix cache and are locked; of its
                                                              own ones the sequence, with its forks, is the holder
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.errors import IndexRangeError
from kvdock.prefix.inputs import index_of
from kvdock.prefix.interface import Namespace, PrefixHandle

__all__ = ["CacheSequence", "Growing"]


class Growing:
    """An array that grows at its end, at a constant cost per element."""

    __slots__ = ("_room", "size")

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self._room = values.astype(np.int64) if values.dtype.kind == "u" else values.copy()
        self.size = values.size

    @property
    def view(self) -> npt.NDArray[Any]:
        """The elements in use; good until the next change."""
        return self._room[: self.size]

    def append(self, values: npt.NDArray[Any]) -> None:
        """Add elements. Integers that do not fit the dtype widen it; there are none beyond int64."""
        if values.dtype.kind == "u":
            values = values.astype(np.int64)
        size = self.size + values.size
        dtype = np.promote_types(self._room.dtype, values.dtype) if values.size else self._room.dtype
        if size > self._room.size or dtype != self._room.dtype:
            room = np.empty(max(size, 2 * self._room.size), dtype=dtype)
            room[: self.size] = self.view
            self._room = room
        self._room[self.size : size] = values
        self.size = size

    def copy(self) -> Growing:
        """Return another with the same elements."""
        return Growing(self.view)


class CacheSequence:
    """A sequence that a `CacheManager` has made room for. Only its manager changes it.

    Attributes:
        cached_len: tokens whose keys and values were found when it began; compute from here on.
        computed: tokens whose keys and values are written, as far as the manager was told.
        num_tokens: tokens that there is room for.
        namespace: where its prefix is shared.
        is_open: whether it was neither finished nor aborted.
    """

    def __init__(self, manager: object, block_size: int, ids: Growing, blocks: Growing, namespace: Namespace, priority: int) -> None:
        self.cached_len = self.computed = 0
        self.num_tokens = ids.size
        self.namespace = namespace
        self.is_open = True
        self.block_size = block_size
        self._manager = manager
        self._ids = ids
        self._blocks = blocks
        self._priority = priority
        self._handle: PrefixHandle | None = None
        self._found = 0  # tokens that others had cached, before it or at the same time
        self._shared = 0  # leading blocks that belong to the prefix cache
        self._published = -1  # blocks when it was last inserted; -1 asks for it to be inserted again

    def __repr__(self) -> str:
        state = "" if self.is_open else ", closed"
        return f"CacheSequence(num_tokens={self.num_tokens}, cached_len={self.cached_len}, computed={self.computed}{state})"

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """The token ids that are known; the caller's own array."""
        return self._ids.view.copy()

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """Block ids, int32 ``[ceil(num_tokens / block_size)]``; the caller's own array.

        `CacheManager.commit` and `CacheManager.extend` may change it: ask again for each step.
        """
        return self._blocks.view.copy()

    def slot_mapping(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the slots of tokens ``start`` to ``stop - 1``, int64 ``[stop - start]``.

        Raises:
            IndexRangeError: not ``0 <= start <= stop <= num_tokens``.
        """
        start, stop = (index_of(f"CacheSequence.slot_mapping: {name}", value) for name, value in (("start", start), ("stop", stop)))
        if not 0 <= start <= stop <= self.num_tokens:
            expected = f"0 <= start <= stop <= {self.num_tokens}"
            raise IndexRangeError("CacheSequence.slot_mapping", expected=expected, got=f"start={start}, stop={stop}")
        first = start // self.block_size
        blocks = self._blocks.view[first : -(-stop // self.block_size)].astype(np.int64)
        slots = (blocks * self.block_size)[:, None] + np.arange(self.block_size)
        return slots.ravel()[start - first * self.block_size : stop - first * self.block_size]
