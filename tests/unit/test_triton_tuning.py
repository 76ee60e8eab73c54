"""Tiles for rows of any length: powers of two, about as much per program as was measured, and never less per lane."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch

from kvdock.plugin import Request, TensorMeta
from kvdock_triton import Tile, gather_paged, paged_caching
from kvdock_triton.attention_specs import prefill_tile
from kvdock_triton.launch import KernelSpec
from kvdock_triton.support import row_bytes
from kvdock_triton.tuning import DEFAULT, HOPPER, LEAST_ROWS, MOST_TOKENS, TUNED_KEY_BYTES, TUNED_ROW_BYTES, WIDE, AttentionTile, Tuning

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
    for row in ROWS:
        fitted = tile.for_rows(row)
        assert fitted.store == tile.store
        assert 1 <= fitted.tokens <= MOST_TOKENS
        assert 1 <= fitted.warps <= tile.warps
        assert fitted.tokens.bit_count() == fitted.warps.bit_count() == 1
        of_a_program = fitted.tokens * padded(row)
        assert of_a_program >= fitted.warps * lanes * 16 or fitted.warps == 1, row
        if row <= TUNED_ROW_BYTES:
            assert fitted.tokens * row <= tile.tokens * TUNED_ROW_BYTES, "more per program than was measured"


def test_long_rows_have_programs_of_one_token() -> None:
    assert Tile(2, 8, ".cs").for_rows(8 * TUNED_ROW_BYTES) == Tile(1, 8, ".cs")


def test_short_rows_have_fewer_warps() -> None:
    assert Tile(2, 8).for_rows(384) == Tile(8, 8)
    assert Tile(2, 8).for_rows(64) == Tile(32, 4)
    assert Tile(2, 8).for_rows(2) == Tile(32, 1)


def of_shape(heads: int, dim: int, dtype: torch.dtype, *lead: int | None, outer: bool = True) -> TensorMeta:
    """Return a tensor ``[*lead, heads, dim]``, dense and aligned to its elements; new tokens have no strides yet."""
    shape = (*lead, heads, dim)
    strides = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape))) if outer else None
    return TensorMeta(dtype, shape, strides, dtype.itemsize)


def all_specs(dtype: torch.dtype, k: tuple[int, int], v: tuple[int, int], tuning: Tuning) -> Iterator[KernelSpec]:
    """Yield what is compiled for rows of keys and of values, ``(heads, dim)`` each, by every op that moves rows."""
    slots, none = TensorMeta(torch.int64, (None,), None, 8), dict.fromkeys(("k_scale", "v_scale"))
    pools = {f"{name}_cache": of_shape(*row, dtype, 6, 4) for name, row in (("k", k), ("v", v))}
    rows = {name: of_shape(*row, dtype, None, outer=False) for name, row in (("k", k), ("v", v))}
    request = Request("paged_caching_", torch.device("cpu"), {**pools, **rows, "slot_mapping": slots, **none})
    yield from paged_caching.specs_for(request, tuning)
    outputs = {f"{name}_out": row for name, row in rows.items()}
    request = Request("gather_paged", torch.device("cpu"), {**pools, "slot_mapping": slots, **none, **outputs})
    yield gather_paged.spec_for(request, tuning.gather.for_rows(row_bytes(request)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("tuning", "lanes"), TUNINGS.values(), ids=TUNINGS)
def test_no_lane_has_so_much_to_do_that_it_takes_minutes_to_compile(tuning: Tuning, lanes: int, dtype: torch.dtype) -> None:
    """Values of 8,450 elements beside keys of 3 had 32 tokens to a warp: 4,096 elements to a lane, more than 5 minutes in Triton 3.6."""
    rows = [(1, 1), (1, 3), (1, 64), (8, 128), (64, 130), (65, 130), (8, 4104)]
    for k, v in itertools.product(rows, rows):
        for spec in all_specs(dtype, k, v, tuning):
            chunk = max(spec.constant("K_CHUNK"), spec.constant("V_CHUNK"))
            assert spec.constant("TILE") * chunk <= 256 * spec.num_warps * lanes, (k, v, spec)


def test_rows_of_a_latent_and_its_rope_part_are_tiled_by_the_shorter_ones() -> None:
    """So that accesses of both stay wide."""
    shapes = {"k_cache": of_shape(1, 64, torch.bfloat16, 6, 4), "v_cache": of_shape(1, 512, torch.bfloat16, 6, 4)}
    assert row_bytes(Request("gather_paged", torch.device("cpu"), shapes)) == 128


ATTENTION = {f"{name} {op}": getattr(tuning, op) for name, (tuning, _) in TUNINGS.items() for op in ("decode", "prefill")}


@pytest.mark.parametrize("tile", ATTENTION.values(), ids=ATTENTION)
def test_tiles_of_attention_keep_the_bytes_of_a_step(tile: AttentionTile) -> None:
    assert tile.for_keys(TUNED_KEY_BYTES) == tile
    for key_bytes in (64, 128, 256, 512, 640, 1024, 2048):
        fitted = tile.for_keys(key_bytes)
        assert fitted.keys.bit_count() == fitted.rows.bit_count() == 1
        assert LEAST_ROWS <= fitted.keys <= 2 * tile.keys
        assert LEAST_ROWS <= fitted.rows <= tile.rows
        assert fitted.keys * key_bytes <= tile.keys * TUNED_KEY_BYTES or fitted.keys == LEAST_ROWS
        lanes = fitted.without_matrix_units()
        assert (lanes.rows, lanes.keys, lanes.stages) <= (LEAST_ROWS, fitted.keys, fitted.stages)
        assert lanes.warps >= 4


@pytest.mark.parametrize(
    ("dtype", "block", "dim", "alignment", "is_specialised"),
    [
        (torch.bfloat16, 16, 128, 16, True),
        (torch.float16, 48, 80, 16, True),
        (torch.bfloat16, 16, 512, 16, False),  # a tile has no room
        (torch.float32, 16, 128, 16, False),  # no matrix units
        (torch.bfloat16, 24, 128, 16, False),  # boxes of 16 keys, each of one block
        (torch.bfloat16, 16, 128, 8, False),  # maps need multiples of 16 bytes
    ],
)
def test_prompts_are_read_by_maps_where_they_can_be(dtype: torch.dtype, block: int, dim: int, alignment: int, is_specialised: bool) -> None:
    pool = TensorMeta(dtype, (64, block, 8, dim), (block * 8 * dim, 8 * dim, dim, 1), alignment)
    request = Request("paged_attention", torch.device("cuda"), {"k_cache": pool, "v_cache": pool})
    assert prefill_tile(request, HOPPER) == (HOPPER.specialised if is_specialised else HOPPER.prefill)
    assert prefill_tile(request, DEFAULT) == DEFAULT.prefill


def test_tiles_that_lie_in_shared_memory_fit_into_it() -> None:
    tile = HOPPER.specialised
    assert tile is not None
    for k_dim, v_dim in itertools.product((64, 128, 256), repeat=2):
        fitted = tile.in_shared(2 * (k_dim + v_dim))
        assert 2 * (fitted.stages * fitted.keys * (k_dim + v_dim) + fitted.rows * k_dim) <= 227 * 1024 - 2048, (k_dim, v_dim)
        assert LEAST_ROWS <= fitted.keys <= tile.keys
