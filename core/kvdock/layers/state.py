"""Layers that keep a state of fixed size: convolutions, linear attention, state spaces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.layers.interface import Buffer, LayerKind, Part, Split
from kvdock.layers.retention import KeepState

__all__ = ["StateLayerSpec", "to_buffers"]


def to_buffers(value: Any) -> tuple[Buffer, ...]:
    """Return buffers as a tuple, each with a name of its own, or raise."""
    found = tuple(value) if isinstance(value, Iterable) else ()
    if not found or not all(isinstance(each, Buffer) for each in found):
        raise ArgumentTypeError("StateLayerSpec: buffers", expected="at least one kvdock.layers.Buffer", got=repr(value)[:80])
    names = [each.name for each in found]
    if len(set(names)) < len(names):
        raise ArgumentValueError("StateLayerSpec: buffers", expected="a name of its own for each", got=", ".join(names))
    return found


@attrs.frozen
class StateLayerSpec(LayerKind):
    """One layer that keeps a state of each sequence, whatever its length.

    Args:
        buffers: its tensors, such as a convolution's last inputs and a recurrent state, as one rank holds them.
    """

    buffers: tuple[Buffer, ...] = attrs.field(converter=to_buffers)

    def parts(self, split: Split, dtype: torch.dtype) -> tuple[Part, ...]:
        """Return the state, as it was given."""
        return (Part(self.buffers, KeepState()),)
