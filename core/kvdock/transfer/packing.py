"""Runs of bytes as one: for transports that send streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvdock.transfer.spans import Spans

__all__ = ["Runs", "gather", "scatter"]

Ints = npt.NDArray[np.int64]

_MOST_ROWS = 64
"""Rows of a run on average, up to which an index of rows is quicker than a copy of each run."""


@attrs.frozen(eq=False)
class Runs:
    """Runs of one side, int64 ``[N]`` each, in the order of a stream.

    Args:
        region: number of the region.
        begin: first byte in it.
        nbytes: bytes of the run.
    """

    region: Ints
    begin: Ints
    nbytes: Ints

    @classmethod
    def of_source(cls, spans: Spans) -> Runs:
        """Return what is read."""
        return cls(spans.source_region, spans.source, spans.nbytes)

    @classmethod
    def of_target(cls, spans: Spans) -> Runs:
        """Return what is written."""
        return cls(spans.target_region, spans.target, spans.nbytes)

    def part(self, start: int, stop: int) -> Runs:
        """Return the runs of bytes ``start`` to ``stop - 1`` of the stream."""
        ends = np.cumsum(self.nbytes)
        first = np.searchsorted(ends, start, "right")
        last = np.searchsorted(ends, stop, "left") + 1 if start < stop else first  # a run of no bytes has no rows
        begins, ends = (ends - self.nbytes)[first:last], ends[first:last]
        cut = np.maximum(start - begins, 0)
        return Runs(self.region[first:last], self.begin[first:last] + cut, np.minimum(ends, stop) - begins - cut)

    def _copies(self, memory: Sequence[torch.Tensor], stream: torch.Tensor) -> Iterator[tuple[torch.Tensor, Ints, torch.Tensor, Ints]]:
        """Yield (rows of a region, which of them, rows of the stream, which of them); together all runs."""
        at = np.cumsum(self.nbytes) - self.nbytes
        row = int(np.gcd.reduce(np.concatenate([self.begin, self.nbytes])))
        if self.nbytes.size * _MOST_ROWS * row < stream.numel():  # few long runs: each is a row of its own size
            for region, begin, to, nbytes in zip(*(each.tolist() for each in (self.region, self.begin, at, self.nbytes)), strict=True):
                yield (
                    memory[region][None, begin : begin + nbytes],
                    np.zeros(1, np.int64),
                    stream[None, to : to + nbytes],
                    np.zeros(1, np.int64),
                )
            return
        for region in np.unique(self.region).tolist():
            mine = self.region == region
            counts = self.nbytes[mine] // row
            step = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            rows, found = (np.repeat(each[mine] // row, counts) + step for each in (self.begin, at))
            word = _word(row, memory[region])
            yield _rows(memory[region], row, word), rows, _rows(stream, row, word), found


def _word(row: int, memory: torch.Tensor) -> torch.dtype:
    """Return the widest elements that rows can be seen as: torch copies each element."""
    words = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return next(word for word in words if not (row | int(memory.storage_offset())) % word.itemsize)


def _rows(memory: torch.Tensor, row: int, word: torch.dtype) -> torch.Tensor:
    return memory[: memory.numel() // row * row].view(word).view(-1, row // word.itemsize)


def gather(memory: Sequence[torch.Tensor], runs: Runs) -> torch.Tensor:
    """Return the bytes of some runs, uint8 ``[total]`` in memory of its own, on their device."""
    stream = torch.empty(int(runs.nbytes.sum()), dtype=torch.uint8, device=memory[0].device)
    for rows, which, to, places in runs._copies(memory, stream):
        to.index_copy_(0, _index(places, to), rows.index_select(0, _index(which, rows)))
    return stream


def scatter(memory: Sequence[torch.Tensor], runs: Runs, stream: torch.Tensor) -> None:
    """Write the bytes of a stream, uint8 ``[total]``, to where some runs are."""
    for rows, which, of, places in runs._copies(memory, stream):
        rows.index_copy_(0, _index(which, rows), of.index_select(0, _index(places, of)))


def _index(rows: Ints, memory: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(rows).to(memory.device)
