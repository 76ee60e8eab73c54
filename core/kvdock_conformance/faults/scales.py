"""Faults of kernels that serve quantised pools: in what they divide or multiply by, how they round, and where they clamp."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from kvdock_conformance.faults.fault import Faults
from kvdock_conformance.faults.moves import GATHER, WRITE
from kvdock_conformance.faults.quantised import QuantisedKernel, Quantises, Reads
from kvdock_conformance.faults.tensors import at_or_before, dense, restrided

__all__ = ["FAULTS"]

FAULTS = Faults()
Scales = tuple[torch.Tensor, torch.Tensor]

_SCALES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], Scales]] = {
    "key-scale-for-values": lambda k_scale, v_scale: (k_scale, k_scale),
    "first-scale-for-all": lambda k_scale, v_scale: (k_scale.reshape(-1)[0], v_scale.reshape(-1)[0]),
    "scale-ignored": lambda k_scale, v_scale: (torch.ones_like(k_scale), torch.ones_like(v_scale)),
    "scales-as-if-packed": lambda *both: tuple(restrided(scale, dense(scale.shape)) for scale in both),
    "scale-address-rounded-to-16": lambda k_scale, v_scale: (at_or_before(k_scale), at_or_before(v_scale)),
}
"""Scales that are used in place of those that came."""

_STORED: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "quotients-cut": torch.trunc,
    "halves-rounded-up": lambda quotient: (quotient.abs() + 0.5).floor() * quotient.sign(),
}
"""Quotients that are stored as int8 in place of what came out."""


def _stored(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Quantises, torch.Tensor, torch.dtype], torch.Tensor]:
    def stored(self: Quantises, quotient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return Quantises.stored(self, change(quotient) if dtype == torch.int8 else quotient, dtype)

    return stored


def _infinity_is_nan(self: Quantises, quotient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    stored = Quantises.stored(self, quotient, dtype)
    return stored if dtype == torch.int8 else torch.where(quotient.isinf(), torch.nan, stored.float()).to(dtype)


def _limit_of_another(self: Quantises, quotient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return Quantises.stored(self, quotient if dtype == torch.int8 else quotient.clamp(-448, 448), dtype)


_SENTENCES = {
    "key-scale-for-values": "Values go by the scale of keys.",
    "first-scale-for-all": "Everything goes by the first of all scales.",
    "first-scales-kept": "A plan goes by the scales of its first call for ever.",
    "scale-ignored": "A quantised pool is served, and its scale ignored.",
    "scale-address-rounded-to-16": "Scales begin at the multiple of 16 bytes at or before them.",
    "scales-as-if-packed": "Scales are read as if they were dense.",
    "reciprocal-of-the-scale": "What is stored is multiplied by 1 / scale.",
    "quotients-cut": "Quotients are cut to integers instead of rounded.",
    "halves-rounded-up": "Halves are rounded away from zero instead of to even.",
    "infinity-is-nan": "An infinite quotient is stored as NaN.",
    "limit-of-another-format": "Every format of 8 bits is clamped to the range of one.",
}


def _add(op: str, name: str, killer: str, kind: type[Quantises | Reads], **methods: Callable[..., object]) -> None:
    """Add a fault: a kind of descriptor with other methods."""
    descriptor = type(name, (kind,), methods)
    kernel = type(name, (QuantisedKernel,), {"descriptor": descriptor})
    FAULTS.kernel(op, name, _SENTENCES[name.partition("-")[2]], killer)(kernel)


for _name, _scales in _SCALES.items():
    _method = lambda self, k_scale, v_scale, scales=_scales: scales(k_scale, v_scale)  # noqa: E731 - a method
    _add(WRITE.op, f"write-{_name}", "KVD-WRITE-022", Quantises, scales=_method)
    _add(GATHER.op, f"gather-{_name}", "KVD-GATHER-028", Reads, scales=_method)
for _op, _prefix, _killer, _kind in ((WRITE.op, "write", "KVD-WRITE-022", Quantises), (GATHER.op, "gather", "KVD-GATHER-028", Reads)):
    _add(_op, f"{_prefix}-first-scales-kept", _killer, _kind, scales=lambda self, *scales: vars(self).setdefault("kept", scales))
for _name, _change in _STORED.items():
    _add(WRITE.op, f"write-{_name}", "KVD-WRITE-022", Quantises, stored=_stored(_change))
_add(WRITE.op, "write-infinity-is-nan", "KVD-WRITE-022", Quantises, stored=_infinity_is_nan)
_add(WRITE.op, "write-limit-of-another-format", "KVD-WRITE-022", Quantises, stored=_limit_of_another)
_add(WRITE.op, "write-reciprocal-of-the-scale", "KVD-WRITE-022", Quantises, divided=lambda self, rows, scale: rows * (1 / scale))
