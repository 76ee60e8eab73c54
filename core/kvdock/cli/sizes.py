"""Numbers of tokens as people write them: 3M, 512k, 10e6."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal

from kvdock.errors import ArgumentValueError

__all__ = ["show_size", "sizes"]

_NUMBER = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?(?:[eE]\+?[0-9]{1,2})?)\s*([kMG]?)")
_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def sizes(option: str, values: Iterable[str]) -> list[int]:
    """Return the numbers of an option that may be there several times, each time with several numbers behind commas.

    Raises:
        ArgumentValueError: something is no whole number of at least 1.
    """
    return list(dict.fromkeys(_size(option, part.strip()) for value in values for part in value.split(",")))


def _size(option: str, text: str) -> int:
    match = _NUMBER.fullmatch(text)
    number = Decimal(match[1]) * _FACTORS[match[2]] if match else Decimal(0)
    if number < 1 or number != int(number):
        raise ArgumentValueError(option, expected="a whole number of tokens such as 3000000, 3M, 512k or 10e6", got=repr(text)[:80])
    return int(number)


def show_size(tokens: int) -> str:
    """Return a number of tokens in the same short form where that is exact, such as ``3M``, and with commas elsewhere."""
    for suffix in ("G", "M", "k"):
        if tokens % _FACTORS[suffix] == 0:
            return f"{tokens // _FACTORS[suffix]}{suffix}"
    return f"{tokens:,}"
