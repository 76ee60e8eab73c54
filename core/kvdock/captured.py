"""A model's decode step as one call: a graph of the device for each size of batch, over tables that stay where they are.

::

    sizes       1 | 2 | 4 | 8 | 16        one graph each, all in one pool of memory
    5 rows come             ^             run in the graph for 8: three rows of padding, of length 0 and slot -1

Where a device captures nothing, or its backend does not, the same code runs without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.runtime import Runtime, default
from kvdock.scheduler.batch_tables import BatchTables, TableViews
from kvdock.scheduler.sequence import CacheSequence
from kvdock.spec import check_int

__all__ = ["CapturedSteps", "Step"]

Step = Callable[..., torch.Tensor]
"""``step(tables, *inputs)``: decodes a token of each of ``b`` rows; see `CapturedSteps`."""


class CapturedSteps:
    """Runs a decode step for batches of up to the largest of ``batch_sizes``, as a graph where the device has graphs.

    Making it calls the step once for each size, on rows of padding only, so that a step that fails does so here. A backend that
    captures calls it twice more for each size on a stream of its own, and then once to record it; after that it is never called
    again. All graphs share the memory of the largest. Use it from the thread of the manager, on one stream at a time.

    Args:
        step: ``step(tables, *inputs)`` returns a tensor ``[b, ...]``, such as logits, of `TableViews` and inputs of ``b`` rows. It
            writes keys and values at ``tables.slot_mapping``, ``[b]``, and attends by ``block_table`` and ``seq_lens``. It must not
            wait for the device, nor do on the host what differs from call to call: a graph repeats launches. No gradients are recorded.
        tables: where batches are shown, at least as large as the largest batch. Others may use them too, between runs.
        inputs: for each input of the step what padding has there, ``[...]``, which is one row; by default one input, a token id.
        batch_sizes: the sizes, each at least 1.
        runtime: whose backend captures; by default the process's.

    Attributes:
        tables: the tables.
        batch_sizes: the sizes, ascending.
        is_captured: whether there are graphs. Otherwise each run calls the step.

    Raises:
        ArgumentTypeError: no tables, or an input that is no tensor.
        ArgumentValueError: no sizes, one below 1, or one beyond the tables; a step whose result has not one row for each of the batch.
        BackendError: no backend can be chosen for the device.
    """

    def __init__(
        self,
        step: Step,
        tables: BatchTables,
        *,
        inputs: Sequence[torch.Tensor] | None = None,
        batch_sizes: Sequence[int] = (1, 2, 4, 8, 16),
        runtime: Runtime | None = None,
    ) -> None:
        self.tables = _checked_tables(tables)
        self.batch_sizes = _checked_sizes(batch_sizes, tables.seq_lens.numel())
        rows = [torch.zeros((), dtype=torch.int64, device="cpu")] if inputs is None else [_checked_row(row) for row in inputs]
        device, largest = tables.seq_lens.device, self.batch_sizes[-1]
        self._padding = [row.to(device) for row in rows]
        self._inputs = [row.expand(largest, *row.shape).clone() for row in self._padding]
        self._shown = 0  # rows of the inputs that may be something else than padding
        tables.update([])  # nothing but padding, which writes nothing
        # The largest first, so that its memory is there for the others. Kept, since graphs hold no tensor of the step's.
        self._steps = {size: self._step_of(step, size) for size in reversed(self.batch_sizes)}
        replays = (runtime or default()).capture(device, list(self._steps.values()))
        self._replays = dict(zip(self._steps, replays, strict=True))
        self.is_captured = any(self._replays[size] is not own for size, own in self._steps.items())

    def __repr__(self) -> str:
        return f"CapturedSteps(batch_sizes={self.batch_sizes}, is_captured={self.is_captured}, {self.tables!r})"

    def run(self, sequences: Sequence[CacheSequence], *inputs: Any, seq_lens: Any = None) -> torch.Tensor:
        """Show a batch in the tables and decode its last tokens; there is room for them already.

        Args:
            sequences: as `BatchTables.update` takes them, one to the largest size.
            inputs: for each input of the step its rows ``[batch, ...]``: a tensor, on the device or on the host, an array or a list.
            seq_lens: tokens of each, as `BatchTables.update` takes them.

        Returns:
            What the step returns for them, ``[batch, ...]``, until the next run: a graph puts it where the last one was.

        Raises:
            ArgumentValueError: no sequence, or more than the largest size; inputs of another number, shape or kind. Nothing was changed.
            KVDockError: as `BatchTables.update`. Nothing was changed.
        """
        batch = len(sequences)
        size = next((size for size in self.batch_sizes if 0 < batch <= size), None)
        if size is None:
            sizes = ", ".join(map(str, self.batch_sizes))
            fix = "split the batch, or make the steps with a larger one in batch_sizes"
            raise ArgumentValueError(
                "CapturedSteps.run: sequences", expected=f"1 to {self.batch_sizes[-1]}, for batch_sizes {sizes}", got=batch, fix=fix
            )
        rows = self._checked_inputs(inputs, batch)
        self.tables.update(sequences, seq_lens=seq_lens)
        before, self._shown = self._shown, max(self._shown, batch)
        for buffer, values, padding in zip(self._inputs, rows, self._padding, strict=True):
            on_host = values.device != buffer.device
            buffer[:batch].copy_(self.tables.staged(values) if on_host else values, non_blocking=True)
            if batch < before:
                buffer[batch:before] = padding
        self._shown = batch
        result: torch.Tensor = self._replays[size]()
        return result[:batch]

    def _step_of(self, step: Step, size: int) -> Callable[[], torch.Tensor]:
        """Return the step of so many rows, once it has run."""
        run = partial(_without_gradients, step, self.tables.first(size, size), [buffer[:size] for buffer in self._inputs])
        result = run()
        if not isinstance(result, torch.Tensor) or result.dim() == 0 or result.shape[0] != size:
            got = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            raise ArgumentValueError("CapturedSteps: step", expected=f"a tensor [{size}, ...] for {size} rows", got=got)
        return run

    def _checked_inputs(self, inputs: Sequence[Any], batch: int) -> list[torch.Tensor]:
        """Return the inputs as tensors; a shape that would be broadcast, or a dtype that would lose something, is an error."""
        rows = [values if isinstance(values, torch.Tensor) else torch.as_tensor(values, device="cpu") for values in inputs]
        expected = [(buffer.dtype, [batch, *buffer.shape[1:]]) for buffer in self._inputs]
        fit = [list(row.shape) == shape and torch.can_cast(row.dtype, dtype) for row, (dtype, shape) in zip(rows, expected, strict=False)]
        if len(rows) != len(expected) or not all(fit):
            got = [(row.dtype, list(row.shape)) for row in rows]
            raise ArgumentValueError("CapturedSteps.run: inputs", expected=str(expected), got=str(got))
        return rows


def _without_gradients(step: Step, tables: TableViews, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return step(tables, *inputs)


def _checked_tables(tables: Any) -> BatchTables:
    if not isinstance(tables, BatchTables):
        raise ArgumentTypeError("CapturedSteps: tables", expected="BatchTables", got=type(tables).__name__)
    return tables


def _checked_row(row: Any) -> torch.Tensor:
    if not isinstance(row, torch.Tensor):
        raise ArgumentTypeError("CapturedSteps: inputs", expected="tensors, one row of each input", got=type(row).__name__)
    return row


def _checked_sizes(sizes: Sequence[int], rows: int) -> tuple[int, ...]:
    ascending = tuple(sorted({check_int("CapturedSteps: batch_sizes", size, 1) for size in sizes}))
    if not ascending or ascending[-1] > rows:
        fix = "make the tables with a larger batch_size, or name smaller sizes"
        raise ArgumentValueError(
            "CapturedSteps: batch_sizes", expected=f"at least one, up to the tables' {rows} rows", got=list(sizes), fix=fix
        )
    return ascending
