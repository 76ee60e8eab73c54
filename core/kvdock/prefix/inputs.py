"""Reading what callers pass: token ids, slots, namespaces, sizes. Nothing that is returned aliases it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.spec import check_int

__all__ = ["as_integers", "block_count", "blocks_of", "check_block_size", "namespace_key", "slots_of"]

_MAX_BLOCK_SIZE = 512
_MAX_BLOCKS = 2**31
"""More blocks than any pool has: an id beyond is a mistake, and would cost a bookkeeping of its size."""


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
    if isinstance(values, np.ndarray):
        array = values
    else:
        try:
            array = np.asarray(values)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # torch names the device, numpy the ragged list
            fix = "bring a tensor to the host first: tensor.cpu()"
            raise ArgumentValueError(subject, expected="integers on the host", got=str(error), fix=fix) from error
        if not array.size and isinstance(values, list | tuple):
            array = array.astype(np.int64)  # numpy takes an empty list for floats
    if array.dtype.kind not in "iu" or (array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max):
        got = f"{array.dtype}" if array.dtype.kind not in "uO" else "numbers beyond 64 bits, or no numbers"
        raise ArgumentTypeError(subject, expected="integers of at most 64 bits", got=got, fix="pass token ids or slots as int32 or int64")
    if array.ndim != 1:
        raise ArgumentValueError(subject, expected="one dimension", got=f"shape {array.shape}", fix="pass one sequence at a time")
    return array


def blocks_of(subject: str, slots: npt.NDArray[Any], block_size: int) -> npt.NDArray[np.int64]:
    """Return the block ids of slots that come in whole blocks.

    Args:
        subject: what to call them in an error.
        slots: integers ``[n * block_size]``.
        block_size: tokens in a block.

    Raises:
        ArgumentValueError: a slot is negative, out of its place in a block, or beyond 2**31 blocks; or a block is there twice.
    """
    if block_size == 1:
        blocks = slots.astype(np.int64)
    else:
        rows = slots.reshape(-1, block_size)
        blocks = rows[:, 0].astype(np.int64) // block_size
        if not np.array_equal(rows, blocks[:, None] * block_size + np.arange(block_size)):
            raise _misplaced(subject, rows, block_size)
    if blocks.size and (blocks.min() < 0 or blocks.max() >= _MAX_BLOCKS):
        wrong = blocks[(blocks < 0) | (blocks >= _MAX_BLOCKS)]
        raise ArgumentValueError(subject, expected=f"slots of blocks 0 to {_MAX_BLOCKS - 1}", got=f"slot {int(wrong[0]) * block_size}")
    if blocks.size > 1 and not (blocks[1:] > blocks[:-1]).all():
        ordered = np.sort(blocks)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if twice.size:
            raise ArgumentValueError(
                subject,
                expected="each slot once",
                got=f"slot {int(twice[0]) * block_size} twice",
                fix="pass one block for each block of tokens",
            )
    return blocks


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


def slots_of(blocks: npt.NDArray[Any], block_size: int) -> npt.NDArray[np.int64]:
    """Return the slots of blocks, int64 ``[n * block_size]``."""
    first = blocks.astype(np.int64)
    if block_size == 1:
        return first
    slots: npt.NDArray[np.int64] = ((first * block_size)[:, None] + np.arange(block_size)).ravel()
    return slots


def block_count(subject: str, size: object, block_size: int) -> int:
    """Return how many blocks hold ``size`` tokens, or raise if that is no int of at least 0."""
    number = check_int(subject, int(size) if isinstance(size, np.integer) else size, 0)
    return -(-number // block_size)


def namespace_key(subject: str, namespace: object) -> Hashable:
    """Return what to compare namespaces by: values together with their types, so that 1, True and "1" differ.

    Raises:
        ArgumentTypeError: not a tuple of str, bytes, int, bool, None and such tuples.
    """
    if namespace == () and isinstance(namespace, tuple):
        return ()
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
