"""The agent: one for each transport, with the memory that the transport registers."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

import torch

from kvdock.plugin import TransferError
from kvdock.transfer import TicketState, Writer

__all__ = ["NixlWriter"]

_STATES = {"DONE": TicketState.DONE, "PROC": TicketState.PENDING}
_ADDRESS = 8

_kept: list[NixlWriter] = []
"""Those that were closed while writes went on: an agent that is freed under its writes takes the process with it."""


class NixlWriter(Writer):
    """Writes of a NIXL agent.

    It has no progress thread: NIXL's spins, and takes a core. So `progress` lets the agent work, and a peer's writes come through by it.
    NIXL's notifications are not used. They come to the agent, whichever peer or push they are of, and say nothing about a write that is
    late; the labels of kvdock's lanes do.

    Args:
        backend: NIXL's plugin.

    Raises:
        TransferError: NIXL is not installed, or does not have the plugin.
    """

    def __init__(self, backend: str = "UCX") -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise TransferError("transport 'nixl'", expected="the package nixl", got=str(error), fix="pip install nixl") from error
        config = nixl_agent_config(enable_prog_thread=False, backends=[backend])
        self._agent: Any = nixl_agent(f"kvdock-{secrets.token_hex(8)}", config)
        if backend not in self._agent.backends:
            known = ", ".join(self._agent.get_plugin_list())
            raise TransferError("transport 'nixl': backend", expected=f"one of {known}", got=repr(backend))
        self._peers: dict[str, tuple[str, int]] = {}
        self._active: set[_Write] = set()

    def register(self, memory: torch.Tensor) -> bytes:
        """Register memory with the agent; what peers need is its address and the agent's metadata."""
        self._memory = memory
        self._registered = self._agent.register_memory(memory)
        metadata: bytes = self._agent.get_agent_metadata()
        return memory.data_ptr().to_bytes(_ADDRESS, "little") + metadata

    def connect(self, peer: str, described: bytes) -> None:
        """Load a peer's metadata. NIXL reads it, and raises what it does not like."""
        if len(described) <= _ADDRESS:
            raise ValueError(f"an address and an agent's metadata are more than {len(described)} bytes")
        name = self._agent.add_remote_agent(described[_ADDRESS:])
        self._peers[peer] = name.decode(), int.from_bytes(described[:_ADDRESS], "little")

    def write(self, peer: str, begin: int, at: int, nbytes: int) -> object:
        """Post a write."""
        agent, base = self._peers[peer]
        both = [self._agent.get_xfer_descs([(address, nbytes, 0)], "DRAM") for address in (self._memory.data_ptr() + begin, base + at)]
        handle = self._agent.initialize_xfer("WRITE", *both, agent)
        made = _Write(handle, self._agent.transfer(handle))
        self._active.add(made)
        return made

    def state(self, write: object) -> TicketState:
        """Ask the agent. A peer that is gone, or was removed, is an error of NIXL's: the write has ended."""
        assert isinstance(write, _Write)
        try:
            if write.said == "PROC":
                write.said = self._agent.check_xfer_state(write.handle)
        except Exception:  # noqa: BLE001 - NIXL has a class for each kind of end
            write.said = "ERR"
        found = _STATES.get(write.said, TicketState.FAILED)
        if found is not TicketState.PENDING:
            self._active.discard(write)
            with contextlib.suppress(Exception):  # it is over, whatever NIXL thinks of its handle
                self._agent.release_xfer_handle(write.handle)
        return found

    def progress(self) -> None:
        """Let the agent work. What it has in its inbox is nothing that kvdock's peers send."""
        self._agent.get_new_notifs()

    def disconnect(self, peer: str) -> None:
        """Forget a peer."""
        agent, _ = self._peers.pop(peer)
        with contextlib.suppress(Exception):  # a peer that is gone has been removed by NIXL itself
            self._agent.remove_remote_agent(agent)

    def close(self) -> None:
        """Let go of the memory, if no write reads it."""
        if self._active:
            _kept.append(self)
        elif hasattr(self, "_registered"):
            self._agent.deregister_memory(self._registered)
            del self._registered


class _Write:
    """A write, and what NIXL said of it last."""

    def __init__(self, handle: Any, said: str) -> None:
        self.handle, self.said = handle, said
