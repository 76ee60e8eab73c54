"""A slow prefix cache of dicts and lists, and what can be seen of the real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from kvdock.prefix import Cleared, PrefixEvent, PrefixStats, RadixPrefixCache, Removed, SizeInfo, Stored

Path = tuple[tuple[int, ...], ...]
"""A prefix: its blocks, each a tuple of token ids."""


@attrs.define(eq=False)
class Block:
    """One stored block; the root of a namespace has no tokens."""

    tokens: tuple[int, ...]
    number: int
    parent: Block | None
    created: int = 0
    last_use: int = 0
    uses: int = 0
    priority: int = 0
    locks: int = 0
    ends_run: bool = False
    is_stored: bool = True
    children: dict[tuple[int, ...], Block] = attrs.Factory(dict)

    def path(self) -> list[Block]:
        """The blocks from the first to this one."""
        found: list[Block] = []
        block: Block | None = self
        while block is not None and block.parent is not None:
            found.append(block)
            block = block.parent
        return found[::-1]


KEYS: dict[str, Callable[[Block], tuple[int, ...]]] = {
    "lru": lambda block: (block.last_use,),
    "lfu": lambda block: (block.uses, block.last_use),
    "fifo": lambda block: (block.created,),
    "priority": lambda block: (block.priority, block.last_use),
}


class SlowPrefixCache:
    """What a radix tree must do, block by block, each answer by looking at everything."""

    def __init__(self, block_size: int, policy: str) -> None:
        self.block_size = block_size
        self.key = KEYS[policy]
        self.roots: dict[str, Block] = {}
        self.clock = self.lookups = self.lookup_tokens = self.hit_tokens = self.inserted = self.evicted = 0
        self.ages: list[int] = []

    def cut(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """The whole blocks of tokens."""
        size = self.block_size
        return [tuple(tokens[at : at + size]) for at in range(0, len(tokens) - size + 1, size)]

    def blocks(self) -> Iterator[tuple[str, Block]]:
        """Every stored block, with its namespace."""
        for namespace, root in self.roots.items():
            left = list(root.children.values())
            while left:
                block = left.pop()
                left.extend(block.children.values())
                yield namespace, block

    def protected(self) -> set[int]:
        """Ids of the blocks on the paths of locks."""
        return {one.number for _, block in self.blocks() if block.locks for one in block.path()}

    def find(self, tokens: Sequence[int], namespace: object) -> list[Block]:
        """The longest stored prefix; a run ends where it ends."""
        found = self.look(tokens, namespace)
        if found:
            found[-1].ends_run = True
        return found

    def look(self, tokens: Sequence[int], namespace: object) -> list[Block]:
        """The longest stored prefix."""
        block, found = self.roots.get(repr(namespace)), list[Block]()
        for piece in self.cut(tokens):
            if block is None or piece not in block.children:
                break
            block = block.children[piece]
            found.append(block)
        return found

    def use(self, path: list[Block], priority: int | None = None) -> None:
        """Note a use."""
        self.clock += 1
        for block in path:
            block.last_use = self.clock
            block.uses += 1
            block.priority = block.priority if priority is None else max(priority, block.priority)

    def record(self, path: list[Block], num_tokens: int) -> None:
        """Count a match."""
        self.lookups += 1
        self.lookup_tokens += num_tokens
        self.hit_tokens += len(path) * self.block_size
        self.use(path)

    def insert(self, tokens: Sequence[int], numbers: Sequence[int], namespace: object, priority: int) -> tuple[int, list[Block]]:
        """Store blocks; returns how many were there, and the whole path."""
        path, pieces = self.find(tokens, namespace), self.cut(tokens)
        known = len(path)
        for piece, number in list(zip(pieces, numbers, strict=True))[known:]:
            above = path[-1] if path else self.roots.setdefault(repr(namespace), Block((), -1, None))
            block = Block(piece, number, above, created=self.clock + 1, priority=priority)
            above.children[piece] = block
            path.append(block)
            self.inserted += 1
        if path:
            path[-1].ends_run = True
        self.use(path, priority)
        return known, path

    def evict(self, count: int) -> list[list[int]] | None:
        """Take blocks one by one from the ends; returns them in runs, or None when there are too few."""
        held = self.protected()
        if count > sum(block.number not in held for _, block in self.blocks()):
            return None
        runs: list[list[int]] = []
        while count:
            ends = [
                (self.key(block), namespace, block) for namespace, block in self.blocks() if not block.children and block.number not in held
            ]
            block = min(ends, key=lambda entry: entry[0])[-1]
            runs.append(self._remove_run(block, count))
            count -= len(runs[-1])
        return runs

    def discard(self, path: list[Block], start: int) -> list[list[int]]:
        """Take blocks from the end of a path that nobody holds and that nothing is behind; returns them in runs."""
        held, runs, left = self.protected(), list[list[int]](), list(path)
        while len(left) > start and not left[-1].children and left[-1].number not in held:
            runs.append(self._remove_run(left[-1], len(left) - start))
            del left[-len(runs[-1]) :]
        return runs

    def _remove_run(self, block: Block, count: int) -> list[int]:
        """Take so many blocks off the end of a run, or all of it."""
        self.ages.append(self.clock - block.last_use)
        run = [self._remove(block)]
        while len(run) < count and block.parent is not None and block.parent.parent is not None and not block.parent.ends_run:
            block = block.parent
            run.append(self._remove(block))
        above = block.parent
        assert above is not None
        above.ends_run = True
        if above.parent is None and not above.children:
            self.roots = {namespace: root for namespace, root in self.roots.items() if root is not above}
        return run[::-1]

    def _remove(self, block: Block) -> int:
        assert block.parent is not None
        assert not block.children
        assert not block.locks
        del block.parent.children[block.tokens]
        block.is_stored = False
        self.evicted += 1
        return block.number

    def reset(self) -> None:
        """Forget everything."""
        for _, block in self.blocks():
            block.is_stored = False
        self.roots.clear()

    def size_info(self) -> SizeInfo:
        """What the cache must say."""
        held = self.protected()
        numbers = [block.number for _, block in self.blocks()]
        return SizeInfo((len(numbers) - len(held)) * self.block_size, len(held) * self.block_size)

    def stats(self) -> PrefixStats:
        """What the cache must say."""
        return PrefixStats(
            lookups=self.lookups,
            lookup_tokens=self.lookup_tokens,
            hit_tokens=self.hit_tokens,
            inserted_tokens=self.inserted * self.block_size,
            evicted_tokens=self.evicted * self.block_size,
            evictions=len(self.ages),
            age_sum=sum(self.ages),
            age_max=max(self.ages, default=0),
        )

    def runs(self) -> dict[tuple[str, Path], tuple[object, ...]]:
        """By namespace and path of its last block, each run: its ids, and how it was used."""
        found: dict[tuple[str, Path], tuple[object, ...]] = {}
        for namespace, block in self.blocks():
            if block.ends_run:
                path = block.path()
                run = [block]
                while len(run) < len(path) and not path[-len(run) - 1].ends_run:
                    run.append(path[-len(run) - 1])
                how = (block.created, block.last_use, block.uses, block.priority)
                assert all((one.created, one.last_use, one.uses, one.priority) == how for one in run)
                found[namespace, tuple(one.tokens for one in path)] = ([one.number for one in run[::-1]], *how, block.locks)
        return found


def tree_of(cache: RadixPrefixCache) -> dict[tuple[str, Path], tuple[object, ...]]:
    """What `SlowPrefixCache.runs` says, read from the nodes of a radix tree."""
    found: dict[tuple[str, Path], tuple[object, ...]] = {}
    width, size = cache._token_bytes, cache.block_size
    dtype = {4: np.int32, 8: np.int64}[width]
    left: list[tuple[Any, str, Path]] = [(root, repr(root.namespace), ()) for root in cache._roots.values()]
    while left:
        node, namespace, path = left.pop()
        tokens = np.frombuffer(node.label, dtype=dtype)[: len(node.blocks) * size].tolist()
        path = (*path, *(tuple(tokens[at : at + size]) for at in range(0, len(tokens), size)))
        left.extend((child, namespace, path) for child in (node.children or {}).values())
        if node.parent is not None:
            found[namespace, path] = (node.blocks.tolist(), node.created, node.last_use, node.uses, node.priority, node.locks)
    return found


def seen(cache: RadixPrefixCache) -> tuple[object, ...]:
    """All that a call which raises must leave alone: each block and how it was used, the clock, sizes, statistics, locks."""
    blocks = {}
    for (namespace, path), (numbers, *how, locks) in tree_of(cache).items():
        assert isinstance(numbers, list)
        start = len(path) - len(numbers)
        for at, number in enumerate(numbers):
            blocks[namespace, path[: start + at + 1]] = (number, tuple(how), locks if at == len(numbers) - 1 else 0)
    return blocks, cache._clock, cache._epoch, cache.size_info, cache.stats, cache.num_locks, cache.stored_blocks().tolist()


def inside(cache: RadixPrefixCache) -> tuple[object, ...]:
    """`seen`, and how the tree holds it: its nodes, their numbers, the queue."""
    nodes = sorted((node.number, node.users, node.locks, node.generation, node.is_queued, node.label) for node in cache.nodes())
    queue = sorted((key, number) for key, number, *_ in cache._queue._entries())
    return *seen(cache), nodes, queue, cache._number, cache._token_bytes


def slots_of(blocks: Sequence[int], block_size: int) -> list[int]:
    """The slots of blocks, in order."""
    return [block * block_size + offset for block in blocks for offset in range(block_size)]


CONTAINERS: dict[str, Callable[[list[int]], Any]] = {
    "int32": lambda values: np.array(values, dtype=np.int32 if max(map(abs, values), default=0) < 2**31 else np.int64),
    "int64": lambda values: np.array(values, dtype=np.int64),
    "uint64": lambda values: np.array(values, dtype=np.uint64 if min(values, default=0) >= 0 else np.int64),
    "big-endian": lambda values: np.array(values, dtype=">i8"),
    "strided": lambda values: np.array([values, values], dtype=np.int64).T.copy()[:, 0],
    "row of a tensor": lambda values: torch.tensor([values, values], dtype=torch.int64)[1],
    "torch int32": lambda values: torch.tensor(values, dtype=torch.int32 if max(map(abs, values), default=0) < 2**31 else torch.int64),
    "list": list,
    "tuple": tuple,
}
"""Ways to pass integers."""


def overwrite(values: Any) -> None:
    """Do what a caller does who uses his buffer again."""
    if isinstance(values, np.ndarray | torch.Tensor):
        values[...] = 77
    elif isinstance(values, list):
        values[:] = [77] * len(values)


class Replayed:
    """What an observer knows of a cache: what is stored where, from the events alone."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.where: dict[int, tuple[str, int | None, tuple[int, ...]]] = {}
        self.events: list[PrefixEvent] = []

    def __call__(self, event: PrefixEvent) -> None:
        """Follow an event; each must fit what came before."""
        self.events.append(event)
        if isinstance(event, Stored):
            parent, size = event.parent, self.block_size
            assert event.tokens.dtype == event.blocks.dtype == np.int64
            assert event.tokens.size == event.blocks.size * size > 0
            for at, block in enumerate(event.blocks.tolist()):
                assert block not in self.where, "stored twice"
                assert parent is None or self.where[parent][0] == repr(event.namespace), "a parent that is there, of this namespace"
                self.where[block] = repr(event.namespace), parent, tuple(event.tokens[at * size : (at + 1) * size].tolist())
                parent = block
        elif isinstance(event, Removed):
            gone = set(event.blocks.tolist())
            assert len(gone) == event.blocks.size > 0
            for block in gone:
                del self.where[block]
            assert not gone & {parent for _, parent, _ in self.where.values()}, "none is before a block that is still there"
        else:
            assert isinstance(event, Cleared)
            self.where.clear()


def where(model: SlowPrefixCache) -> dict[int, tuple[str, int | None, tuple[int, ...]]]:
    """What `Replayed` must know."""
    found = {}
    for namespace, block in model.blocks():
        assert block.parent is not None
        found[block.number] = namespace, block.parent.number if block.parent.parent else None, block.tokens
    return found
