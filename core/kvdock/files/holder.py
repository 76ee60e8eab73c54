"""Who holds what files save: a manager with its cache, and whoever keeps states of prefixes beside the pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from kvdock.bits import as_bits
from kvdock.cache.grouped import GroupedCache
from kvdock.cache.memory import allocated
from kvdock.errors import ArgumentTypeError
from kvdock.files.contents import Content, contents_of, taken
from kvdock.files.description import check_pool
from kvdock.layers.groups import LayerGroup
from kvdock.prefix.interface import BlockIds, Namespace
from kvdock.scheduler import CacheManager
from kvdock.scheduler.cached import cached_blocks, unused_size, use_prefix

__all__ = ["Beside", "Holder"]

Ids = npt.NDArray[np.int64]

_BESIDE = "pass who keeps states beside the pool, as a subclass of it; leave it out where the cache has all"


class Beside(ABC):
    """States that are kept beside a pool, behind whole blocks of prefixes: a prompt goes on only where they are, too.

    Tokens are token ids, int64 ``[n]``, of a prefix from its first on. States are tensors by what files name them,
    ``layers.<layer>.<name of the buffer>`` as those of a cache, each of its buffer's shape and dtype.

    Attributes:
        group: what they are: layers that keep states, in the order of ``group.members``.
    """

    group: LayerGroup

    @property
    @abstractmethod
    def unused(self) -> int:
        """Bytes that there is room for without losing others."""

    @abstractmethod
    def lengths(self, tokens: Ids, namespace: Namespace) -> Iterable[int]:
        """Return behind how many of some tokens there are states, in any order; it counts as no use."""

    @abstractmethod
    def get(self, tokens: Ids, namespace: Namespace) -> Mapping[str, torch.Tensor]:
        """Return the states behind some tokens, which are there, by what files name them; it counts as no use."""

    @abstractmethod
    def put(self, tokens: Ids, namespace: Namespace, states: Mapping[str, torch.Tensor]) -> None:
        """Keep states behind some tokens. Tensors are on the host, and the receiver's own."""

    @abstractmethod
    def use(self, tokens: Ids, namespace: Namespace) -> None:
        """Let the states behind some tokens, which are there, be those that were used last."""


class Holder:
    """A manager with its cache, and maybe states beside it, of which files know as of one more layer group.

    Args:
        subject: who is called, for errors.
        manager: hands out the blocks.
        cache: has them.
        beside: keeps states beside them; None where nobody does.

    Attributes:
        groups: all layer groups.
        contents: all buffers.

    Raises:
        ArgumentTypeError, ArgumentValueError, UnsupportedError: see `check_pool`.
    """

    def __init__(self, subject: str, manager: CacheManager, cache: GroupedCache, beside: Beside | None) -> None:
        check_pool(subject, manager, cache)
        if beside is not None and not isinstance(beside, Beside):
            raise ArgumentTypeError(f"{subject}: beside", expected="a kvdock.files.Beside, or None", got=repr(beside)[:80], fix=_BESIDE)
        self.manager, self.cache, self.beside = manager, cache, beside
        self.groups = (*cache.groups, *([] if beside is None else [beside.group]))
        self.contents = contents_of(self.groups)
        self._seen: list[Mapping[str, torch.Tensor]] = []

    def cached(self, tokens: Ids, namespace: Namespace) -> int:
        """Return behind how many tokens of a prefix a prompt can go on, at most."""
        length, _ = cached_blocks(self.manager, tokens, namespace)
        if self.beside is None:
            return length
        size = self.manager.block_size
        for there in sorted(self.beside.lengths(tokens[:length], namespace), reverse=True):
            if there % size == 0 and cached_blocks(self.manager, tokens[:there], namespace)[0] == there:
                return there
        return 0

    def match(self, tokens: Ids, namespace: Namespace) -> tuple[int, tuple[BlockIds, ...]]:
        """Return this, and what `take` takes of each layer group's, by its place among the blocks of units; -1 for what is not there."""
        if self.beside is None:
            return cached_blocks(self.manager, tokens, namespace)
        length = self.cached(tokens, namespace)
        of_states: BlockIds = np.full(length // self.manager.block_size, -1, dtype=np.int32)
        if length:
            of_states[-1] = len(self._seen)
            self._seen.append(self.beside.get(tokens[:length], namespace))
        return length, (*cached_blocks(self.manager, tokens[:length], namespace)[1], of_states)

    def has_room(self, tokens: Ids, namespace: Namespace) -> bool:
        """Whether there is room for what is not there of a prefix, without evicting anything."""
        cached, _ = cached_blocks(self.manager, tokens, namespace)
        if tokens.size - cached > unused_size(self.manager):
            return False
        beside = self.beside
        return beside is None or beside.unused >= beside.group.nbytes or self.cached(tokens, namespace) == tokens.size

    def use(self, tokens: Ids, namespace: Namespace) -> None:
        """Let a prefix that is there be the one that was used last."""
        use_prefix(self.manager, tokens, namespace)
        if self.beside is not None:
            self.beside.use(tokens, namespace)

    def take(self, content: Content, places: BlockIds) -> torch.Tensor:
        """Return blocks of a buffer in the memory of the host, ``[len(places), *content.shape]``, as integers.

        Raises:
            CapacityError: there is not as much memory.
        """
        if content.group < len(self.cache.groups):
            return taken(self.cache, content, places)
        shape, nbytes = (places.size, *content.shape), content.nbytes * places.size
        made = allocated("kvdock.files", nbytes, torch.device("cpu"), lambda: torch.empty(shape, dtype=content.dtype))
        for row, place in zip(made, places.tolist(), strict=True):
            row.copy_(as_bits(self._seen[place][content.name].contiguous()))
        return made
