"""Reading what `PagedCacheForTransformers.commit` is given: which tokens are in which blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentValueError
from kvdock.integrations.transformers.bound import Bound
from kvdock.integrations.transformers.prompts import Prompts, read_ids
from kvdock.integrations.transformers.state import PagedState
from kvdock.scheduler import SequenceBatch

__all__ = ["committable", "computed_rows", "publish"]

_COMMIT = "PagedCacheForTransformers.commit: out"

Ids = npt.NDArray[np.int64]


def committable(bound: Bound | None, epoch: int) -> Bound:
    """Return a batch whose computed tokens are known and not stored yet.

    Args:
        bound: the batch that is there, or None.
        epoch: how often everything was forgotten so far.

    Raises:
        ArgumentValueError: there is none; the text says why.
    """
    if bound and bound.epoch != epoch:
        bound.close("one from before forget_prefixes(), perhaps of other weights")
    if bound and (oddity := bound.seen.judge()):
        bound.close(f"one that was computed {oddity.why}", oddity.fix)
    if bound is None or bound.closed:
        raise ArgumentValueError(
            "PagedCacheForTransformers.commit",
            expected="a batch that bind() began and generate() computed",
            got=bound.closed.why if bound and bound.closed else "none",
            fix=(bound and bound.closed and bound.closed.fix) or "call out = model.generate(**cache.bind(**inputs)), then commit(out) once",
        )
    return bound


def computed_rows(bound: Bound, batch: SequenceBatch, out: Any) -> dict[int, tuple[Ids, int]]:
    """Return what a batch computed, by row: the token ids that its sequence does not know, and how many of it are worth keeping.

    Where rows were reordered, only prompts are: what was generated behind them cannot be told from the output.

    Args:
        bound: the batch.
        batch: its rows.
        out: what ``generate`` returned, or ids ``[rows, length]``.

    Raises:
        ArgumentValueError: other rows, prompts or lengths than the cache computed.
    """
    ids = read_ids(_COMMIT, getattr(out, "sequences", out))
    # Where rows went on from others, as beams do, results come prompt by prompt again.
    origin = np.arange(len(bound.prompts.pads)) if bound.is_reordered else bound.origin
    if bound.is_reordered and len(ids) % len(origin) == 0:
        origin = np.repeat(origin, len(ids) // len(origin))
    _check_prompts(ids, bound.prompts, origin)
    if bound.is_reordered:
        prompts, rows = np.unique(bound.origin, return_index=True)
        ends = np.full(len(prompts), min(bound.prompts.length, batch.length))
        ids = bound.prompts.ids[prompts]
    else:
        _check_length(ids.shape[1], batch.length)
        prompts, rows = bound.origin, np.arange(len(bound.origin))
        ends = _ends(ids[:, : batch.length], bound.prompts)
    _check_fed(ids, bound.seen.fed(len(bound.origin))[rows], bound.seen.start)
    pads = bound.prompts.pads[prompts]
    # From `steady` on keys depend on the length of the pass, and behind padding, in some models, on the padding.
    ends = np.where(bound.sharing.padded | (pads == 0), np.minimum(ends, bound.steady), 0)
    return dict(_new_tokens(batch, ids, rows, pads, ends))


def publish(state: PagedState, batch: SequenceBatch, ends: dict[int, tuple[Ids, int]]) -> None:
    """Let prefixes of rows be found from now on.

    Args:
        state: what has the rows.
        batch: the rows.
        ends: what `computed_rows` returned.
    """
    rows = batch.sequences
    with state.change():
        state.manager.commit([rows[row] for row in ends], [ids for ids, _ in ends.values()], computed=[stop for _, stop in ends.values()])


def _check_prompts(ids: Ids, prompts: Prompts, origin: npt.NDArray[np.intp]) -> None:
    """Raise unless each row begins with its prompt."""
    if len(ids) != len(origin):
        raise ArgumentValueError(
            _COMMIT, expected=f"{len(origin)} rows, as in the cache", got=len(ids), fix="pass all that generate() returned"
        )
    wrong = "too few tokens" if ids.shape[1] < prompts.length else ""
    if not wrong and (others := (ids[:, : prompts.length] != prompts.ids[origin]).any(axis=1)).any():
        wrong = f"another beginning in row {int(others.argmax())}"
    if wrong:
        raise ArgumentValueError(
            _COMMIT,
            expected=f"sequences that begin with the {prompts.length} tokens that were bound, padding included",
            got=wrong,
            fix="commit what generate() returned for the last bind()",
        )


def _check_length(length: int, held: int) -> None:
    """Raise if the sequences are longer than what the cache holds and one token that was not fed.

    They may be shorter: with ``synced_gpus`` a rank that is done goes on until all are.
    """
    if length > held + 1:
        raise ArgumentValueError(
            _COMMIT,
            expected=f"at most the {held} tokens that the cache holds, and one more",
            got=f"{length} tokens",
            fix=f"commit what generate() returned, or what of it was computed: out[:, :{held}]",
        )


def _check_fed(ids: Ids, fed: Ids, start: int) -> None:
    """Raise unless sequences have the tokens that were fed behind the first ``start``."""
    length = min(ids.shape[1] - start, fed.shape[1])
    if (others := ids[:, start : start + length] != fed[:, :length]).any():
        row, token = (int(place[0]) for place in others.nonzero())
        raise ArgumentValueError(
            _COMMIT,
            expected="the tokens that were computed",
            got=f"another for token {start + token} of row {row}",
            fix="commit what generate() returned for the last bind()",
        )


def _ends(computed: Ids, prompts: Prompts) -> npt.NDArray[np.intp]:
    """Return for each row how many tokens are worth keeping: a row that ended is fed padding until the last one does."""
    is_stop = np.isin(computed, prompts.stops)
    # Within a prompt such tokens end nothing, as between the turns of a chat.
    is_stop[:, : prompts.length] = False
    ends: npt.NDArray[np.intp] = np.where(is_stop.any(axis=1), is_stop.argmax(axis=1) + 1, computed.shape[1])
    return ends


def _new_tokens(
    batch: SequenceBatch, ids: Ids, rows: npt.NDArray[np.intp], pads: Ids, ends: npt.NDArray[np.intp]
) -> Iterator[tuple[int, tuple[Ids, int]]]:
    """Yield each row with tokens from ``pads[i]`` to ``ends[i]``, those of them that its sequence does not know, and their number."""
    for line, row, pad, end in zip(ids, rows.tolist(), pads.tolist(), ends.tolist(), strict=True):
        seq = batch.sequences[row]
        if end - pad > seq.computed:
            yield row, (line[pad + seq.num_known : end], end - pad)
