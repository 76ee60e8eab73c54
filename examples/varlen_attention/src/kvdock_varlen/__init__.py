"""torch's `varlen_attn` for kvdock's `paged_attention`. The entry point names this module: it is light, and imports kernels when asked."""

from __future__ import annotations

from kvdock.plugin import Backend, hookimpl

__all__ = ["KVDOCK_API", "kvdock_backends"]

KVDOCK_API = (1, 0)


@hookimpl
def kvdock_backends() -> list[Backend]:
    """Return the backend."""
    from .backend import VarlenBackend

    return [VarlenBackend()]
