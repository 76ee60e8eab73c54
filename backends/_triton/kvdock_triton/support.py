"""The base of the kernels, and what they need of whom they belong to."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from kvdock.plugin import BackendError, Kernel, Request
from kvdock_triton.launch import KernelSpec, launcher_for
from kvdock_triton.tuning import Tuning
from kvdock_triton.written import Launch

__all__ = ["KernelOwner", "TritonKernel", "ceil_div", "ceil_div_source", "row_bytes"]


_INSTEAD = "kvdock.use_backend('portable') serves the same ops without Triton"


class KernelOwner(Protocol):
    """Whose devices kernels run on, as far as they need to know. `kvdock_triton.TritonBackend`, which sits above, is one."""

    def tuning(self, device: torch.device) -> Tuning:
        """Return the tiles for a device."""
        ...

    def skip_counter(self, device: torch.device) -> torch.Tensor:
        """Return a device's count of skipped writes, int64 ``[]`` in its memory, always the same tensor."""
        ...

    def device_guard(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context in which a device is the current one."""
        ...

    def processors(self, device: torch.device) -> int:
        """Return how many processors a device has, each of which runs programs of its own."""
        ...


class TritonKernel(Kernel):
    """Base of the kernels.

    Args:
        owner: whose devices it runs on.
    """

    def __init__(self, owner: KernelOwner) -> None:
        self._owner = owner

    def tuning(self, device: torch.device) -> Tuning:
        """Return the tiles for a device."""
        return self._owner.tuning(device)

    def processors(self, device: torch.device) -> int:
        """Return how many processors a device has."""
        return self._owner.processors(device)

    def skipped(self, device: torch.device) -> int:
        """Return the address of a device's count of skipped writes."""
        return self._owner.skip_counter(device).data_ptr()

    def skip_counter(self, device: torch.device) -> torch.Tensor:
        """Return a device's count of skipped writes."""
        return self._owner.skip_counter(device)

    def launch(self, spec: KernelSpec, request: Request) -> Launch:
        """Return the launch of a kernel, compiled now.

        Raises:
            BackendError: Triton could not compile it; nothing was kept.
        """
        try:
            return launcher_for(spec, request.device, self._owner.device_guard)
        except Exception as error:
            text = f"{request.op}: Triton could not compile {spec.kernel.__name__} for {request.device}: {_said(error)}"
            raise BackendError(text, fix=_INSTEAD) from error


def _said(error: BaseException | None) -> str:
    """Return what was raised, and from what: Triton's own errors point at a line, and what they came from says why."""
    parts = []
    while error is not None:
        parts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__
    return ", from ".join(parts)


def ceil_div(number: int, by: int) -> int:
    """Divide, rounding up."""
    return -(-number // by)


def ceil_div_source(number: str, by: int) -> str:
    """Write the same for an expression."""
    return number if by == 1 else f"({number} + {by - 1}) // {by}"


_UNLIKE = 8
"""By how much the rows of keys and of values may differ before the longer ones decide: those of a latent and its RoPE part do."""


def row_bytes(request: Request, heads_at: int = 2) -> int:
    """Return the bytes of a row by which tiles are chosen: what one token takes in one cache, of keys or of values.

    It is the shorter row, so that its accesses stay wide, but at least an eighth of the longer: as many tokens of rows that are
    thousands of times as long would be so much for a program that Triton compiles it for minutes.

    Args:
        request: what is prepared.
        heads_at: which dimension of a cache counts its heads; its last is their length.
    """
    pools = [request.tensor(name) for name in ("k_cache", "v_cache")]
    shorter, longer = sorted(int(pool.shape[heads_at] or 1) * int(pool.shape[-1] or 1) * pool.dtype.itemsize for pool in pools)
    return max(shorter, longer // _UNLIKE)
