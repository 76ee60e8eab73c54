"""Which ranks have which blocks, by what publishers told."""

from __future__ import annotations

from typing import Any

from kvdock.checks import check_int
from kvdock.errors import ArgumentTypeError, ArgumentValueError, CapacityError
from kvdock.integrations.kv_events.wire import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent, KVEventBatch, short_hash
from kvdock.prefix import Namespace, block_names
from kvdock.prefix.inputs import MAX_BLOCK_SIZE

__all__ = ["BlockIndex"]


class _Rank:
    def __init__(self) -> None:
        self.parents: dict[BlockHash, BlockHash | None] = {}
        self.block_size = 0


class BlockIndex:
    """The blocks of each rank of a publisher, with the one before each.

    Events of layer groups other than the first are not looked at: one that a prefix needs is in all of them or in none that helps.
    Belongs to one thread at a time, as the subscriber that fills it.

    Args:
        max_blocks: blocks of all ranks: a publisher that tells of more is refused.
    """

    def __init__(self, max_blocks: int = 2**22) -> None:
        self._most = check_int("BlockIndex: max_blocks", max_blocks, 1)
        self._ranks: dict[int, _Rank] = {}
        self._sure: set[int] | None = None

    def __repr__(self) -> str:
        return f"BlockIndex({ {rank: len(self.parents(rank)) for rank in self.ranks} })"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that were heard of, in order."""
        return tuple(sorted(self._ranks))

    def parents(self, rank: int = 0) -> dict[BlockHash, BlockHash | None]:
        """Return the blocks of a rank, each with the one before it: the index's own, not to be changed."""
        return self._ranks[rank].parents if rank in self._ranks else {}

    def is_complete(self, rank: int = 0) -> bool:
        """Whether nothing was missed that the rank stored or removed, since it was last cleared."""
        return self._sure is None or rank in self._sure

    def doubt(self) -> None:
        """Note that events were missed: each rank is incomplete until it is cleared."""
        self._sure = set()

    def forget(self) -> None:
        """Forget everything, as when a publisher has begun anew."""
        self._ranks.clear()
        self._sure = None

    def cached_len(self, tokens: Any, namespace: Namespace = (), rank: int = 0) -> int:
        """Return how many tokens of a prompt a rank has; of a publisher that calls blocks by kvdock's names.

        Args:
            tokens: ids ``[n]``.
            namespace: as in the manager.
            rank: the rank.

        Raises:
            ArgumentTypeError, ArgumentValueError: as `kvdock.prefix.block_names`.
        """
        found = self._ranks.get(rank)
        if found is None or not 0 < found.block_size <= MAX_BLOCK_SIZE:  # kvdock has no names for larger ones
            return 0
        names = block_names(tokens, found.block_size, namespace)
        count = next((place for place, name in enumerate(names) if not found.parents.keys() & {name, short_hash(name)}), len(names))
        return count * found.block_size

    def apply(self, batch: KVEventBatch) -> None:
        """Follow a batch.

        Raises:
            CapacityError: more blocks than ``max_blocks``, at any event of the batch; or more ranks.
            ArgumentTypeError, ArgumentValueError: no batch; blocks of another size than the rank has. Nothing was changed by any.
        """
        if not isinstance(batch, KVEventBatch):
            raise ArgumentTypeError(
                "BlockIndex.apply: batch", expected="a KVEventBatch", got=repr(batch)[:80], fix="read it with read_batch"
            )
        rank = batch.data_parallel_rank or 0
        events = [event for event in batch.events if isinstance(event, AllBlocksCleared) or not event.group_idx]
        self._check(rank, events)
        mine = self._ranks.setdefault(rank, _Rank())
        for event in events:
            if isinstance(event, BlockStored):
                if not event.block_hashes:
                    continue
                mine.block_size = event.block_size
                mine.parents.update(zip(event.block_hashes, [event.parent_block_hash, *event.block_hashes], strict=False))
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    mine.parents.pop(name, None)
            else:
                mine.parents.clear()
                if self._sure is not None:
                    self._sure.add(rank)

    def _check(self, rank: int, events: list[KVEvent]) -> None:
        """Count what there will be behind each event: a batch may remove and clear what it stores, and store what is there."""
        if rank not in self._ranks and len(self._ranks) >= self._most:
            raise self._full(f"{len(self._ranks) + 1} ranks")
        mine = self.parents(rank).keys()
        others = sum(len(each.parents) for each in self._ranks.values()) - len(mine)
        size, count = self._ranks[rank].block_size if mine else 0, len(mine)
        is_here: dict[BlockHash, bool] = {}
        for event in events:
            if isinstance(event, AllBlocksCleared):
                mine, is_here, count = {}.keys(), {}, 0
                continue
            is_stored = isinstance(event, BlockStored)
            if isinstance(event, BlockStored) and event.block_hashes:
                if count and event.block_size != size:
                    expected, got, fix = (
                        f"blocks of one size in rank {rank}",
                        f"{sorted((size, event.block_size))}",
                        "use one index for each publisher",
                    )
                    raise ArgumentValueError("BlockIndex", expected=expected, got=got, fix=fix)
                size = event.block_size
            for name in event.block_hashes:
                count += is_stored - is_here.get(name, name in mine)
                is_here[name] = is_stored
            if others + count > self._most:
                raise self._full(f"{others + count} blocks")

    def _full(self, got: str) -> CapacityError:
        fix = "raise max_blocks if the publishers' pools are so large"
        return CapacityError("BlockIndex", expected=f"at most max_blocks = {self._most}", got=got, fix=fix)
