"""Tiles by architecture. None was measured, since no kernel has run on an AMD GPU yet: all use the defaults."""

from __future__ import annotations

from collections.abc import Mapping

from kvdock_triton import Tuning

__all__ = ["TABLE"]

TABLE: Mapping[str, Tuning] = {}
"""By the name that the driver gives an architecture, such as ``"gfx942"``."""
