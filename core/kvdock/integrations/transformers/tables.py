"""What the ops of a step read of a batch, on the device: made once a step, however many layers there are.

::

    slots          [rows, tokens]    where the new tokens go, of each layer group; -1 for padding
    block_tables   [rows, blocks]    blocks of each row, of each layer group; those behind the shorter ones mean nothing
    lens           [rows]            tokens of each row in its blocks, the new ones included
    cu_query_lens  [rows + 1]        where each row's new tokens begin; None for one each
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvdock.scheduler import SequenceBatch

__all__ = ["StepTables", "is_accelerator", "sent"]


class StepTables:
    """Tables of the current step, or of the last one.

    Args:
        device: where they are needed.
        groups: layer groups of the pool.

    Attributes:
        start: places before the step, of each row.
        stop: places with those of the step.
        slots: int64, of each layer group.
        block_tables: int32, of each layer group; as the next two only where the step attends.
        lens: int64.
        cu_query_lens: int64, or None.
    """

    slots: list[torch.Tensor]
    block_tables: list[torch.Tensor]
    lens: torch.Tensor
    cu_query_lens: torch.Tensor | None

    def __init__(self, device: torch.device, groups: int) -> None:
        self._device, self._groups = device, range(groups)
        self._versions: list[int] = []
        self.start = self.stop = 0

    def forget(self) -> None:
        """What is shown is that of a step that is over."""
        self.start = self.stop = 0

    @property
    def count(self) -> int:
        """New tokens of each row."""
        return self.stop - self.start

    def begin(self, batch: SequenceBatch, start: int, stop: int, *, attends: bool) -> None:
        """Show a step that writes places ``start`` to ``stop - 1`` of each row; without ``attends`` only where they go."""
        rows, tokens = batch.batch_size, stop - start
        parts: list[npt.NDArray[Any]] = [batch.slot_mapping(start, stop, group).ravel() for group in self._groups]
        if attends:
            parts += [stop - batch.pads, np.arange(0, (rows + 1) * tokens, tokens)][: 2 if tokens > 1 else 1]
        with torch.inference_mode(mode=False):
            # One transfer for all that changes at each step.
            found = torch.split(sent(np.concatenate(parts), self._device), [part.size for part in parts])
            self.slots = [found[group].view(rows, tokens) for group in self._groups]
            if attends:
                self.lens, self.cu_query_lens = found[len(self._groups)], found[-1] if tokens > 1 else None
                self._show_blocks(batch)
        self.start, self.stop = start, stop

    def _show_blocks(self, batch: SequenceBatch) -> None:
        """Send the block tables, unless they are as they were but for what was let go, which nobody reads."""
        versions = [seq.table_version for seq in batch.sequences]  # in no two sequences the same
        if versions != self._versions:
            self.block_tables = [sent(batch.block_table(group), self._device) for group in self._groups]
            self._versions = versions


def sent(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array, which nobody changes any more, on a device; nobody waits for the copy."""
    found = torch.from_numpy(values)
    if device.type == found.device.type:
        return found
    return (found.pin_memory() if is_accelerator(device) else found).to(device, non_blocking=True)


def is_accelerator(device: torch.device) -> bool:
    """Return whether memory can be pinned for copies to a device, and copies from it be waited for by an event."""
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return current is not None and current.type == device.type
