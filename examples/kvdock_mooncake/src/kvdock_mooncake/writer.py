"""The transfer engine: one for each transport, with the memory that the transport registers."""

from __future__ import annotations

import json
import threading
from queue import SimpleQueue
from typing import Any

import torch

from kvdock.plugin import TransferError
from kvdock.transfer import TicketState, Writer

__all__ = ["MooncakeWriter"]

_NONE = (0, -1, (1 << 64) - 1)
"""What stands for a write that was not begun. Mooncake crashes if it is asked how far that is."""

_COMPLETED, _FAILED = 1, -1

_kept: list[MooncakeWriter] = []
"""Those that were closed while writes went on: their engines still read the memory."""


class MooncakeWriter(Writer):
    """Writes of a Mooncake transfer engine.

    A thread begins the writes, in their order: the first one to a peer shakes hands with it, and waits for a minute where the peer hangs.

    Args:
        host: how peers reach this machine.
        protocol: ``"tcp"``, ``"rdma"`` or another of Mooncake's.
        device: names of network devices.

    Raises:
        TransferError: Mooncake is not installed, or does not start.
    """

    def __init__(self, host: str = "127.0.0.1", protocol: str = "tcp", device: str = "") -> None:
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            fix = "pip install mooncake-transfer-engine-non-cuda, or another of Mooncake's for this machine, and libibverbs"
            raise TransferError("transport 'mooncake'", expected="the module mooncake.engine", got=str(error), fix=fix) from error
        self._engine: Any = TransferEngine()
        if code := self._engine.initialize(host, "P2PHANDSHAKE", protocol, device):
            raise TransferError("transport 'mooncake'", expected=f"an engine with {protocol!r} on {host!r}", got=f"its error {code}")
        self._name = f"{host}:{self._engine.get_rpc_port()}"
        self._peers: dict[str, tuple[str, int]] = {}
        self._active: set[_Write] = set()
        self._queue: SimpleQueue[_Write | None] = SimpleQueue()
        threading.Thread(target=self._begin, name="kvdock mooncake", daemon=True).start()

    def register(self, memory: torch.Tensor) -> bytes:
        """Register memory with the engine; what peers need is its address and the engine's name."""
        self._memory = memory
        if code := self._engine.register_memory(memory.data_ptr(), memory.numel()):
            raise TransferError("transport 'mooncake'", expected=f"{memory.numel()} bytes to be registered", got=f"its error {code}")
        return json.dumps({"name": self._name, "address": memory.data_ptr()}).encode()

    def connect(self, peer: str, described: bytes) -> None:
        """Note where a peer is."""
        found = json.loads(described)
        name, address = found["name"], found["address"]
        if not isinstance(name, str) or type(address) is not int or not 0 <= address < 1 << 63:
            raise ValueError(f"no name of an engine and address: {name!r}, {address!r}"[:200])
        self._peers[peer] = name, address

    def write(self, peer: str, begin: int, at: int, nbytes: int) -> object:
        """Queue a write for the thread."""
        name, address = self._peers[peer]
        made = _Write((name, self._memory.data_ptr() + begin, address + at, nbytes))
        self._active.add(made)
        self._queue.put(made)
        return made

    def state(self, write: object) -> TicketState:
        """Ask the engine, once it knows of the write."""
        assert isinstance(write, _Write)
        if write.handle is None:
            return TicketState.PENDING
        said = _FAILED if write.handle in _NONE else self._engine.transfer_check_status(write.handle)
        if said not in (_COMPLETED, _FAILED):
            return TicketState.PENDING
        self._active.discard(write)
        return TicketState.DONE if said == _COMPLETED else TicketState.FAILED

    def disconnect(self, peer: str) -> None:
        """Forget a peer. Mooncake ends its writes when the connection does."""
        del self._peers[peer]

    def close(self) -> None:
        """Let go of the memory, if no write reads it, and end the thread."""
        self._queue.put(None)
        if self._active:
            _kept.append(self)
        elif hasattr(self, "_memory"):
            self._engine.unregister_memory(self._memory.data_ptr())
            del self._memory

    def _begin(self) -> None:
        while (write := self._queue.get()) is not None:
            try:
                write.handle = self._engine.transfer_submit_write(*write.what)
            except Exception:  # noqa: BLE001 - whatever it is, the write was not begun, and others are
                write.handle = _NONE[0]


class _Write:
    """A write, and what Mooncake calls it, once it was begun."""

    def __init__(self, what: tuple[str, int, int, int]) -> None:
        self.what = what
        self.handle: int | None = None
