"""Kernels that treat quantised pools in a way of their own."""

from __future__ import annotations

from collections.abc import Sequence

import kvdock

__all__ = ["QuantisedKernel"]


class QuantisedKernel(kvdock.Kernel):
    """A kernel that treats quantised pools in a way of its own, and all others as the backend does.

    Args:
        inner: the backend's kernel.
    """

    about = kvdock.QUANTISED_DTYPES
    """Cache dtypes that it treats so."""

    about_quantised: Sequence[str] = ()
    """What it says against quantised pools; empty to serve them."""

    descriptor: type[kvdock.Descriptor]
    """What serves them."""

    def __init__(self, inner: kvdock.Kernel) -> None:
        self._inner = inner

    def supports(self, request: kvdock.Request) -> Sequence[str]:
        """Ask the backend about other pools."""
        return self.about_quantised if _is_quantised(request) else self._inner.supports(request)

    def prepare(self, request: kvdock.Request) -> kvdock.Descriptor:
        """Return a descriptor of its own for quantised pools."""
        return self.descriptor() if _is_quantised(request) else self._inner.prepare(request)


def _is_quantised(request: kvdock.Request) -> bool:
    """Whether the key pool is quantised."""
    return request.tensor("k_cache").dtype in kvdock.QUANTISED_DTYPES
