"""Triton kernels for every device that Triton compiles for, and the backend base that third parties can reuse.

A library: it registers nothing. Light to import; Triton itself is imported when kernels are asked for.
"""

from kvdock_triton.base import TritonBackend
from kvdock_triton.tuning import Tile, Tuning

__all__ = ["Tile", "TritonBackend", "Tuning"]
