"""Tiles by major compute capability, as measured; see docs/benchmarks."""

from __future__ import annotations

from collections.abc import Mapping

from kvdock_triton import Tuning
from kvdock_triton.tuning import HOPPER

__all__ = ["TABLE"]

TABLE: Mapping[int, Tuning] = {
    9: HOPPER,
}
"""Hopper was measured; the others use the defaults until they are."""
