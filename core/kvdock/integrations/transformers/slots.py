"""The slots of a table's tokens, on the device."""

from __future__ import annotations

import torch

from kvdock.scheduler import SequenceBatch

__all__ = ["SlotTensor"]


class SlotTensor:
    """Slots of all tokens of a batch, built once and extended step by step.

    A step costs its new tokens; building the whole mapping again in each layer would cost more than the write.

    Args:
        device: where the slots are needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty((0, 0), dtype=torch.int64, device=device)
        self._valid = 0

    def upto(self, batch: SequenceBatch, stop: int) -> torch.Tensor:
        """Return the slots of the first ``stop`` tokens, int64 ``[batch, stop]``; a view, good until the batch changes."""
        if stop > self._valid:
            self._extend(batch, stop)
        return self._buffer[:, :stop]

    def forget(self, start: int) -> None:
        """Tokens from ``start`` on may have moved."""
        self._valid = min(self._valid, start)

    def _extend(self, batch: SequenceBatch, stop: int) -> None:
        """Fill in what is missing of the first ``stop`` tokens, in a larger buffer where the old one is too small."""
        if self._buffer.shape[0] != batch.batch_size or stop > self._buffer.shape[1]:
            with torch.inference_mode(mode=False):
                self._buffer = torch.empty((batch.batch_size, 2 * stop), dtype=torch.int64, device=self._buffer.device)
            self._valid = 0
        self._buffer[:, self._valid : stop] = torch.from_numpy(batch.slot_mapping(self._valid, stop))
        self._valid = stop
