"""Which masks `paged_attention` knows: padding on the left, what is ahead of a query, and what a window leaves behind.

Transformers asks for a mask by a function of four indices. Those of plain and of sliding causal attention are told by their code;
whatever else it may be is made as the model's own attention wants it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from kvdock.integrations.transformers.tables import is_accelerator, sent

__all__ = ["ODD", "Marker", "Markers", "Mask", "Pads", "asked_pads", "left_pads", "window_of"]

Pads = npt.NDArray[np.int64]
"""Tokens of padding on the left of each row, ``[rows]``."""

ODD = 0
"""A window that no mask has: that of a function which is neither causal nor a causal window."""


@attrs.define(eq=False)
class Mask:
    """A mask of one pass.

    Args:
        window: keys that a query sees at most, its own included; None for all.
        pads: tokens of padding on the left of each row, ``[rows]``.
        arguments: what Transformers asked for.
        marker: what stands for it: ``pads`` on the device.
        starts: first place of each row's blocks that is seen, on the device; None for the first of all.
        is_settled: whether ``starts`` is known, which depends on how much of the padding has blocks.
    """

    window: int | None
    pads: Pads
    arguments: dict[str, Any]
    marker: torch.Tensor
    starts: torch.Tensor | None = None
    is_settled: bool = False

    def settle(self, hidden: npt.NDArray[np.intp]) -> None:
        """Work out ``starts``, where ``hidden`` tokens of padding of each row have no blocks, ``[rows]``."""
        starts = self.pads - hidden
        if (starts < 0).any():  # places without keys are to be seen
            self.window = ODD
        elif starts.any():
            self.starts = sent(starts, self.marker.device) if hidden.any() else self.marker.view(-1)
        self.is_settled = True


@attrs.frozen(eq=False)
class Marker:
    """What stands for a mask of some padding.

    Args:
        pads: tokens of padding on the left of each row, ``[rows]``.
        tensor: the same on the device, int32 ``[rows, 1, 1, 1]``.
        hides_none: whether there is no padding.
    """

    pads: Pads
    tensor: torch.Tensor
    hides_none: bool

    def shows_all(self, mask: torch.Tensor | None, rows: int, length: int) -> bool:
        """Return whether a mask has no padding as this has none: asked in one operation, where `left_pads` takes six."""
        if not self.hides_none or rows != self.pads.size:
            return False
        return mask is None or (mask.shape == (rows, length) and bool(mask.all()))


class Markers:
    """The last marker of each window, kept from step to step: decoding sends none.

    Args:
        device: where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: dict[int | None, Marker] = {}

    def for_mask(self, window: int | None, mask: torch.Tensor | None, rows: int, length: int) -> Marker | None:
        """Return what stands for a mask, of its own memory for each window; None if `left_pads` knows none."""
        last = self._last.get(window)
        if last is not None and last.shows_all(mask, rows, length):
            return last
        pads = left_pads(mask, rows, length)
        return None if pads is None else self._marker(window, pads)

    def _marker(self, window: int | None, pads: Pads) -> Marker:
        last = self._last.get(window)
        if last is None or not np.array_equal(last.pads, pads):
            with torch.inference_mode(mode=False):
                tensor = sent(pads.astype(np.int32).reshape(-1, 1, 1, 1), self._device)
            self._last[window] = last = Marker(pads, tensor, not pads.any())
        return last


def _code_of(function: Callable[..., Any]) -> Any:
    return getattr(function, "__code__", None)


def _parts(function: Callable[..., Any]) -> list[Any]:
    """Return what a function made by another has from it."""
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


_SLIDING = sliding_window_causal_mask_function(1)
_OVERLAY = next((part for parts in _parts(_SLIDING) if isinstance(parts, tuple) for part in parts if _parts(part) == [1]), None)


def window_of(function: Callable[..., Any]) -> int | None:
    """Return the window of a mask function: None for plain causal attention, `ODD` for what is neither."""
    if function is causal_mask_function:
        return None
    if _OVERLAY is None or _code_of(function) is not _code_of(_SLIDING):
        return ODD
    both = _parts(function)[0]
    if len(both) != 2 or _code_of(both[0]) is not _code_of(_OVERLAY) or both[1] is not causal_mask_function:
        return ODD
    window = _parts(both[0])[0]
    return window if isinstance(window, int) and window > 0 else ODD


def left_pads(mask: torch.Tensor | None, rows: int, length: int) -> Pads | None:
    """Return how many tokens each row of a mask hides on the left; None if it is not 0s on the left and 1s behind them.

    It waits for the device, as Transformers' own masks for sdpa do.

    Args:
        mask: booleans ``[rows, length]``, or None for no padding.
        rows: of the batch.
        length: tokens of each row, the new ones included.
    """
    return asked_pads(mask, rows, length)()


def asked_pads(mask: torch.Tensor | None, rows: int, length: int) -> Callable[[], Pads | None]:
    """Ask the device for `left_pads`; what is returned waits for them, but for nothing that is launched in between."""
    if mask is None:
        return lambda: np.zeros(rows, dtype=np.int64)
    if mask.shape != (rows, length):
        return lambda: None
    can_wait = is_accelerator(mask.device)
    found = torch.stack((length - mask.sum(-1), mask.to(torch.uint8).argmax(-1))).to("cpu", non_blocking=can_wait)
    copied = torch.Event(mask.device.type) if can_wait else None
    if copied is not None:
        copied.record()

    def answer() -> Pads | None:
        if copied is not None:
            copied.synchronize()
        pads, firsts = found.numpy()
        return None if (firsts != pads).any() else pads

    return answer
