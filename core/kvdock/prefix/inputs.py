"""Reading what callers pass: token ids, slots, namespaces, sizes. Nothing that is returned aliases it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.spec import check_int

__all__ = [
    "MAX_SLOTS",
    "as_integers",
    "block_count",
    "blocks_of",
    "check_block_size",
    "check_distinct",
    "check_priority",
    "check_start",
    "count_of",
    "index_of",
    "namespace_key",
    "out_of_range",
    "slots_of",
    "twice",
]

_PLAIN = {np.dtype(np.int32).char, np.dtype(np.int64).char}
"""Kinds of integers that need no further look."""

_MAX_BLOCK_SIZE = 512
MAX_SLOTS = 2**31
"""More than any pool has: slots are int32, which takes half the time and memory of int64."""


def check_block_size(subject: str, block_size: object) -> int:
    """Return a block size from 1 to 512, or raise."""
    size = check_int(f"{subject}: block_size", block_size, 1)
    if size > _MAX_BLOCK_SIZE:
        raise ArgumentValueError(f"{subject}: block_size", expected=f"1 to {_MAX_BLOCK_SIZE} tokens", got=size)
    return size


def as_integers(subject: str, values: Any) -> npt.NDArray[Any]:
    """Return values as an array of integers with one dimension; it may alias the caller's memory.

    Raises:
        ArgumentTypeError: they are no integers, or beyond 64 bits.
        ArgumentValueError: more than one dimension, or memory of a device.
    """
    if type(values) is np.ndarray and values.dtype.char in _PLAIN and values.ndim == 1:
        return values
    array = values if isinstance(values, np.ndarray) else _as_array(subject, values)
    if array.dtype.kind not in "iu" or (array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max):
        got = f"{array.dtype}" if array.dtype.kind not in "uO" else "numbers beyond 64 bits, or no numbers"
        raise ArgumentTypeError(subject, expected="integers of at most 64 bits", got=got, fix="pass token ids or slots as int32 or int64")
    if array.ndim != 1:
        raise ArgumentValueError(subject, expected="one dimension", got=f"shape {array.shape}", fix="pass one sequence at a time")
    return array


def _as_array(subject: str, values: Any) -> npt.NDArray[Any]:
    """Return what numpy makes of values."""
    if "float" in (dtype := str(getattr(values, "dtype", ""))):  # some kinds of torch's are not numpy's
        raise ArgumentTypeError(subject, expected="integers of at most 64 bits", got=dtype, fix="pass token ids or slots as int32 or int64")
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # torch names the device, numpy the ragged list
        fix = "bring a tensor to the host first: tensor.cpu()"
        raise ArgumentValueError(subject, expected="integers on the host", got=str(error), fix=fix) from error
    empty = not array.size and isinstance(values, list | tuple)  # which numpy takes for floats
    return array.astype(np.int64) if empty else array


def blocks_of(subject: str, slots: npt.NDArray[Any], block_size: int) -> npt.NDArray[np.int32]:
    """Return the block ids of slots that come in whole blocks.

    Of int32 slots, negative ones come through as negative ids: whoever looks ids up in a table finds them there for nothing.

    Args:
        subject: what to call them in an error.
        slots: integers ``[n * block_size]``.
        block_size: tokens in a block.

    Raises:
        ArgumentValueError: a slot is out of its place in a block, or beyond int32.
    """
    if slots.dtype.char not in _PLAIN:
        slots = slots.astype(np.int64)
    first, last = slots[::block_size], slots[block_size - 1 :: block_size]
    if block_size & (block_size - 1):
        blocks, ends = first // block_size, last // block_size
    else:  # a power of two: a shift takes half the time
        blocks, ends = first >> (shift := block_size.bit_length() - 1), last >> shift
    if blocks.tobytes() != ends.tobytes() or not _is_rising(slots, block_size):
        raise _misplaced(subject, slots.reshape(-1, block_size), block_size)
    if blocks.dtype != np.int32 and blocks.size:
        lowest, highest = int(blocks.min()), int(blocks.max())
        if lowest < 0 or highest >= MAX_SLOTS // block_size:
            raise out_of_range(subject, (lowest if lowest < 0 else highest) * block_size)
    return blocks.astype(np.int32, copy=False)


def check_distinct(subject: str, blocks: npt.NDArray[np.int32], block_size: int) -> None:
    """Raise an ArgumentValueError unless block ids are there once each, and none is negative."""
    ordered = np.sort(blocks)
    if ordered.size and ordered[0] < 0:
        raise out_of_range(subject, int(ordered[0]) * block_size)
    if np.any(ordered[1:] == ordered[:-1]):
        raise twice(subject, blocks, block_size)


def out_of_range(subject: str, slot: int) -> ArgumentValueError:
    """Describe a slot that no pool has."""
    return ArgumentValueError(subject, expected=f"slots from 0 to {MAX_SLOTS - 1}", got=f"slot {slot}")


def twice(subject: str, blocks: npt.NDArray[np.int32], block_size: int) -> ArgumentValueError:
    """Describe the least block that is there twice."""
    ordered = np.sort(blocks)
    block, fix = int(ordered[1:][ordered[1:] == ordered[:-1]][0]), "pass one block for each block of tokens"
    return ArgumentValueError(subject, expected="each slot once", got=f"slot {block * block_size} twice", fix=fix)


def _is_rising(slots: npt.NDArray[Any], block_size: int) -> bool:
    """Whether each slot but the first of a block is above the one before it. Where both ends are of one block, it is the next one."""
    if block_size == 1:
        return True
    rising = slots[1:] > slots[:-1]
    rising[block_size - 1 :: block_size] = True  # from one block to the next
    return b"\0" not in rising.tobytes()  # `all` is a call through Python, which takes longer than the search itself


def _misplaced(subject: str, rows: npt.NDArray[Any], block_size: int) -> ArgumentValueError:
    """Describe the first slot that is negative or not where its block has it."""
    wanted = rows[:, :1].astype(np.int64) // block_size * block_size + np.arange(block_size)
    row, column = np.argwhere(rows != wanted)[0]
    position = int(row) * block_size + int(column)
    return ArgumentValueError(
        subject,
        expected=f"slot {int(wanted[row, column])} at position {position}",
        got=int(rows[row, column]),
        fix=f"pass the slots of whole blocks in order: block_id * {block_size} + 0 to {block_size - 1}",
    )


def slots_of(blocks: npt.NDArray[np.int32], block_size: int) -> npt.NDArray[np.int32]:
    """Return the slots of blocks, int32 ``[n * block_size]``."""
    if block_size == 1 or not blocks.size:
        return blocks.copy()
    # In two passes over whole arrays: adding offsets block by block takes numpy half as long again.
    slots = (blocks * np.int32(block_size)).repeat(block_size)
    slots += _offsets(block_size, slots.size)
    return slots


_tiled: dict[int, npt.NDArray[np.int32]] = {}


def _offsets(block_size: int, size: int) -> npt.NDArray[np.int32]:
    """Return the places of ``size`` tokens in their blocks: a view of what the longest request so far needed."""
    found = _tiled.get(block_size)
    if found is None or found.size < size:
        found = _tiled[block_size] = np.tile(np.arange(block_size, dtype=np.int32), 2 * size // block_size)
    return found[:size]


def block_count(subject: str, size: object, block_size: int) -> int:
    """Return how many blocks hold ``size`` tokens, or raise if that is no int of at least 0."""
    return -(-count_of(subject, size) // block_size)


def count_of(subject: str, value: object, minimum: int = 0) -> int:
    """Return an int or numpy integer of at least ``minimum`` as an int, or raise."""
    return check_int(subject, int(value) if isinstance(value, np.integer) else value, minimum)


def index_of(subject: str, value: object) -> int:
    """Return an int or numpy integer of any size as an int, or raise."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ArgumentTypeError(subject, expected="an int", got=repr(value))
    return int(value)


def check_priority(subject: str, priority: object) -> int:
    """Return a priority, or raise unless it is an int."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ArgumentTypeError(subject, expected="an int", got=repr(priority))
    return priority


def check_start(subject: str, start: object, block_size: int) -> int:
    """Return a position between blocks, or raise."""
    position = count_of(subject, start)
    if position % block_size:
        raise ArgumentValueError(subject, expected=f"a multiple of the block size, {block_size}", got=position)
    return position


def namespace_key(subject: str, namespace: object) -> Hashable:
    """Return what to compare namespaces by: values together with their types, so that 1, True and "1" differ.

    Raises:
        ArgumentTypeError: not a tuple of str, bytes, int, bool, None and such tuples.
    """
    if not isinstance(namespace, tuple):
        raise ArgumentTypeError(subject, expected="a tuple", got=repr(namespace)[:80], fix='name what it is: ("tenant", "a")')
    return tuple(_part(subject, part) for part in namespace)


def _part(subject: str, part: object) -> Hashable:
    """Return one part of a namespace with its type."""
    if isinstance(part, tuple):
        return namespace_key(subject, part), tuple
    if part is None or type(part) in (str, bytes, int, bool):
        return part, type(part)
    raise ArgumentTypeError(subject, expected="str, bytes, int, bool, None, or tuples of these", got=repr(part)[:80])
