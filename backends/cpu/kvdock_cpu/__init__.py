"""kvdock's CPU backend: vectorised torch. The shortest complete backend, and the one to copy.

This is the module that the entry point names: it is light, and imports the kernels only when it is asked for them.
"""

from __future__ import annotations

from kvdock.plugin import Backend, hookimpl

__all__ = ["KVDOCK_API", "kvdock_backends"]

KVDOCK_API = (1, 0)


@hookimpl
def kvdock_backends() -> list[Backend]:
    """Return the backend."""
    from kvdock_cpu.backend import CpuBackend

    return [CpuBackend()]
