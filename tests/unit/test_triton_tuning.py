"""Tiles for rows of any length: powers of two, about as much per program as was measured, and never less per lane."""

from __future__ import annotations

import pytest

from kvdock_triton import Tile
from kvdock_triton.tuning import DEFAULT, HOPPER, MOST_TOKENS, TUNED_ROW_BYTES, WIDE

TUNINGS = {"default": (DEFAULT, 32), "hopper": (HOPPER, 32), "wide": (WIDE, 64)}
TILES = {
    f"{name} {op}": (getattr(tuning, op), lanes)
    for name, (tuning, lanes) in TUNINGS.items()
    for op in ("fused", "separate", "static", "gather")
}
every_tile = pytest.mark.parametrize(("tile", "lanes"), TILES.values(), ids=TILES)
ROWS = [*range(2, 600, 2), 736, 1000, 1100, 1152, 1536, 2000, 2048, 2050, 3000, 4096, 16_384, 32_768]


def padded(row_bytes: int) -> int:
    """Return the bytes that a program's lanes are spread over for one row: a power of two."""
    return 1 << (row_bytes - 1).bit_length()


@every_tile
def test_tuned_rows_have_the_tuned_tile_with_accesses_of_16_bytes(tile: Tile, lanes: int) -> None:
    if tile.warps * lanes * 16 <= tile.tokens * TUNED_ROW_BYTES:
        assert tile.for_rows(TUNED_ROW_BYTES) == tile
    else:
        pytest.fail(f"{tile} gives {tile.tokens * TUNED_ROW_BYTES / (tile.warps * lanes):g} bytes to a lane")


@every_tile
def test_other_rows_keep_the_bytes_of_a_lane(tile: Tile, lanes: int) -> None:
    for row_bytes in ROWS:
        fitted = tile.for_rows(row_bytes)
        assert fitted.store == tile.store
        assert 1 <= fitted.tokens <= MOST_TOKENS
        assert 1 <= fitted.warps <= tile.warps
        assert fitted.tokens.bit_count() == fitted.warps.bit_count() == 1
        of_a_program = fitted.tokens * padded(row_bytes)
        assert of_a_program >= fitted.warps * lanes * 16 or fitted.warps == 1, row_bytes
        if row_bytes <= TUNED_ROW_BYTES:
            assert fitted.tokens * row_bytes <= tile.tokens * TUNED_ROW_BYTES, "more per program than was measured"


def test_long_rows_have_programs_of_one_token() -> None:
    assert Tile(2, 8, ".cs").for_rows(8 * TUNED_ROW_BYTES) == Tile(1, 8, ".cs")


def test_short_rows_have_fewer_warps() -> None:
    assert Tile(2, 8).for_rows(384) == Tile(8, 8)
    assert Tile(2, 8).for_rows(64) == Tile(32, 4)
    assert Tile(2, 8).for_rows(2) == Tile(32, 1)
