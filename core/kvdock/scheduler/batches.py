"""Reading the arguments of a batch: its sequences, their new ids, how much of each."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentTypeError, ArgumentValueError, IndexRangeError, StaleHandleError
from kvdock.prefix.inputs import as_integers, count_of
from kvdock.scheduler.rows import Index, Owner, Rows

__all__ = ["TOO_MANY", "as_rows", "check_slots", "counts_of", "ids_of_step", "written_of"]

_row_of = attrgetter("_row")

TOO_MANY = 2**40
"""More tokens than any pool has room for."""


def as_rows(rows: Rows, subject: str, sequences: Any) -> Index:
    """Return the rows of open sequences of a manager, each there once, or raise. Not to be written."""
    batch, known = rows.last_batch
    try:
        # As from one call of a step to the next. Sequences are compared as objects; what is none may refuse to be compared.
        if (type(sequences) is list and batch == sequences) or (type(sequences) is tuple and batch == list(sequences)):
            return known
        if not isinstance(sequences, Sequence):  # what can be read only once would be found empty
            raise TypeError
        numbers = list(map(_row_of, sequences))
        if all(map(is_, map(rows.sequences.__getitem__, numbers), sequences)) and len(set(numbers)) == len(numbers):
            known = np.array(numbers, dtype=np.intp)
            rows.last_batch = list(sequences), known
            return known
    except (AttributeError, IndexError, TypeError, ValueError):
        pass
    raise _not_a_batch(rows, subject, sequences)


def _not_a_batch(rows: Rows, subject: str, sequences: Any) -> Exception:
    if not isinstance(sequences, Sequence) or isinstance(sequences, str | bytes):
        return ArgumentTypeError(subject, expected="a sequence from begin() or fork(), or a list of them", got=repr(sequences)[:80])
    for seq in sequences:
        if not isinstance(seq, Owner):
            return ArgumentTypeError(subject, expected="sequences from begin() or fork()", got=repr(seq)[:80])
        if seq._rows is not rows or not seq.is_open:
            got = "one that is finished or aborted" if seq._rows is rows else f"another manager's: {seq}"
            return StaleHandleError(subject, expected="an open sequence of this manager", got=got, fix="begin it again, in this manager")
    return ArgumentValueError(subject, expected="each sequence once", got="one that is there twice", fix="fork it for a second row")


def ids_of_step(tokens: Any, batch: int, *, is_one: bool) -> tuple[npt.NDArray[Any], Index]:
    """Return the new token ids of a batch, one sequence behind the other, and how many each has."""
    subject = "CacheManager.commit: tokens"
    if is_one:
        ids = as_integers(subject, tokens)
        return ids, np.array([ids.size])
    shape = getattr(tokens, "shape", None)
    if shape is None and isinstance(tokens, Sequence) and any(hasattr(row, "__len__") for row in tokens):
        parts = [as_integers(subject, row) for row in tokens]
        _check_batch(subject, len(parts), batch)
        return np.concatenate(parts), np.array([part.size for part in parts])
    if shape is not None and len(shape) == 2:
        _check_batch(subject, shape[0], batch)
        return as_integers(subject, tokens.reshape(-1)), np.full(batch, shape[1])
    ids = as_integers(subject, tokens)
    if ids.size == 0:
        return ids, np.zeros(batch, dtype=np.intp)
    _check_batch(subject, ids.size, batch)
    return ids, np.ones(batch, dtype=np.intp)


def _check_batch(subject: str, got: int, batch: int) -> None:
    if got != batch:
        fix = "pass [batch] ids for one each, [batch, n], or a list of as many arrays"
        raise ArgumentValueError(subject, expected=f"ids for {batch} sequences", got=f"for {got}", fix=fix)


def written_of(rows: Rows, sequences: Any, written: Any) -> tuple[Index, Index]:
    """Return the rows of a batch, and how many tokens of each are written."""
    subject = "CacheManager.note_written: written"
    batch = as_rows(rows, "CacheManager.note_written: seq", sequences)
    counts = counts_of(subject, as_integers(subject, written), batch.size)
    least, most = rows.computed[batch], rows.num_tokens[batch]
    if ((counts < least) | (counts > most)).any():
        expected = f"{least.tolist()}, what is computed, to {most.tolist()}, the room"
        raise IndexRangeError(subject, expected=expected, got=counts.tolist(), fix="make room with extend(), go back with truncate()")
    return batch, counts


def counts_of(subject: str, n: Any, batch: int) -> Index:
    """Return how many tokens each sequence gets; what no pool has is cut down to more than any pool has, and can be added up."""
    if isinstance(n, int | np.integer) and not isinstance(n, bool):
        return np.full(batch, min(count_of(subject, n), TOO_MANY))
    counts = as_integers(subject, n).astype(np.intp)
    if counts.size != batch:
        raise ArgumentValueError(subject, expected=f"one number, or {batch}: one for each sequence", got=counts.size)
    if counts.size and counts.min() < 0:
        raise ArgumentValueError(subject, expected="at least 0", got=int(counts.min()))
    return np.minimum(counts, TOO_MANY)


def check_slots(slots: Any, size: int) -> None:
    """Raise unless an array can take so many slots."""
    is_array = isinstance(slots, np.ndarray) and slots.flags.writeable
    if not is_array or slots.shape != (size,) or slots.dtype.char not in (np.dtype(np.int32).char, np.dtype(np.int64).char):
        raise ArgumentValueError(
            "CacheManager.extend: slots",
            expected=f"a numpy array of int32 or int64 [{size}], the sum of n, that can be written",
            got=f"{slots.dtype} {list(slots.shape)}" if is_array else repr(slots)[:80],
            fix="pass tensor.numpy() of a tensor on the host; BatchTables copies to a device",
        )
