"""The messages, and how they are written: three frames, a topic, a sequence number and a batch in msgpack.

A batch is an array, ``[seconds, events, data_parallel_rank]``. Its events are maps with the name of the event under ``type``, as vLLM
and SGLang write them now, or arrays that begin with the name, as they did before (up to 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import attrs
import msgpack
import numpy as np
import numpy.typing as npt

__all__ = [
    "END",
    "SEQUENCE_BYTES",
    "AllBlocksCleared",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "ExtraKey",
    "KVEvent",
    "KVEventBatch",
    "Writer",
    "sequence_frame",
    "short_hash",
]

SEQUENCE_BYTES = 8
END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""In the place of a sequence number: a replay is over."""

BlockHash: TypeAlias = int | bytes
"""What a block is called on the wire: 64 bits, or the whole name."""

ExtraKey: TypeAlias = str | bytes | int | float | bool | tuple[str, int]
"""What else a block was computed with, such as a salt, or an image with its place."""


@attrs.frozen
class BlockStored:
    """Blocks that were stored, one behind the other.

    Args:
        block_hashes: their names.
        parent_block_hash: that of the block before the first, or None at the beginning of a prefix.
        token_ids: of all of them, ``[len(block_hashes) * block_size]``.
        block_size: tokens in a block.
        lora_id: number of the adapter, from 0.
        medium: where they are, such as ``"GPU"``.
        lora_name: name of the adapter.
        extra_keys: for each block what else it was computed with, or None; of a salt the first block of a prefix tells.
        group_idx: layer group, where a publisher tells of them one by one.
        cache_salt: the salt by itself, in events that are maps.
    """

    block_hashes: Sequence[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Sequence[int] | npt.NDArray[np.int64]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Sequence[tuple[ExtraKey, ...] | None] | None = None
    group_idx: int | None = None
    cache_salt: str | None = None


@attrs.frozen
class BlockRemoved:
    """Blocks that are gone.

    Args:
        block_hashes: their names.
        medium: where they were.
        group_idx: as in `BlockStored`.
    """

    block_hashes: Sequence[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


@attrs.frozen
class AllBlocksCleared:
    """All blocks of a rank are gone. Some readers take it for all ranks of the publisher."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


@attrs.frozen
class KVEventBatch:
    """Events of one rank, in order.

    Args:
        ts: seconds since 1970.
        events: the events.
        data_parallel_rank: whose they are; None counts as 0.
    """

    ts: float
    events: Sequence[KVEvent]
    data_parallel_rank: int | None = None


def sequence_frame(number: int) -> bytes:
    """Return the frame of a sequence number."""
    return number.to_bytes(SEQUENCE_BYTES, "big")


def short_hash(name: BlockHash) -> int:
    """Return the last 64 bits of a name, which vLLM takes, too, where hashes are integers."""
    return name if isinstance(name, int) else int.from_bytes(name[-8:], "big")


@attrs.frozen
class Writer:
    """Writes batches.

    Args:
        arrays: events as arrays, for readers from before vLLM wrote maps.
        whole_names: whole names as bytes, instead of their last 64 bits.
        medium: where the blocks are.
    """

    arrays: bool = False
    whole_names: bool = False
    medium: str | None = "GPU"

    def payload(self, batch: KVEventBatch) -> bytes:
        """Return a batch as msgpack."""
        events = [self._event(event) for event in batch.events]
        packed: bytes = msgpack.packb([batch.ts, events, batch.data_parallel_rank])
        return packed

    def answer(self, topic: bytes, number: bytes, payload: bytes) -> tuple[bytes, ...]:
        """Return the frames of a message of a replay: without its topic for readers from before."""
        return (number, payload) if self.arrays else (topic, number, payload)

    def _event(self, event: KVEvent) -> dict[str, Any] | list[Any]:
        """Return an event as what is packed. Fields at the end that nobody set are left out, as msgspec does."""
        fields = self._fields(event)
        kind = type(event).__name__
        if self.arrays:
            return [kind, *fields.values()]
        return {"type": kind, **fields}

    def _fields(self, event: KVEvent) -> dict[str, Any]:
        if isinstance(event, AllBlocksCleared):
            return {}
        fields: dict[str, Any] = {"block_hashes": [self._hash(name) for name in event.block_hashes]}
        if isinstance(event, BlockStored):
            fields["parent_block_hash"] = None if event.parent_block_hash is None else self._hash(event.parent_block_hash)
            fields["token_ids"] = np.asarray(event.token_ids).tolist()
            fields |= {"block_size": event.block_size, "lora_id": event.lora_id, "medium": self.medium, "lora_name": event.lora_name}
            if event.extra_keys is not None:
                fields["extra_keys"] = event.extra_keys
            if event.cache_salt is not None and not self.arrays:
                fields["cache_salt"] = event.cache_salt
            return fields
        return {**fields, "medium": self.medium}

    def _hash(self, name: BlockHash) -> BlockHash:
        return name if self.whole_names else short_hash(name)
