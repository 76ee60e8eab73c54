"""The backend object: kvdock's own CUDA backend, with another kernel for one op."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence

import attrs

from kvdock.plugin import BackendError, Capabilities, Kernel, Priority, Probe, ProbeState
from kvdock_cuda.backend import CudaBackend

__all__ = ["FlashInferBackend"]

_PACKAGE = "flashinfer-python"
_FIX = f"pip install {_PACKAGE}, or take this plugin out with KVDOCK_BACKENDS_DENY=flashinfer"


class FlashInferBackend(CudaBackend):
    """Serves NVIDIA GPUs as kvdock's own backend does, and `paged_attention` by FlashInfer.

    It has the built-in kernels for all else, so that it serves that too where it is named.
    """

    name = "flashinfer"

    def probe(self) -> Probe:
        """Look for a GPU as the built-in backend does, and then for FlashInfer, without importing it."""
        found = super().probe()
        if found.state is not ProbeState.READY or importlib.util.find_spec("flashinfer") is not None:
            return found
        return Probe.unusable(f"{found.reason}, and FlashInfer is not installed. Fix: {_FIX}")

    def kernels(self) -> Mapping[str, Kernel]:
        """Return the built-in kernels, with FlashInfer's in front of that for attention.

        Raises:
            BackendError: FlashInfer cannot be imported.
        """
        try:
            import flashinfer  # noqa: F401 - imported here, so that what is wrong with it is told before the first call
        except Exception as error:
            raise BackendError(f"FlashInfer cannot be imported ({type(error).__name__}: {error})", fix=_FIX) from error
        from .paged_attention import PagedAttention

        kernels = super().kernels()
        return {**kernels, "paged_attention": PagedAttention(kernels["paged_attention"])}

    def capabilities(self) -> Capabilities:
        """Declare that it is to be preferred to the built-in backend: who installs it wants it."""
        return attrs.evolve(super().capabilities(), priority=Priority.SPECIALISED)

    def notes(self) -> Sequence[str]:
        """Say who serves what."""
        return [f"paged_attention: FlashInfer {importlib.metadata.version(_PACKAGE)}; all else: kvdock's own kernels", *super().notes()]
