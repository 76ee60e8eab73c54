"""Bits of numbers that are easily lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

__all__ = ["SPECIAL_BITS", "finite"]

SPECIAL_BITS: Mapping[str, Sequence[int]] = MappingProxyType(
    {
        "bfloat16": (0x7FC1, -0x007F, 0x7F80, -0x0080, -0x8000, 0, 1, 0x7F7F),
        "float16": (0x7E01, -0x01FF, 0x7C00, -0x0400, -0x8000, 0, 1, 0x7BFF),
        "float64": (0x7FF8 << 48 | 1, -(0x000F << 48) + 1, 0x7FF << 52, -(1 << 52), -(1 << 63), 0, 1, (0x7FF << 52) - 1),
        "uint8": (0x7F, -1, -0x80, -0x7F, 0x55, 0, 1, -0x56),
        "float32": (0x7FC00001, -0x007FFFFF, 0x7F800000, -0x00800000, -0x80000000, 0, 1, 0x7F7FFFFF),
    }
)
"""Quiet and signalling NaN with payloads, infinities, -0, 0, the smallest subnormal and the largest finite number, by dtype;
bytes that are these in a format of 8 bits, or would change if they were taken for signed numbers."""


def finite(dtype: str) -> list[int]:
    """Return bits of finite numbers of either sign, between 1e-4 and 3e4: some beyond what a quantised cache holds."""
    steps = {"bfloat16": 1, "float32": 1 << 16}
    numbers = range(0x3900, 0x46F0, 37)
    return [bits * steps[dtype] - (sign << 15) * steps[dtype] for bits in numbers for sign in (0, 1)]
