"""NIXL's one-sided writes for kvdock's transfers. The entry point names this module: it is light, and NIXL is imported when asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.plugin import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdock.transfer import OneSided, Transport

__all__ = ["KVDOCK_API", "kvdock_transports", "nixl"]

KVDOCK_API = (1, 0)


@hookimpl
def kvdock_transports() -> dict[str, Callable[..., Transport]]:
    """Return the transport by its name."""
    return {"nixl": nixl}


def nixl(*, backend: str = "UCX", part_bytes: int = 4 << 20, parts: int = 4, lanes: int = 8) -> OneSided:
    """Make a transport over an agent of NIXL.

    Args:
        backend: NIXL's plugin that carries the bytes, the same on both sides.
        part_bytes, parts, lanes: see `kvdock.transfer.OneSided`.

    Raises:
        TransferError: NIXL is not installed, or does not have the plugin.
        KVDockError: as `kvdock.transfer.OneSided`.
    """
    from kvdock.transfer import OneSided

    from .writer import NixlWriter

    return OneSided("nixl", NixlWriter(backend), part_bytes=part_bytes, parts=parts, lanes=lanes)
