"""How large the pieces are that a program moves: a small table, tuned per architecture and never at run time."""

from __future__ import annotations

import attrs

__all__ = [
    "DEFAULT",
    "HOPPER",
    "LEAST_ROWS",
    "MOST_TOKENS",
    "TUNED_ROW_BYTES",
    "WIDE",
    "AttentionTile",
    "SwapTile",
    "Tile",
    "Tuning",
    "tuning_for",
]

TUNED_ROW_BYTES = 2048
"""Bytes of a row of keys on which tiles are tuned: 8 heads of 128 elements of 2 bytes."""

MOST_TOKENS = 32
"""Tokens of a program at most, however short the rows."""


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

    def for_rows(self, row_bytes: int) -> Tile:
        """Return the tile for rows of so many bytes: about as many bytes per program as for the rows it was tuned on.

        Where `MOST_TOKENS` allows no more, the warps are fewer too: every lane keeps its bytes, and accesses their width.
        """
        tuned, most = self.tokens * TUNED_ROW_BYTES, MOST_TOKENS * _ceiling(row_bytes)
        tokens, warps = _floor(tuned // row_bytes), _floor(self.warps * most // tuned)
        return attrs.evolve(self, tokens=min(tokens, MOST_TOKENS), warps=min(warps, self.warps))


def _floor(number: int) -> int:
    """Return the largest power of two that is not above a number; 1 for 0."""
    return 1 << max(number.bit_length() - 1, 0)


def _ceiling(number: int) -> int:
    """Return the smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


@attrs.frozen
class SwapTile:
    """How blocks are moved between pools.

    Args:
        programs: programs for memory of the host: so few fill the link, and leave the other processors to whoever computes.
        piece: elements that a program moves at a time.
        warps: warps per program.
        per_processor: programs per processor where both pools are on the device.
    """

    programs: int
    piece: int
    warps: int
    per_processor: int = 4


TUNED_KEY_BYTES = 512
"""Bytes of a key and its value on which tiles of attention are tuned: 128 elements each, of 2 bytes."""

MOST_AHEAD = 4
"""Steps whose keys are on their way at most, however short they are: the code before a loop has each once."""

MOST_TILES = 4
"""Tiles of a step at most: what becomes of each has registers of its own."""

LEAST_ROWS = 16
"""Rows and keys of a tile at least: matrix units take no fewer."""


@attrs.frozen
class AttentionTile:
    """What one program of `paged_attention` does.

    Args:
        rows: rows of queries and query heads per program.
        keys: keys of a tile.
        warps: warps per program.
        stages: steps whose keys are on their way at once.
        programs: programs per processor that the keys are split for.
        least: keys of a split at least.
        long_rows: rows per program at most where keys are long, as latents are: as many as shared memory has room for.
        mapped: where tiles of `LEAST_ROWS` keys may be read by maps, see `kvdock_triton.tensor_maps`: steps of two tiles whose keys are
            on their way at once, of keys of `TUNED_KEY_BYTES`; None where tiles are read by addresses.
        pieces: in how many pieces the keys of a program of few queries are read, of which all but the first are for who is quick: see
            `kvdock_triton.attention_shares`. With several, no more than ``programs`` may run at once.
        long: keys of `TUNED_KEY_BYTES` that a program has at least, before they are cut into pieces: each piece begins anew.
        tiles: tiles of ``keys`` that it looks at in one step.
        specialised: whether warps have work of their own, see `kvdock_triton.attention_specialised`: ``warps`` is those of a group.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int = 1
    least: int = 512
    long_rows: int = LEAST_ROWS
    mapped: int | None = None
    pieces: int = 1
    long: int = 6144
    tiles: int = 1
    specialised: bool = False

    def for_keys(self, key_bytes: int) -> AttentionTile:
        """Return the tile for keys and values of so many bytes together: about as many bytes per step as for those it was tuned on."""
        keys = _floor(self.keys * TUNED_KEY_BYTES // key_bytes)
        rows = _floor(min(self.rows, self.rows * TUNED_KEY_BYTES // key_bytes))
        return attrs.evolve(self, rows=max(rows, LEAST_ROWS), keys=min(max(keys, LEAST_ROWS), 2 * self.keys))

    def by_maps(self, key_bytes: int) -> AttentionTile:
        """Return the tile for keys of so many bytes each with its value that are read by maps.

        About as many bytes per step as for those it was tuned on, and as many on their way, beside the two steps that are being looked
        at and filled.
        """
        if self.mapped is None:
            return self
        tiles = min(max(2 * TUNED_KEY_BYTES // key_bytes, 2), MOST_TILES)
        stages = 2 + min(max((self.mapped - 2) * 2 * TUNED_KEY_BYTES // (key_bytes * tiles), 1), MOST_AHEAD)
        return attrs.evolve(self, keys=LEAST_ROWS, stages=stages, tiles=tiles)

    def in_shared(self, key_bytes: int) -> AttentionTile:
        """Return the tile for keys of so many bytes each with its value of which all that is on its way lies in shared memory."""
        return attrs.evolve(self, keys=max(min(_floor(self.keys * TUNED_KEY_BYTES // key_bytes), self.keys), LEAST_ROWS))

    def without_matrix_units(self) -> AttentionTile:
        """Return the tile for float32, whose products are sums of lanes: each holds its share of both sides in registers."""
        return attrs.evolve(self, rows=LEAST_ROWS, keys=min(self.keys, 32), warps=max(self.warps, 4), stages=min(self.stages, 2))


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
        swap: `swap_blocks_`.
        early: whether what joins splits of `paged_attention` is launched before they have ended, to wait for that on the device.
        decode: `paged_attention` where each sequence has few queries, which fit into one tile.
        prefill: `paged_attention` of any number of queries.
        specialised: likewise, where maps may be made of the caches and matrix units read shared memory by themselves; None where not.
    """

    fused: Tile = Tile(2, 8)
    separate: Tile = Tile(1, 2, ".cs")
    static: Tile = Tile(2, 8)
    gather: Tile = Tile(2, 8)
    copy: Tile = Tile(1, 8)
    swap: SwapTile = SwapTile(16, 4096, 8)
    early: bool = False
    decode: AttentionTile = AttentionTile(16, 32, 4, 3, programs=4)
    prefill: AttentionTile = AttentionTile(64, 32, 4, 2)
    specialised: AttentionTile | None = None


DEFAULT = Tuning()
"""Used where an architecture has no table of its own, and its warps have 32 lanes."""

WIDE = Tuning(
    fused=Tile(2, 4),
    static=Tile(2, 4),
    gather=Tile(2, 4),
    decode=AttentionTile(16, 32, 4, 2, programs=4),
    prefill=AttentionTile(64, 32, 8, 2),
)
"""For warps of 64 lanes. So many lanes share a tile that more of them, or a smaller tile, would make accesses narrower than
16 bytes."""


HOPPER = Tuning(
    fused=Tile(1, 4),
    early=True,
    decode=AttentionTile(16, 32, 1, 4, programs=4, least=128, long_rows=64, mapped=3, pieces=4),
    prefill=AttentionTile(64, 64, 4, 3),
    specialised=AttentionTile(128, 128, 4, 2, specialised=True),
)
"""As measured on an H100, and attention on H200s; see docs/benchmarks."""


def tuning_for(lanes: int) -> Tuning:
    """Return the tiles for an architecture without a table, by the lanes of its warps."""
    return DEFAULT if lanes <= 32 else WIDE
