"""What every kind of layer promises."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import attrs
import torch

from kvdock.checks import check_cache_dtype, check_int, check_size
from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.layers.retention import Retention

__all__ = ["Buffer", "LayerKind", "Part", "Split"]

Split = Callable[[int, str], range]
"""``split(heads, name)``: which of a model's heads a rank holds; `kvdock.RankInfo.head_range` is one."""


def _to_shape(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@attrs.frozen
class Buffer:
    """One tensor that a layer keeps: of each token, or as a state.

    Args:
        name: what it is called, such as ``"k"`` or ``"conv"``.
        shape: of one token's part, or of the whole state; at least one dimension, none of them 0.
        dtype: of its elements.
        values: where attention reads each row as the key of one head, and its first elements as the value too: how many these are.
            Latents are so; 0 means that they are not.

    Raises:
        ArgumentTypeError, ArgumentValueError: no name, no shape, a dtype that no cache stores, or more values than a row has.
    """

    name: str
    shape: tuple[int, ...] = attrs.field(converter=_to_shape)
    dtype: torch.dtype
    values: int = 0

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ArgumentTypeError("Buffer: name", expected='a string, such as "conv"', got=repr(self.name))
        if not isinstance(self.shape, tuple) or not self.shape:
            expected, fix = "a tuple of at least one int", "give the shape of one token's part, or of the whole state, without a batch"
            raise ArgumentValueError(f"Buffer {self.name!r}: shape", expected=expected, got=repr(self.shape), fix=fix)
        for place, size in enumerate(self.shape):
            check_size(f"Buffer {self.name!r}: shape[{place}]", size)
        check_cache_dtype(f"Buffer {self.name!r}: dtype", self.dtype)
        if check_int(f"Buffer {self.name!r}: values", self.values, 0) and (len(self.shape) > 1 or self.values > self.shape[0]):
            expected, fix = "0, or at most the elements of a row of one dimension", "count the elements that are values: they come first"
            raise ArgumentValueError(f"Buffer {self.name!r}: values", expected=expected, got=f"{self.values} of {self.shape}", fix=fix)

    @property
    def nbytes(self) -> int:
        """Bytes of one token's part, or of the whole state."""
        return math.prod(self.shape) * self.dtype.itemsize


@attrs.frozen
class Part:
    """What a layer keeps under one rule of retention.

    Args:
        buffers: its tensors.
        retention: the rule. Where that ``is_state``, each buffer is one state; otherwise each has a row for every token.
    """

    buffers: tuple[Buffer, ...]
    retention: Retention

    @property
    def nbytes(self) -> int:
        """Bytes of one token, or of one state."""
        return sum(buffer.nbytes for buffer in self.buffers)


class LayerKind(ABC):
    """A kind of layer: a frozen value of the numbers that say what it keeps. A new kind is a subclass in a file of its own."""

    @abstractmethod
    def parts(self, split: Split, dtype: torch.dtype) -> tuple[Part, ...]:
        """Return what the layer keeps on one rank; nothing for one that keeps nothing of its own.

        Args:
            split: which heads the rank holds.
            dtype: of the keys and values that the model makes.

        Raises:
            ArgumentValueError: heads and ranks do not divide.
        """
