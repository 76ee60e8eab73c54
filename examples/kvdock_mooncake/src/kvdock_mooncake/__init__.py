"""Mooncake's one-sided writes for kvdock's transfers. The entry point names this module: it is light, and imports the engine when asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.plugin import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdock.transfer import OneSided, Transport

__all__ = ["KVDOCK_API", "kvdock_transports", "mooncake"]

KVDOCK_API = (1, 0)


@hookimpl
def kvdock_transports() -> dict[str, Callable[..., Transport]]:
    """Return the transport by its name."""
    return {"mooncake": mooncake}


def mooncake(
    *,
    host: str = "127.0.0.1",
    protocol: str = "tcp",
    device: str = "",
    part_bytes: int = 4 << 20,
    parts: int = 4,
    lanes: int = 8,
) -> OneSided:
    """Make a transport over a transfer engine of Mooncake, which peers find without a metadata server.

    Args:
        host: a name or an address of this machine, by which peers reach it.
        protocol: Mooncake's, the same on both sides.
        device: Mooncake's names of network devices, with commas between; empty for those that it finds.
        part_bytes, parts, lanes: see `kvdock.transfer.OneSided`.

    Raises:
        TransferError: Mooncake is not installed, or does not start.
        KVDockError: as `kvdock.transfer.OneSided`.
    """
    from kvdock.transfer import OneSided

    from .writer import MooncakeWriter

    return OneSided("mooncake", MooncakeWriter(host, protocol, device), part_bytes=part_bytes, parts=parts, lanes=lanes)
