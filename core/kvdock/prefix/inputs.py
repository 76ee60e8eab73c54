"""Reading what callers pass: token ids, block ids, namespaces, sizes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.spec import check_int

__all__ = [
    "MAX_BLOCK_SIZE",
    "MAX_SLOTS",
    "as_array",
    "as_blocks",
    "as_integers",
    "check_block_size",
    "check_distinct",
    "check_priority",
    "count_of",
    "index_of",
    "namespace_key",
    "out_of_range",
    "slots_of",
    "twice",
]

_INT32 = np.dtype(np.int32)
_PLAIN = {_INT32.char, np.dtype(np.int64).char}
"""Kinds of integers that need no further look."""

MAX_BLOCK_SIZE = 512
MAX_SLOTS = 2**31
"""No pool has more: slots and block ids are int32, which takes half the time and memory of int64."""


def check_block_size(subject: str, block_size: object) -> int:
    """Return a block size from 1 to 512, or raise."""
    size = check_int(f"{subject}: block_size", block_size, 1)
    if size > MAX_BLOCK_SIZE:
        raise ArgumentValueError(f"{subject}: block_size", expected=f"1 to {MAX_BLOCK_SIZE} tokens", got=size)
    return size


def as_integers(subject: str, values: Any) -> npt.NDArray[Any]:
    """Return values as an array of integers with one dimension; it may alias the caller's memory.

    Raises:
        ArgumentTypeError: they are no integers, or beyond 64 bits.
        ArgumentValueError: more than one dimension, or memory of a device.
    """
    if type(values) is np.ndarray and values.dtype.char in _PLAIN and values.ndim == 1:
        return values
    array = as_array(subject, values)
    if array.dtype.kind not in "iu" or (array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max):
        got = f"{array.dtype}" if array.dtype.kind not in "uO" else "numbers beyond 64 bits, or no numbers"
        raise ArgumentTypeError(subject, expected="integers of at most 64 bits", got=got, fix="pass ids as int32 or int64")
    if array.ndim != 1:
        raise ArgumentValueError(subject, expected="one dimension", got=f"shape {array.shape}", fix="pass one sequence at a time")
    return array.astype(np.int64) if array.dtype == np.uint64 else array  # together with others these would become doubles


def as_array(subject: str, values: Any) -> npt.NDArray[Any]:
    """Return what numpy makes of values; it may alias the caller's memory.

    Raises:
        ArgumentTypeError: a tensor of floats.
        ArgumentValueError: numpy makes nothing of them: lists of unlike length, memory of a device.
    """
    if isinstance(values, np.ndarray):
        return values
    if "float" in (dtype := str(getattr(values, "dtype", ""))):  # some kinds of torch's are not numpy's
        raise ArgumentTypeError(subject, expected="integers of at most 64 bits", got=dtype, fix="pass ids as int32 or int64")
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # torch names the device, numpy the ragged list
        if hasattr(values, "device"):
            fix = "bring a tensor to the host first: tensor.cpu()"
            raise ArgumentValueError(subject, expected="integers on the host", got=str(error), fix=fix) from error
        fix = "pass one flat list of ints, such as [1, 2, 3]"
        raise ArgumentValueError(subject, expected="integers in one dimension", got=repr(values)[:80], fix=fix) from error
    empty = not array.size and isinstance(values, list | tuple | range)  # which numpy takes for floats
    return array.astype(np.int64) if empty else array


def as_blocks(subject: str, values: Any, count: int | None = None) -> npt.NDArray[np.int32]:
    """Return block ids as int32 ``[n]``; they may alias the caller's memory.

    Negative ids within int32 come through: whoever looks ids up in a table finds them there for nothing.

    Args:
        subject: what to call them in an error.
        values: what the caller passed.
        count: how many there must be.

    Raises:
        ArgumentTypeError: no integers.
        ArgumentValueError: another number of them, or ids beyond int32.
    """
    if type(values) is np.ndarray and values.dtype is _INT32 and values.ndim == 1 and values.size == count:
        return values  # mostly: in half the time of what follows
    blocks = as_integers(subject, values)
    if count is not None and blocks.size != count:
        fix = "pass the ids of whole blocks: the first n // block_size of a block table"
        raise ArgumentValueError(subject, expected=f"{count}, one for each whole block of tokens", got=blocks.size, fix=fix)
    if blocks.dtype is not _INT32:  # there is one such object; a comparison takes several times as long
        if blocks.size and not 0 <= (extreme := _most_extreme(blocks)) < MAX_SLOTS:
            raise out_of_range(subject, extreme, 1)
        blocks = blocks.astype(_INT32)
    return blocks


def _most_extreme(values: npt.NDArray[Any]) -> int:
    """Return the least value if that is negative, else the greatest."""
    lowest = int(values.min())
    return lowest if lowest < 0 else int(values.max())


def check_distinct(subject: str, blocks: npt.NDArray[np.int32], block_size: int) -> None:
    """Raise an ArgumentValueError unless block ids are there once each, and of a pool of fewer than 2**31 slots."""
    if blocks.size and not 0 <= (extreme := _most_extreme(blocks)) < MAX_SLOTS // block_size:
        raise out_of_range(subject, extreme, block_size)
    if np.unique(blocks).size != blocks.size:
        raise twice(subject, blocks)


def out_of_range(subject: str, block: int, block_size: int) -> ArgumentValueError:
    """Describe a block that no pool has."""
    most = MAX_SLOTS // block_size - 1
    expected, fix = f"blocks from 0 to {most}, since a pool has at most 2**31 slots", "pass ids of the pool's blocks, not slots or padding"
    return ArgumentValueError(subject, expected=expected, got=f"block {block}", fix=fix)


def twice(subject: str, blocks: npt.NDArray[np.int32]) -> ArgumentValueError:
    """Describe the least block that is there twice."""
    ordered = np.sort(blocks)
    block, fix = int(ordered[1:][ordered[1:] == ordered[:-1]][0]), "pass one block for each block of tokens"
    return ArgumentValueError(subject, expected="each block once", got=f"block {block} twice", fix=fix)


def slots_of(blocks: npt.NDArray[np.int32], block_size: int) -> npt.NDArray[np.int32]:
    """Return the slots of blocks, int32 ``[n * block_size]``, an array of its own."""
    slots: npt.NDArray[np.int32] = np.add.outer(blocks * np.int32(block_size), np.arange(block_size, dtype=np.int32)).ravel()
    return slots


def count_of(subject: str, value: object, minimum: int = 0) -> int:
    """Return an int or numpy integer of at least ``minimum`` as an int, or raise."""
    if type(value) is int and value >= minimum:
        return value
    return check_int(subject, int(value) if isinstance(value, np.integer) else value, minimum)


def index_of(subject: str, value: object) -> int:
    """Return an int or numpy integer of any size as an int, or raise."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ArgumentTypeError(subject, expected="an int", got=repr(value), fix="pass an int or an integer of numpy's")
    return int(value)


def check_priority(subject: str, priority: object) -> int:
    """Return a priority, or raise unless it is an int of at most 64 bits."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ArgumentTypeError(subject, expected="an int", got=repr(priority))
    if not -(2**63) <= priority < 2**63:
        raise ArgumentValueError(subject, expected="an int of at most 64 bits", got=priority)
    return priority


def namespace_key(subject: str, namespace: object) -> Hashable:
    """Return what to compare namespaces by: values together with their types, so that 1, True and "1" differ.

    Raises:
        ArgumentTypeError: not a tuple of str, bytes, int, bool, None and such tuples.
    """
    if type(namespace) is tuple and not namespace:
        return ()
    if not isinstance(namespace, tuple):
        raise ArgumentTypeError(subject, expected="a tuple", got=repr(namespace)[:80], fix='name what it is: ("tenant", "a")')
    return tuple(_part(subject, part) for part in namespace)


def _part(subject: str, part: object) -> Hashable:
    if isinstance(part, tuple):
        return namespace_key(subject, part), tuple
    if part is None or type(part) in (str, bytes, int, bool):
        return part, type(part)
    raise ArgumentTypeError(subject, expected="str, bytes, int, bool, None, or tuples of these", got=repr(part)[:80])
