"""How much memory this process has taken."""

from __future__ import annotations

import resource
import sys

__all__ = ["PEAK_METHOD", "peak_memory_bytes"]

PEAK_METHOD = "most memory resident at once since this process began (ru_maxrss), all that it imported included"
"""What `peak_memory_bytes` is."""

_UNIT = 1 if sys.platform == "darwin" else 1024


def peak_memory_bytes() -> int:
    """Return the most memory that this process ever had resident, in bytes. It never falls."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
