"""What the ops of a step read of a batch, on the device: made once a step, however many layers there are.

::

    slots          [rows, tokens]    where the new tokens go, of each layer group; -1 for padding
    block_tables   [rows, blocks]    blocks of each row, of each layer group; those behind the shorter ones mean nothing
    lens           [rows]            tokens of each row in its blocks, the new ones included
    cu_query_lens  [rows + 1]        where each row's new tokens begin; None for one each
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvdock.scheduler import SequenceBatch

__all__ = ["StepTables", "is_accelerator", "sent"]


_NO_VERSIONS: npt.NDArray[np.intp] = np.empty(0, dtype=np.intp)


class StepTables:
    """Tables of the current step, or of the last one.

    Args:
        device: where they are needed.
        block_sizes: tokens in a block, of each layer group of the pool.

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

    def __init__(self, device: torch.device, block_sizes: Sequence[int]) -> None:
        self._device, self._groups, self._block_sizes = device, range(len(block_sizes)), block_sizes
        self._versions: npt.NDArray[np.intp] = _NO_VERSIONS
        self._version: tuple[int, int] | None = None
        self._step: torch.Tensor | None = None
        self._last, self._left = 0, 0
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
        # In no two sequences the same; and of the same rows, where nothing has changed since, not to be looked at again.
        version = batch.version if attends else None
        is_same = attends and version == self._version
        versions = (self._versions if is_same else batch.table_versions) if attends else _NO_VERSIONS
        if self._goes_on(start, stop) and (is_same or np.array_equal(versions, self._versions)):
            assert self._step is not None  # noqa: S101 - there is a step to go on from
            self._step.add_(1)
            self._left -= 1
        else:
            self._make(batch, start, stop, versions)
        self._last, self._version = stop, version
        self.start, self.stop = start, stop

    def _goes_on(self, start: int, stop: int) -> bool:
        """Return whether each row writes the place behind the one that it wrote in the last step, in the same block if it has that.

        Then all that a step sends is one more than it was, and the device can count by itself: most steps of decoding.
        """
        return self._left > 0 and start == self._last and stop == start + 1

    def _make(self, batch: SequenceBatch, start: int, stop: int, versions: npt.NDArray[np.intp]) -> None:
        rows, tokens, attends = batch.batch_size, stop - start, versions.size > 0
        parts: list[npt.NDArray[Any]] = [batch.slot_mapping(start, stop, group).ravel() for group in self._groups]
        if attends:
            parts += [stop - batch.pads, np.arange(0, (rows + 1) * tokens, tokens)][: 2 if tokens > 1 else 1]
        self._left = _left_in_block(parts[: len(self._groups)], self._block_sizes) if attends and tokens == 1 else 0
        with torch.inference_mode(mode=False):
            # One transfer for all that changes at each step.
            self._step = sent(np.concatenate(parts), self._device)
            found = torch.split(self._step, [part.size for part in parts])
            self.slots = [found[group].view(rows, tokens) for group in self._groups]
            if attends:
                self.lens, self.cu_query_lens = found[len(self._groups)], found[-1] if tokens > 1 else None
                # Block tables stay, unless they are other ones but for what was let go, which nobody reads.
                if not np.array_equal(versions, self._versions):
                    self.block_tables = [sent(batch.block_table(group), self._device) for group in self._groups]
                    self._versions = versions


def _left_in_block(slots: list[npt.NDArray[Any]], block_sizes: Sequence[int]) -> int:
    """Return how many more tokens each row can write behind its slot, of each group, without another block; 0 with padding."""
    return min(int(np.where(of < 0, 0, size - 1 - of % size).min()) for of, size in zip(slots, block_sizes, strict=True))


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
