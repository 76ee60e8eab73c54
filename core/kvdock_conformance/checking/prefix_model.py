"""What a prefix cache means: one of dicts and lists that looks at everything for each answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs

from kvdock.prefix import PrefixStats, SizeInfo

__all__ = ["KEYS", "Block", "Path", "SlowPrefixCache", "StoresNothing", "slots_of"]

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
    is_stored: bool = True
    children: dict[tuple[int, ...], Block] = attrs.Factory(dict)

    @property
    def above(self) -> Block:
        """The block before it, or the root."""
        if self.parent is None:
            raise LookupError("nothing is above the root of a namespace")
        return self.parent

    def path(self) -> list[Block]:
        """Return the blocks from the first to this one."""
        found: list[Block] = []
        block: Block | None = self
        while block is not None and block.parent is not None:
            found.append(block)
            block = block.parent
        return found[::-1]


KEYS: Mapping[str, Callable[[Block], tuple[int, ...]]] = {
    "lru": lambda block: (block.last_use,),
    "lfu": lambda block: (block.uses, block.last_use),
    "fifo": lambda block: (block.created,),
    "priority": lambda block: (block.priority, block.last_use),
}
"""What each policy compares, by its name: the least goes first."""


class SlowPrefixCache:
    """What a prefix cache must do, block by block.

    How each block was used is kept block by block, so that the order of eviction can be told whatever runs a cache makes of
    them. What goes on behind an end is worth what that is, unless it comes with a lower priority.

    Args:
        block_size: tokens in a block.
        policy: a name in `KEYS`.
    """

    def __init__(self, block_size: int, policy: str) -> None:
        self.block_size = block_size
        self.key = KEYS[policy]
        self.roots: dict[str, Block] = {}
        self.clock = self.lookups = self.lookup_tokens = self.hit_tokens = self.inserted = self.evicted = 0
        self.ages: list[int] = []
        """How many uses ago each run that went was used last."""
        self.block_ages: list[int] = []
        """The same of each block that went."""

    def cut(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the whole blocks of tokens."""
        size = self.block_size
        return [tuple(tokens[at : at + size]) for at in range(0, len(tokens) - size + 1, size)]

    def blocks(self) -> Iterator[tuple[str, Block]]:
        """Yield every stored block, with its namespace."""
        for namespace, root in self.roots.items():
            left = list(root.children.values())
            while left:
                block = left.pop()
                left.extend(block.children.values())
                yield namespace, block

    def protected(self) -> set[int]:
        """Return the ids of the blocks on the paths of locks."""
        return {one.number for _, block in self.blocks() if block.locks for one in block.path()}

    def find(self, tokens: Sequence[int], namespace: object) -> list[Block]:
        """Return the longest stored prefix."""
        block, found = self.roots.get(repr(namespace)), list[Block]()
        for piece in self.cut(tokens):
            if block is None or piece not in block.children:
                break
            block = block.children[piece]
            found.append(block)
        return found

    def alike(self, path: Sequence[Block], namespace: object, tokens: Sequence[int]) -> dict[int, int]:
        """Return the blocks behind a place, by id, with how many of their first tokens come next: half a block, or more."""
        place = path[-1] if path else self.roots.get(repr(namespace))
        most, found = min(len(tokens), self.block_size - 1), dict[int, int]()
        for block in place.children.values() if place else ():
            same = next((at for at in range(most) if block.tokens[at] != tokens[at]), most)
            if 2 * same >= self.block_size:
                found[block.number] = same
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
            if path and not above.children and priority >= above.priority:
                block.created, block.uses, block.priority = above.created, above.uses, above.priority
            above.children[piece] = block
            path.append(block)
            self.inserted += 1
        self.use(path, priority)
        return known, path

    def evict(self, count: int) -> list[int] | None:
        """Take blocks one by one from the ends, and return them, run by run; None when there are too few."""
        held, gone = self.protected(), list[int]()
        if count > sum(block.number not in held for _, block in self.blocks()):
            return None
        while len(gone) < count:
            ends = [block for _, block in self.blocks() if not block.children and block.number not in held]
            block, run = min(ends, key=self.key), list[int]()
            last_use, alike = block.last_use, (self.key(block), block.last_use, block.priority)
            while len(gone) + len(run) < count and block in ends and (self.key(block), block.last_use, block.priority) == alike:
                run.append(self._remove(block))
                block = block.above
                ends = [] if block.children or block.parent is None or block.number in held else [block]
            self.ages.append(self.clock - last_use)
            gone += run[::-1]
        return gone

    def discard(self, path: list[Block], keep: int) -> list[int]:
        """Take blocks from the end of a path that nobody holds and that nothing is behind, and return them."""
        held, left = self.protected(), list(path)
        while len(left) > keep and not left[-1].children and left[-1].number not in held:
            self._remove(left.pop())
        gone = path[len(left) :]
        self.ages += [self.clock - block.last_use for block in gone[-1:]]
        return [block.number for block in gone]

    def _remove(self, block: Block) -> int:
        """Take one block that nothing is behind and nobody holds."""
        if block.children or block.locks:
            raise LookupError(f"block {block.number} is held, or has others behind it")
        del block.above.children[block.tokens]
        block.is_stored = False
        self.evicted += 1
        self.block_ages.append(self.clock - block.last_use)
        return block.number

    def reset(self) -> None:
        """Forget everything."""
        for _, block in self.blocks():
            block.is_stored = False
        self.roots.clear()

    def size_info(self) -> SizeInfo:
        """Return what the cache must say."""
        held = self.protected()
        numbers = [block.number for _, block in self.blocks()]
        return SizeInfo((len(numbers) - len(held)) * self.block_size, len(held) * self.block_size)

    def stats(self) -> PrefixStats:
        """Return what the cache must say."""
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

    def follow(self, numbers: Iterable[int]) -> str:
        """Take the blocks that a cache chose to evict.

        Returns:
            what is wrong with its choice; empty when nothing is, and then they are gone.
        """
        stored, held, chosen = {block.number: block for _, block in self.blocks()}, self.protected(), list(numbers)
        for number in chosen:
            if number not in stored or number in held:
                return f"block {number}, which is {'locked' if number in stored else 'not stored'}"
        for number in chosen:
            left = [child.number for child in stored[number].children.values() if child.number not in chosen]
            if left:
                return f"block {number}, but not block {left[0]} behind it"
        for number in sorted(chosen, key=lambda number: -len(stored[number].path())):
            self._remove(stored[number])
        return ""


class StoresNothing(SlowPrefixCache):
    """What a cache must do that claims to store nothing."""

    def insert(self, tokens: Sequence[int], numbers: Sequence[int], namespace: object, priority: int) -> tuple[int, list[Block]]:
        """Take over nothing."""
        return 0, []


def slots_of(blocks: Sequence[int], block_size: int) -> list[int]:
    """Return the slots of blocks, in order."""
    return [block * block_size + offset for block in blocks for offset in range(block_size)]
