"""Tensors as bits: what kernels share that move elements without computing with them.

Bits arrive as they came, NaN payloads and -0 included, since no element passes through a float register.
"""

from __future__ import annotations

import torch

from kvdock.interface import Request, TensorMeta
from kvdock.spec import QUANTISED_DTYPES

__all__ = ["SkipCounter", "as_bits", "bits_dtype", "common_alignment", "quantised_reasons"]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def bits_dtype(size: int) -> torch.dtype:
    """Return the dtype to move elements of ``size`` bytes in: an integer; for 16 bytes, of which torch has none, complex128.

    Raises:
        KeyError: ``size`` is none of 1, 2, 4, 8 and 16.
    """
    return _BITS[size]


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View elements as integers of their size, in the same memory with the same strides."""
    return tensor.view(_BITS[tensor.element_size()])


def common_alignment(pool: TensorMeta, *others: TensorMeta) -> int:
    """Return the widest access that reaches all of a pool and of what moves to or from it: 1, 2, 4, 8 or 16 bytes.

    It divides the address, the rows and every step of each, and so is the size of the widest element to move them in.

    Args:
        pool: a pool: shape and strides known.
        others: tensors whose rows move; their alignment covers their rows and steps.
    """
    size = pool.dtype.itemsize
    bits = pool.alignment | int(pool.shape[-1] or 1) * size
    for stride in (pool.strides or ())[:-1]:
        bits |= stride * size
    for other in others:
        bits |= other.alignment
    return min(bits & -bits, 16)


def quantised_reasons(request: Request) -> list[str]:
    """Return the reasons against a request with quantised tensors, for `Kernel.supports` of a kernel that moves bits as they are.

    Such a cache stores ``x / scale``; kernels that copy would store ``x``.
    """
    dtypes = dict.fromkeys(meta.dtype for meta in request.args.values() if isinstance(meta, TensorMeta))
    return [f"quantised caches ({dtype}) are not there yet" for dtype in dtypes if dtype in QUANTISED_DTYPES]


class SkipCounter:
    """Counts skipped writes per device, on the device: adding never synchronises, reading does. Threads may share it.

    A kernel adds to what `prepare` returned; `Backend.skipped_writes` returns `read`.
    """

    def __init__(self) -> None:
        self._counts: dict[torch.device, torch.Tensor] = {}

    def prepare(self, device: torch.device) -> torch.Tensor:
        """Return the count of a device, an int64 tensor ``[]`` made on first use: call it in `Kernel.prepare`, never in a capture."""
        if device not in self._counts:
            with torch.inference_mode(False):  # it outlives the caller's mode
                made = torch.zeros((), dtype=torch.int64, device=device)
            _wait_for(device)  # another thread's kernels may run on another stream than these zeros
            self._counts.setdefault(device, made)  # the first thread's, without a lock that a fork could leave held
        return self._counts[device]

    def read(self, device: torch.device) -> int:
        """Return how many writes were skipped on a device, on any of its streams. Synchronises."""
        count = self._counts.get(device)
        if count is None:
            return 0
        _wait_for(device)
        return int(count)


def _wait_for(device: torch.device) -> None:
    """Wait for all streams of a device, where torch knows how for its type."""
    synchronize = getattr(getattr(torch, device.type, None), "synchronize", None)
    if synchronize is not None:
        synchronize(device)
