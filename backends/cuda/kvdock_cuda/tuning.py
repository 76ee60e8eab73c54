"""Tiles by major compute capability, as measured; see docs/benchmarks."""

from __future__ import annotations

from collections.abc import Mapping

from kvdock_triton import Tile, Tuning

__all__ = ["TABLE"]

TABLE: Mapping[int, Tuning] = {
    9: Tuning(fused=Tile(1, 4), separate=Tile(1, 2, ".cs")),
}
"""Hopper was measured; the others use the defaults until they are."""
