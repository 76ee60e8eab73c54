"""Loading tiles of keys and values into shared memory, by maps of the caches: what one warp of `attention_specialised` does.

A box is what is loaded at once: some keys of one block, and as many elements of each as lie together in shared memory. All boxes of a
tile together are what matrix units take for one.
"""

from __future__ import annotations

from typing import Any

import attrs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kvdock_triton.tensor_maps import map_type

__all__ = ["BOX_KEYS", "PANEL", "TILE_LAYOUT", "Constants", "box_type", "load_tiles", "settled"]

BOX_KEYS = gl.constexpr(16)
PANEL = gl.constexpr(64)
"""Keys and elements of a box."""

_BOX_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4))
TILE_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_ROW_LAYOUT = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))


@attrs.frozen
class Constants:
    """The constants of `attention_specialised.attend_specialised_kernel`, which each of its functions is given: see there.

    ``ROWS`` is of a group of warps.
    """

    SCALE: gl.constexpr
    SOFTCAP: gl.constexpr
    CAUSAL: gl.constexpr
    WINDOW: gl.constexpr
    STARTS: gl.constexpr
    SINKS: gl.constexpr
    LSE: gl.constexpr
    BLOCK_SIZE: gl.constexpr
    K_BLOCK: gl.constexpr
    K_SLOT: gl.constexpr
    V_BLOCK: gl.constexpr
    V_SLOT: gl.constexpr
    K_DIM: gl.constexpr
    V_DIM: gl.constexpr
    K_WIDE: gl.constexpr
    V_WIDE: gl.constexpr
    Q_UNIT: gl.constexpr
    OUT_UNIT: gl.constexpr
    QUERY_HEADS: gl.constexpr
    GROUP: gl.constexpr
    SHARE: gl.constexpr
    TILE: gl.constexpr
    ROWS: gl.constexpr
    KEYS: gl.constexpr
    STAGES: gl.constexpr

    def __str__(self) -> str:
        """Return what becomes part of the name of a function."""
        return "_".join(str(value.value) for value in attrs.astuple(self, recurse=False))


@gluon.constexpr_function
def settled(*values: Any) -> Constants:
    """Return `Constants` within a kernel, each as Triton has them."""
    return Constants(*map(gl.constexpr, values))


def box_type(element: str) -> str:
    """Return the type of a map of a cache of which boxes are loaded."""
    return f"{map_type(element, (1, 1, BOX_KEYS.value, PANEL.value)).removesuffix('>')},{_BOX_LAYOUT.value!r}>"


@gluon.jit
def _load_boxes(cache_map, blocks, kv_head, first_box, tile, ready, WIDE: gl.constexpr, C: gl.constexpr):
    """Load a tile of keys or values. What lies outside of the pool, or behind the end of a head, is zeros."""
    number: gl.constexpr = C.KEYS // BOX_KEYS
    panels: gl.constexpr = WIDE // PANEL
    boxes = tile._reinterpret(tile.dtype, [panels * number, 1, 1, BOX_KEYS, PANEL], _BOX_LAYOUT)
    mbarrier.expect(ready, C.KEYS * WIDE * 2)
    for i in gl.static_range(number):
        slot = (first_box + i) % (C.BLOCK_SIZE // BOX_KEYS) * BOX_KEYS
        for panel in gl.static_range(panels):
            tma.async_copy_global_to_shared(cache_map, [blocks[i], kv_head, slot, panel * PANEL], ready, boxes.index(panel * number + i))


@gluon.jit
def _clear(tile, begin, end, C: gl.constexpr):
    """Make zeros of some values of a tile, whose elements lie in shared memory in any order."""
    panels: gl.constexpr = C.V_WIDE // PANEL
    rows = tile._reinterpret(tile.dtype, [panels * C.KEYS, PANEL], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    nothing = gl.zeros([PANEL], tile.dtype, _ROW_LAYOUT)
    for row in range(begin, end):
        for panel in gl.static_range(panels):
            rows.index(panel * C.KEYS + row).store(nothing)


@gluon.jit
def _load_tile(
    i, cache_map, table, table_column, kv_head, span, tiles, ready, free, loaded, WIDE: gl.constexpr, CUT: gl.constexpr, C: gl.constexpr
):
    """Load tile ``i`` of keys or values when its place is free; with ``CUT``, those outside of the span may be made zeros."""
    base, number, begin, end, _ = span
    boxes: gl.constexpr = C.KEYS // BOX_KEYS
    start = base + (number - 1 - i) * C.KEYS
    first_box = base // BOX_KEYS + (number - 1 - i) * boxes
    last_box = (end + BOX_KEYS - 1) // BOX_KEYS
    blocks = ()
    for j in gl.static_range(boxes):
        box = first_box + j
        is_seen = (box < last_box) & (box >= begin // BOX_KEYS)
        blocks += (gl.load(table + box // (C.BLOCK_SIZE // BOX_KEYS) * table_column, mask=is_seen, other=-1),)
    stage = i % C.STAGES
    tile = tiles.index(stage)
    mbarrier.wait(free.index(stage), i // C.STAGES & 1 ^ 1)
    if CUT:
        from_begin = gl.minimum(gl.maximum(begin - start, 0), C.KEYS)
        to_end = gl.minimum(gl.maximum(end - start, 0), C.KEYS)
        _load_boxes(cache_map, blocks, kv_head, first_box, tile, loaded, WIDE, C)
        mbarrier.wait(loaded, (i > 0).to(gl.int32))
        _clear(tile, from_begin // BOX_KEYS * BOX_KEYS, from_begin, C)
        _clear(tile, to_end, (to_end + BOX_KEYS - 1) // BOX_KEYS * BOX_KEYS, C)
        fence_async_shared()
        mbarrier.arrive(ready.index(stage))
    else:
        _load_boxes(cache_map, blocks, kv_head, first_box, tile, ready.index(stage), WIDE, C)


@gluon.jit
def load_tiles(k_map, v_map, table, table_column, kv_head, span, keys, values, bars, loaded, C: gl.constexpr):
    """Load the tiles of a span of keys, the last first. By one warp: a second would take the turns of a lane that attends, too.

    Values outside of the span are zeros: what is there may be no number, and 0 times that is none either.
    """
    k_ready, v_ready, k_free, v_free = bars
    number = span[1]
    last = number * 0
    _load_tile(last, k_map, table, table_column, kv_head, span, keys, k_ready, k_free, loaded, C.K_WIDE, False, C)
    _load_tile(last, v_map, table, table_column, kv_head, span, values, v_ready, v_free, loaded, C.V_WIDE, True, C)
    whole = number
    if C.STARTS or C.WINDOW > 0:
        whole = number - 1
    for i in range(1, whole):
        _load_tile(i, k_map, table, table_column, kv_head, span, keys, k_ready, k_free, loaded, C.K_WIDE, False, C)
        _load_tile(i, v_map, table, table_column, kv_head, span, values, v_ready, v_free, loaded, C.V_WIDE, False, C)
    if C.STARTS or C.WINDOW > 0:
        if number > 1:
            _load_tile(whole, k_map, table, table_column, kv_head, span, keys, k_ready, k_free, loaded, C.K_WIDE, False, C)
            _load_tile(whole, v_map, table, table_column, kv_head, span, values, v_ready, v_free, loaded, C.V_WIDE, True, C)
