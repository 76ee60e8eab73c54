"""Blocks that move between pools of different processes: what both sides agree on, and who carries the bytes.

`PoolLayout` says where a pool's blocks lie, and `spans` which bytes go where. A `Transport` carries them; plugins bring theirs by the
hook ``kvdock_transports``, over an engine of one-sided writes as a `Writer` for `OneSided`. An `Exchange` keeps blocks while they are on
their way, and gives them back when they are not.
"""

from kvdock.transfer.compatibility import check_compatible
from kvdock.transfer.exchange import Exchange
from kvdock.transfer.factory import create_transport
from kvdock.transfer.interface import Ticket, TicketState, Transport
from kvdock.transfer.layout import GroupLayout, PlaceLayout, PoolLayout
from kvdock.transfer.leases import Inbound, Limits, Outbound, Transfer
from kvdock.transfer.one_sided import OneSided
from kvdock.transfer.packing import Runs, gather, scatter
from kvdock.transfer.spans import Spans, Table, Wanted, spans
from kvdock.transfer.writer import Writer

__all__ = [
    "Exchange",
    "GroupLayout",
    "Inbound",
    "Limits",
    "OneSided",
    "Outbound",
    "PlaceLayout",
    "PoolLayout",
    "Runs",
    "Spans",
    "Table",
    "Ticket",
    "TicketState",
    "Transfer",
    "Transport",
    "Wanted",
    "Writer",
    "check_compatible",
    "create_transport",
    "gather",
    "scatter",
    "spans",
]
