"""Tiles by architecture. None was measured, since no kernel has run on an AMD GPU yet.

They are as wide as the compiler needs for 16-byte accesses, which ``python -m kvdock_triton.aot`` shows.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvdock_triton import Tuning
from kvdock_triton.tuning import DEFAULT, WIDE

__all__ = ["TABLE"]

TABLE: Mapping[str, Tuning] = {
    "gfx90a": WIDE,
    "gfx942": WIDE,
    "gfx950": WIDE,
    "gfx1100": DEFAULT,
    "gfx1201": DEFAULT,
}
"""By the name that the driver gives an architecture. CDNA (gfx9) has warps of 64 lanes, RDNA of 32."""
