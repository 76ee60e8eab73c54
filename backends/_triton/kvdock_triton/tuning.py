"""How large the pieces are that a program moves: a small table, tuned per architecture and never at run time."""

from __future__ import annotations

import attrs

__all__ = ["DEFAULT", "Tile", "Tuning"]


@attrs.frozen
class Tile:
    """What one program does.

    Args:
        tokens: tokens (or pairs, or pieces of a block) per program.
        warps: warps per program.
        store: Triton's cache modifier for stores: ``""``, or ``".cs"`` for data that is not read soon.
    """

    tokens: int
    warps: int
    store: str = ""


@attrs.frozen
class Tuning:
    """The tiles of one architecture.

    Args:
        fused: `paged_caching_` where keys and values come out of one projection: a program moves both, which lie near one
            another.
        separate: `paged_caching_` where they are dense tensors of their own: a program moves one of them.
        static: `static_update_`.
        gather: `gather_paged`.
        copy: `copy_blocks_`; ``tokens`` is not used.
    """

    fused: Tile = Tile(2, 8)
    separate: Tile = Tile(1, 2, ".cs")
    static: Tile = Tile(2, 8)
    gather: Tile = Tile(2, 8)
    copy: Tile = Tile(1, 8)


DEFAULT = Tuning()
"""Used where an architecture has no table of its own."""
