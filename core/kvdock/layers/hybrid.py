"""Layers that keep several things, such as keys and values beside a state: Falcon-H1, Zamba 2."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.layers.interface import LayerKind, Part, Split
from kvdock.layers.shared import SharedLayerSpec

__all__ = ["HybridLayerSpec"]


def _to_kinds(value: Any) -> tuple[LayerKind, ...]:
    found = tuple(value) if isinstance(value, Iterable) else ()
    if not all(isinstance(each, LayerKind) for each in found) or any(isinstance(each, HybridLayerSpec | SharedLayerSpec) for each in found):
        expected = "kinds that keep something each, such as a LayerSpec and a StateLayerSpec"
        raise ArgumentTypeError("HybridLayerSpec: of", expected=expected, got=repr(value)[:120])
    if len(found) < 2:
        raise ArgumentValueError("HybridLayerSpec: of", expected="at least two kinds", got=len(found), fix="write the one kind itself")
    return found


@attrs.frozen
class HybridLayerSpec(LayerKind):
    """One layer that is of several kinds at once, and keeps what each of them does.

    Args:
        of: the kinds, at least two.
    """

    of: tuple[LayerKind, ...] = attrs.field(converter=_to_kinds)

    def parts(self, split: Split, dtype: torch.dtype) -> tuple[Part, ...]:
        """Return the parts of all."""
        return tuple(part for kind in self.of for part in kind.parts(split, dtype))
