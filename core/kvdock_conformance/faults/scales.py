"""Faults of kernels that serve quantised pools: in what they divide by, how they round, and where they clamp."""

from __future__ import annotations

import torch

from kvdock.ops.catalog import CATALOG
from kvdock_conformance.faults.fault import Faults
from kvdock_conformance.faults.quantised import QuantisedKernel, Quantises, Reads

__all__ = ["FAULTS"]

FAULTS = Faults()
_WRITE, _, _GATHER, _ = CATALOG
Scales = tuple[torch.Tensor, torch.Tensor]


class _KeysForValues(Quantises):
    """Divides values by the scale of keys."""

    def scales(self, k_scale: torch.Tensor, v_scale: torch.Tensor) -> Scales:
        return k_scale, k_scale


class _FirstScale(Quantises):
    """Divides by the first of all scales."""

    def scales(self, k_scale: torch.Tensor, v_scale: torch.Tensor) -> Scales:
        return k_scale.reshape(-1)[0], v_scale.reshape(-1)[0]


class _Truncates(Quantises):
    """Cuts integers."""

    def stored(self, quotient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return super().stored(quotient.trunc() if dtype == torch.int8 else quotient, dtype)


class _RoundsHalvesUp(Quantises):
    """Rounds halves away from zero."""

    def stored(self, quotient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        up = (quotient.abs() + 0.5).floor() * quotient.sign()
        return super().stored(up if dtype == torch.int8 else quotient, dtype)


class _InfinityIsNaN(Quantises):
    """Clamps finite numbers only."""

    def stored(self, quotient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        stored = super().stored(quotient, dtype)
        return stored if dtype == torch.int8 else torch.where(quotient.isinf(), torch.nan, stored.float()).to(dtype)


class _LimitOfAnother(Quantises):
    """Clamps to the range of e4m3fn, whatever the format."""

    def stored(self, quotient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return super().stored(quotient if dtype == torch.int8 else quotient.clamp(-448, 448), dtype)


for _name, _sentence, _kind in (
    ("write-key-scale-for-values", "Values are divided by the scale of keys.", _KeysForValues),
    ("write-first-scale-for-all", "Everything is divided by the first of all scales.", _FirstScale),
    ("write-quotients-cut", "Quotients are cut to integers instead of rounded.", _Truncates),
    ("write-halves-rounded-up", "Halves are rounded away from zero instead of to even.", _RoundsHalvesUp),
    ("write-infinity-is-nan", "An infinite quotient is stored as NaN.", _InfinityIsNaN),
    ("write-limit-of-another-format", "Every format of 8 bits is clamped to the range of one.", _LimitOfAnother),
):
    FAULTS.kernel(_WRITE, _name, _sentence, "KVD-WRITE-022")(type(_name, (QuantisedKernel,), {"descriptor": _kind}))


class _KeyScaleRead(Reads):
    """Multiplies values by the scale of keys."""

    def scales(self, k_scale: torch.Tensor, v_scale: torch.Tensor) -> Scales:
        return k_scale, k_scale


class _FirstScaleRead(Reads):
    """Multiplies by the first of all scales."""

    def scales(self, k_scale: torch.Tensor, v_scale: torch.Tensor) -> Scales:
        return k_scale.reshape(-1)[0], v_scale.reshape(-1)[0]


for _name, _sentence, _read in (
    ("gather-key-scale-for-values", "Values are multiplied by the scale of keys.", _KeyScaleRead),
    ("gather-first-scale-for-all", "Everything is multiplied by the first of all scales.", _FirstScaleRead),
):
    FAULTS.kernel(_GATHER, _name, _sentence, "KVD-GATHER-028")(type(_name, (QuantisedKernel,), {"descriptor": _read}))
