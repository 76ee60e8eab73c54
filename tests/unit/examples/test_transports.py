"""The writers of `examples/kvdock_nixl` and `examples/kvdock_mooncake`, under stand-ins of their engines that do what the real ones did."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvdock.errors import TransferError
from kvdock.plugins.registry import Registry
from kvdock.transfer import PoolLayout, Spans, TicketState
from support_plugins import QUIET
from support_sources import ROOT

MEMORY = torch.zeros(64, dtype=torch.uint8)


def imported(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """Import an example anew, as it lies in this repository."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / f"kvdock_{name}" / "src"))
    for module in [module for module in sys.modules if module.startswith(f"kvdock_{name}")]:
        monkeypatch.delitem(sys.modules, module)
    return importlib.import_module(f"kvdock_{name}.writer")


class Agent:
    """Stands for NIXL's agent: writes go on until they are told how they end."""

    def __init__(self, name: str, config: SimpleNamespace) -> None:
        self.name, self.config = name, config
        self.backends = {"UCX": 1} if config.backends == ["UCX"] else {}
        self.said: str | Exception = "PROC"
        self.posted: list[Any] = []
        self.released = self.looked = self.deregistered = 0
        self.removed: list[str] = []

    def get_plugin_list(self) -> list[str]:
        return ["POSIX", "UCX"]

    def register_memory(self, memory: torch.Tensor) -> str:
        return "registered"

    def deregister_memory(self, registered: str) -> None:
        assert registered == "registered"
        self.deregistered += 1

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self.removed.append(name)
        raise RuntimeError("NIXL has removed it itself")

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], kind: str) -> tuple[Any, str]:
        return descs, kind

    def initialize_xfer(self, *what: Any) -> list[Any]:
        return list(what)

    def transfer(self, handle: list[Any]) -> str:
        self.posted.append(handle)
        return "PROC"

    def check_xfer_state(self, handle: list[Any]) -> str:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said

    def release_xfer_handle(self, handle: list[Any]) -> None:
        self.released += 1
        raise RuntimeError("it has ended")

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self.looked += 1
        return {"somebody": [b"else's"]}


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example's module, with the stand-in installed."""
    package, api = ModuleType("nixl"), ModuleType("nixl._api")
    api.nixl_agent = Agent  # type: ignore[attr-defined]  # that is how a module is made
    api.nixl_agent_config = lambda **options: SimpleNamespace(**options)  # type: ignore[attr-defined]  # as above
    monkeypatch.setitem(sys.modules, "nixl", package)
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    return imported(monkeypatch, "nixl")


def linked_nixl(nixl: ModuleType) -> tuple[Any, Agent]:
    """Return a writer that knows a peer whose memory begins at 1000."""
    writer = nixl.NixlWriter()
    described = writer.register(MEMORY)
    assert described == MEMORY.data_ptr().to_bytes(8, "little") + writer._agent.name.encode()
    writer.connect("p", (1000).to_bytes(8, "little") + b"other")
    return writer, writer._agent


def test_a_write_of_nixl_is_between_the_addresses_of_both(nixl: ModuleType) -> None:
    writer, agent = linked_nixl(nixl)
    assert (agent.config.enable_prog_thread, agent.config.backends) == (False, ["UCX"])
    assert nixl.NixlWriter()._agent.name != agent.name, "names of agents are never the same"
    write = writer.write("p", 8, 16, 4)
    assert agent.posted == [["WRITE", ([(MEMORY.data_ptr() + 8, 4, 0)], "DRAM"), ([(1016, 4, 0)], "DRAM"), "other"]]
    assert writer.state(write) is TicketState.PENDING
    writer.progress()
    assert agent.looked == 1


@pytest.mark.parametrize(
    ("said", "state"), [("DONE", TicketState.DONE), ("ERR", TicketState.FAILED), (RuntimeError("disconnected"), TicketState.FAILED)]
)
def test_how_a_write_of_nixl_ends(said: str | Exception, state: TicketState, nixl: ModuleType) -> None:
    writer, agent = linked_nixl(nixl)
    write = writer.write("p", 0, 0, 4)
    agent.said = said
    assert writer.state(write) is state
    assert agent.released == 1
    writer.disconnect("p")
    writer.close()
    writer.close()
    assert (agent.removed, agent.deregistered, nixl._kept) == (["other"], 1, [])


def test_an_agent_with_writes_that_go_on_is_kept(nixl: ModuleType) -> None:
    writer, agent = linked_nixl(nixl)
    writer.write("p", 0, 0, 4)
    writer.close()
    assert (nixl._kept, agent.deregistered) == ([writer], 0)


def test_nixl_that_is_not_there_or_has_no_such_plugin(nixl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransferError, match=r"transport 'nixl': backend: expected one of POSIX, UCX, got 'LIBFABRIC'"):
        nixl.NixlWriter("LIBFABRIC")
    with pytest.raises(ValueError, match="an address and an agent's metadata are more than 8 bytes"):
        nixl.NixlWriter().connect("p", b"12345678")
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(TransferError, match=r"transport 'nixl': expected the package nixl, got .*\. Fix: pip install nixl"):
        nixl.NixlWriter()


class Transfers:
    """Stands for Mooncake's engine."""

    code = 0
    begins: threading.Event
    handle = 77
    said = 0

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        self.begun: list[tuple[Any, ...]] = []
        self.asked: list[int] = []
        self.registered: list[int] = []
        assert metadata == "P2PHANDSHAKE"
        return self.code

    def get_rpc_port(self) -> int:
        return 1234

    def register_memory(self, address: int, nbytes: int) -> int:
        self.registered.append(address)
        return 0

    def unregister_memory(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    def transfer_submit_write(self, *what: Any) -> int:
        assert self.begins.wait(5), "the handshake with a peer"
        self.begun.append(what)
        return self.handle

    def transfer_check_status(self, handle: int) -> int:
        assert handle == 77, "the real one crashes"
        self.asked.append(handle)
        return self.said


@pytest.fixture
def mooncake(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example's module, with the stand-in installed."""
    package, engine = ModuleType("mooncake"), ModuleType("mooncake.engine")
    monkeypatch.setattr(Transfers, "begins", threading.Event(), raising=False)
    engine.TransferEngine = Transfers  # type: ignore[attr-defined]  # that is how a module is made
    monkeypatch.setitem(sys.modules, "mooncake", package)
    monkeypatch.setitem(sys.modules, "mooncake.engine", engine)
    return imported(monkeypatch, "mooncake")


def linked_mooncake(mooncake: ModuleType) -> tuple[Any, Transfers]:
    """Return a writer that knows a peer whose memory begins at 1000."""
    writer = mooncake.MooncakeWriter("here")
    assert writer.register(MEMORY) == b'{"name": "here:1234", "address": %d}' % MEMORY.data_ptr()
    writer.connect("p", b'{"name": "there:5", "address": 1000}')
    return writer, writer._engine


def until(true: Callable[[], bool]) -> None:
    """Wait for the writer's thread, at most 5 s."""
    end = time.monotonic() + 5
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_no_call_waits_for_mooncakes_handshake(mooncake: ModuleType) -> None:
    writer, engine = linked_mooncake(mooncake)
    write = writer.write("p", 8, 16, 4)
    assert (writer.state(write), engine.asked) == (TicketState.PENDING, [])
    Transfers.begins.set()
    until(lambda: write.handle is not None)
    assert engine.begun == [("there:5", MEMORY.data_ptr() + 8, 1016, 4)]
    for said, state in ((0, TicketState.PENDING), (-2, TicketState.PENDING), (1, TicketState.DONE)):
        engine.said = said
        assert writer.state(write) is state
    writer.disconnect("p")
    writer.close()
    assert (engine.registered, mooncake._kept) == ([], [])
    until(lambda: not any(thread.name == "kvdock mooncake" and thread.is_alive() for thread in threading.enumerate()))


@pytest.mark.parametrize("handle", [0, -1, (1 << 64) - 1])
def test_a_write_that_mooncake_did_not_begin_is_not_asked_for(handle: int, mooncake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transfers, "handle", handle)
    writer, engine = linked_mooncake(mooncake)
    Transfers.begins.set()
    write = writer.write("p", 0, 0, 4)
    until(lambda: write.handle is not None)
    assert (writer.state(write), engine.asked) == (TicketState.FAILED, [])
    writer.close()


def test_mooncake_says_that_a_write_failed_and_is_kept_while_one_goes_on(mooncake: ModuleType) -> None:
    writer, engine = linked_mooncake(mooncake)
    Transfers.begins.set()
    first, second = writer.write("p", 0, 0, 4), writer.write("p", 4, 4, 4)
    until(lambda: second.handle is not None)
    engine.said = -1
    assert writer.state(first) is TicketState.FAILED
    writer.close()
    assert (mooncake._kept, engine.registered) == ([writer], [MEMORY.data_ptr()])


@pytest.mark.parametrize("described", [b"", b"{}", b"[]", b'{"name": 3, "address": 1}', b'{"name": "x", "address": -1}', b'{"name": "x"}'])
def test_what_is_no_description_of_mooncakes(described: bytes, mooncake: ModuleType) -> None:
    writer, _ = linked_mooncake(mooncake)
    with pytest.raises((ValueError, KeyError, TypeError)):
        writer.connect("q", described)
    writer.close()


def test_mooncake_that_is_not_there_or_does_not_start(mooncake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transfers, "code", -3)
    with pytest.raises(TransferError, match=r"transport 'mooncake': expected an engine with 'rdma' on 'here', got its error -3"):
        mooncake.MooncakeWriter("here", "rdma")
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransferError, match=r"expected the module mooncake\.engine, got .*\. Fix: pip install mooncake-transfer-engine"):
        mooncake.MooncakeWriter()


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
def test_their_plugins_bring_a_transport_that_packs_blocks(name: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(name)
    plugin, registry = sys.modules[f"kvdock_{name}"], Registry(QUIET)
    record = registry.register(plugin, name)
    assert (record.state.name, record.reason) == ("READY", f"brings transports: {name}")
    transport = registry.transports()[name][name](part_bytes=100, parts=2, lanes=1)
    transport.register(PoolLayout("m", 1, 0, 1, (64,), (), ()), [MEMORY])
    assert (transport.name, len(transport._arena.memory)) == (name, 2 * 192 + 128)
    with pytest.raises(TransferError, match="peer 'p': expected a connection"):
        transport.push("p", Spans(*[np.zeros(1, dtype=np.int64)] * 5), 1, b"")
    transport.close()
