"""Which blocks one prefix cache has, by the events that it sends, with the names that follow from what they hold."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.errors import IntegrityError
from kvdock.integrations.kv_events.fields import WireFields
from kvdock.integrations.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvdock.prefix import PrefixEvent, Removed, Stored, block_names

__all__ = ["TOKENS_PER_EVENT", "Ledger"]

TOKENS_PER_EVENT = 2**16
"""A longer prompt becomes several events, so that no message is larger than readers take."""


@attrs.frozen(eq=False)
class _Block:
    name: bytes
    parent: bytes | None
    tokens: npt.NDArray[np.int64]
    fields: WireFields


class Ledger:
    """Names of the blocks of one prefix cache, by their ids, from the first event on.

    A block is here before what is stored behind it, and goes after that: so the order of `_blocks` is one in which a reader can be
    told of all of them.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[int, _Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def read(self, event: PrefixEvent) -> list[KVEvent]:
        """Follow an event, and return what to tell of it.

        Raises:
            IntegrityError: an event before this one was lost: nobody knows the block before.
        """
        if isinstance(event, Stored):
            return [*self._in_order(self._store(event))]
        if isinstance(event, Removed):
            return self._remove(event)
        self._blocks.clear()
        return [AllBlocksCleared()]

    def everything(self) -> Iterator[BlockStored]:
        """Yield all that is stored, each block behind the one before it."""
        return self._in_order(list(self._blocks.values()))

    def _store(self, event: Stored) -> list[_Block]:
        before = None if event.parent is None else self._name(event.parent)
        names = block_names(event.tokens, self._block_size, event.namespace, parent=before)
        fields = WireFields.of(event.namespace)
        rows = event.tokens.reshape(-1, self._block_size)
        stored = [_Block(*each, fields) for each in zip(names, [before, *names[:-1]], rows, strict=True)]
        self._blocks.update(zip(event.blocks.tolist(), stored, strict=True))
        return stored

    def _remove(self, event: Removed) -> list[KVEvent]:
        # Of one whose storing was lost no reader was told.
        names = [self._blocks.pop(block).name for block in event.blocks.tolist() if block in self._blocks]
        return [BlockRemoved(names)] if names else []

    def _name(self, block: int) -> bytes:
        found = self._blocks.get(block)
        if found is None:
            raise IntegrityError(
                "KVEventPublisher",
                expected=f"block {block} to be stored by an earlier event",
                got="none that stores it: an event was lost",
                fix="call manager.reset(), after which everything is known again",
            )
        return found.name

    def _in_order(self, blocks: list[_Block]) -> Iterator[BlockStored]:
        """Yield events for blocks: one for each run in which each block is behind the one before."""
        most = max(TOKENS_PER_EVENT // self._block_size, 1)
        run: list[_Block] = []
        for block in blocks:
            if run and (block.parent != run[-1].name or len(run) == most):
                yield self._event(run)
                run = []
            run.append(block)
        if run:
            yield self._event(run)

    def _event(self, run: list[_Block]) -> BlockStored:
        first, fields = run[0], run[0].fields
        extra = [fields.extra, *[None] * (len(run) - 1)] if first.parent is None and fields.extra else None
        tokens = np.concatenate([block.tokens for block in run])
        names = [block.name for block in run]
        return BlockStored(
            names,
            first.parent,
            tokens,
            self._block_size,
            lora_id=fields.lora_id,
            lora_name=fields.lora_name,
            extra_keys=extra,
            cache_salt=fields.salt,
        )
