"""Checks of numbers and dtypes, with errors that name what they are of."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError

__all__ = ["COPY_DTYPES", "QUANTISED_DTYPES", "check_cache_dtype", "check_int", "check_op_words", "check_size"]

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


def check_op_words(name: str, taken: Container[str], tensors: Mapping[str, tuple[object, object]]) -> None:
    """Refuse what the schema of a plugin's op says, if it means another op or nobody could tell what a tensor may be.

    Args:
        name: name of the op.
        taken: names of kvdock's own.
        tensors: by argument, lines of sizes in the language of `kvdock.ops.schema`, and dtypes. A text for a tuple would be read letter
            by letter.
    """
    if name in taken or not name.isidentifier():
        raise ArgumentValueError(
            "Op: schema.name", expected="an identifier that is no op of kvdock's own", got=repr(name), fix="choose another name"
        )
    for arg, (dims, dtypes) in tensors.items():
        if not (isinstance(dims, tuple) and dims and all(map(_is_line, dims))):
            expected = "a tuple of lines of sizes, such as ('*T D',)"
            fix = "write one line for each rank that it may have, with a comma behind a single one"
            raise ArgumentValueError(f"Op: schema: {arg}: dims", expected=expected, got=repr(dims)[:80], fix=fix)
        if not (isinstance(dtypes, tuple) and dtypes and all(isinstance(dtype, torch.dtype) for dtype in dtypes)):
            fix = "list every dtype that the op takes, with a comma behind a single one"
            raise ArgumentValueError(f"Op: schema: {arg}: dtypes", expected="a tuple of torch.dtype", got=repr(dtypes)[:80], fix=fix)


def _is_line(line: object) -> bool:
    words = line.split() if isinstance(line, str) else ["?"]
    return all(word.isdigit() or word.removeprefix("*").isidentifier() for word in words[words[:1] == ["..."] :])
