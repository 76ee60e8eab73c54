"""The backend object: kvdock's own CUDA backend, with another kernel for one op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
from torch.nn import attention

from kvdock.plugin import Capabilities, Kernel, Priority, Probe, ProbeState
from kvdock_cuda.backend import CudaBackend

from .implementation import lacking

__all__ = ["VarlenBackend"]


class VarlenBackend(CudaBackend):
    """Serves NVIDIA GPUs as kvdock's own backend does, and `paged_attention` by torch's `varlen_attn`."""

    name = "varlen"

    def probe(self) -> Probe:
        """Look for a GPU as the built-in backend does, and then for a flash attention that reads blocks."""
        found = super().probe()
        reason = lacking() if found.state is ProbeState.READY else ""
        return Probe.unusable(f"{found.reason}, but {reason}") if reason else found

    def kernels(self) -> Mapping[str, Kernel]:
        """Return the built-in kernels, with torch's in front of that for attention."""
        from .paged_attention import PagedAttention

        return {**super().kernels(), "paged_attention": PagedAttention(self.skip_counter)}

    def capabilities(self) -> Capabilities:
        """Declare that it is to be preferred to the built-in backend: who installs it wants it."""
        return attrs.evolve(super().capabilities(), priority=Priority.SPECIALISED)

    def notes(self) -> Sequence[str]:
        """Say who serves what."""
        active = attention.current_flash_attention_impl()
        return [f"paged_attention: torch's varlen_attn, by {active}; all else: kvdock's own kernels", *super().notes()]
