"""Blocks by their tokens, as a file has them: which comes behind which, and where prefixes end.

::

    block    tokens     parent           a parent comes before its children; -1, -2, ... is the root of the first, second, ... namespace
    0        a b c d    -1
    1        e f g h     0       <- an end: the prefix a b c d e f g h
    2        i j k l     0       <- another
    3        a b c d    -2       <- the same tokens in another namespace

With several layer groups these are the units in which blocks of all groups end together, and ``kept`` has which blocks of each group
are in the file: windows need the last ones only, and of states there is one, the checkpoint behind an end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.errors import FileContentError
from kvdock.layers.groups import LayerGroup
from kvdock.prefix.interface import Namespace
from kvdock.prefix.names import block_names, root_name

__all__ = ["INTEGERS", "Forest", "cached_places", "needed_blocks"]

INTEGERS = ("tokens", "parents", "names", "ends")
"""Names of the arrays; ``kept`` has one more for each group."""

Integers = npt.NDArray[np.int64]


def needed_blocks(group: LayerGroup, num_tokens: int) -> Integers:
    """Return which blocks of a sequence, by their place in the block table, a group needs to go on behind so many tokens."""
    return np.concatenate(
        [np.arange(each.start, each.stop) for each in group.retention.blocks(num_tokens, group.block_size)] or [np.empty(0, int)]
    )


def cached_places(group: LayerGroup, num_tokens: int, unit: int) -> Integers:
    """Return the same by their place among the blocks that units have: of states it is the checkpoint behind the last unit."""
    return np.array([num_tokens // unit - 1]) if group.retention.is_state else needed_blocks(group, num_tokens)


@attrs.frozen(eq=False)
class Forest:
    """The blocks of a file.

    Args:
        tokens: int64 ``[blocks, block_size]``.
        parents: int64 ``[blocks]``.
        names: of the blocks, see `kvdock.prefix.names`, uint8 ``[blocks, 32]``.
        ends: the last block of each prefix, those that were used last first, int64 ``[prefixes]``.
        kept: of each layer group, which blocks are there, bool ``[blocks, blocks of the group in one]``.
        namespaces: the roots.
    """

    tokens: Integers
    parents: Integers
    names: npt.NDArray[np.uint8]
    ends: Integers
    kept: tuple[npt.NDArray[np.bool_], ...]
    namespaces: tuple[Namespace, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    def path(self, end: int) -> Integers:
        """Return the blocks of a prefix, from its first to ``end``."""
        found = [end]
        while (parent := int(self.parents[found[-1]])) >= 0:
            found.append(parent)
        return np.array(found[::-1], dtype=np.int64)

    def namespace(self, path: Integers) -> Namespace:
        """Return the namespace of a path."""
        return self.namespaces[-1 - int(self.parents[path[0]])]

    def rows(self) -> tuple[Integers, ...]:
        """Return where each block is among those of its group that are there, ``[blocks, blocks of the group in one]``."""
        return tuple(np.cumsum(kept.reshape(-1)).reshape(kept.shape) - 1 for kept in self.kept)

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return what goes into a file."""
        kept = {f"kept.{group}": each.astype(np.uint8) for group, each in enumerate(self.kept)}
        return {"tokens": self.tokens, "parents": self.parents, "names": self.names, "ends": self.ends, **kept}

    @classmethod
    def read(
        cls, path: object, arrays: Mapping[str, npt.NDArray[np.generic]], namespaces: Sequence[Namespace], groups: Sequence[LayerGroup]
    ) -> Forest:
        """Return the forest of arrays that came out of a file, whose dtypes and shapes are right.

        Raises:
            FileContentError: they contradict themselves.
        """
        kept = [arrays[f"kept.{group}"] for group in range(len(groups))]
        _require(path, all((each <= np.uint8(1)).all() for each in kept), "kept: 0 or 1 for each block")
        tokens, parents, names, ends = (arrays[name] for name in INTEGERS)
        found = cls(tokens, parents, names, ends, tuple(each.astype(np.bool_) for each in kept), tuple(namespaces))  # type: ignore[arg-type] # of the dtypes that were checked
        _require(path, len(found) > 0 and ends.size > 0, "at least one block and one prefix")
        _require(path, bool((found.parents < np.arange(len(found))).all()), "parents: blocks before their children")
        _require(path, bool((found.parents >= -len(namespaces)).all()), "parents: namespaces that are named")
        _require(path, bool(((found.ends >= 0) & (found.ends < len(found))).all()), "ends: blocks of the file")
        # A few kilobytes of the same end, each followed from the end on, take hours.
        _require(path, np.unique(found.ends).size == ends.size, "ends: each once")
        found.check_names(path)
        return found

    def check_names(self, path: object) -> None:
        """Raise unless each block has the name that follows from its tokens and from what is before it."""
        size = self.tokens.shape[1]
        roots = [root_name(size, namespace) for namespace in self.namespaces]
        names = [name.tobytes() for name in self.names]
        for at, parent in enumerate(self.parents.tolist()):
            before = names[parent] if parent >= 0 else roots[-1 - parent]
            _require(path, block_names(self.tokens[at], size, parent=before) == [names[at]], f"names: that of block {at}'s tokens")
        _require(path, len(set(names)) == len(names), "names: each block once")

    def check_kept(self, path: object, blocks: Integers, groups: Sequence[LayerGroup]) -> None:
        """Raise unless all is there that layer groups need behind the end of a path."""
        for group, kept in zip(groups, self.kept, strict=True):
            needed = cached_places(group, self.tokens[blocks].size, self.tokens.shape[1])
            there = kept[blocks].reshape(-1)[needed]
            _require(path, bool(there.all()), "kept: all that the next token reads")


def _require(path: object, holds: bool, what: str) -> None:
    if not holds:
        raise FileContentError(
            f"{path}", expected=what, got="a file that contradicts itself", fix="save it anew: its checksums are right, so it was made so"
        )
