"""kvdock's ROCM backend: the module that the entry point names. Light: nothing here touches a device."""

from __future__ import annotations

from kvdock.plugin import Backend, hookimpl

__all__ = ["KVDOCK_API", "kvdock_backends"]

KVDOCK_API = (1, 0)


@hookimpl
def kvdock_backends() -> list[Backend]:
    """Return the backend."""
    from kvdock_rocm.backend import RocmBackend

    return [RocmBackend()]
