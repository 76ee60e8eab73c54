"""Checks of numbers and dtypes, with errors that name what they are of."""

from __future__ import annotations

import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError

__all__ = ["COPY_DTYPES", "QUANTISED_DTYPES", "check_cache_dtype", "check_int", "check_size"]

COPY_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8)
"""Dtypes a cache stores as they come, bit for bit. ``uint8`` is for bytes in whatever format: no op looks into them."""

QUANTISED_DTYPES = (
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)
"""Dtypes that are stored as ``x / scale``. The names are settled; the kernels are not there yet."""

_MOST_ELEMENTS = 2**31 - 1
"""Bound on heads and dims: what cannot be meant is refused before anything is made of it."""


def check_int(subject: str, value: object, minimum: int) -> int:
    """Return an int of at least ``minimum``, or raise an error that names ``subject``. Booleans are no ints here."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(subject, expected=f"an int of at least {minimum}", got=repr(value))
    if value < minimum:
        raise ArgumentValueError(subject, expected=f"at least {minimum}", got=value)
    return value


def check_size(subject: str, value: object, most: int = _MOST_ELEMENTS) -> int:
    """Return a number of heads, elements or the like, from 1 to ``most``, or raise an error that names ``subject``."""
    size = check_int(subject, value, 1)
    if size > most:
        raise ArgumentValueError(subject, expected=f"at most {most}", got=size, fix="look for a unit or a product that is meant otherwise")
    return size


def check_cache_dtype(subject: str, dtype: object) -> torch.dtype:
    """Return a dtype that a cache can store today, or raise an error that names ``subject``."""
    names = ", ".join(str(d) for d in COPY_DTYPES)
    if not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(subject, expected=f"one of {names}", got=repr(dtype))
    if dtype in QUANTISED_DTYPES:
        raise UnsupportedError(
            subject, expected=f"one of {names}", got=f"{dtype}: quantised caches are not there yet", fix="store the model's own dtype"
        )
    if dtype not in COPY_DTYPES:
        raise ArgumentTypeError(subject, expected=f"one of {names}", got=dtype)
    return dtype
