"""Blocks through torch.distributed, on the CPU: two processes, and what is left of one when the other dies."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import kvdock
from kvdock.errors import ArgumentTypeError, ArgumentValueError, TransferError
from kvdock.integrations.torch_distributed import TorchDistributed
from kvdock.transfer import PoolLayout, Spans, TicketState, create_transport
from support_transfer import AGAIN, Side

SCRIPT = Path(__file__).with_name("carrying.py")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def play(scene: str, device: str = "cpu") -> tuple[list[int], list[str]]:
    """Run both processes, and return their exit codes and what they said."""
    port, env = free_port(), {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    start = [sys.executable, str(SCRIPT), str(port)]
    both = [
        subprocess.Popen([*start, str(rank), scene, device], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=150) for process in both]
    finally:
        for process in both:
            process.kill()
    codes = [process.returncode for process in both]
    assert set(codes) <= {0, 9}, [errors[-2500:] for _, errors in said]
    return codes, [out for out, _ in said]


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["whole", "parts"])
def test_blocks_come_in_any_order(scene: str) -> None:
    codes, (owner, asker) = play(scene)
    assert codes == [0, 0]
    assert owner == "owner:\nNone\nNone\nNone\n"
    assert [line for line in asker.splitlines() if "r" in line.split(":")[1]] == ["asker: r2: None", "asker: r0: None", "asker: r1: None"]


@pytest.mark.slow
def test_an_owner_that_dies() -> None:
    """What it sent is right, what it did not send is given up, soon, and no block is lost."""
    codes, (_, asker) = play("owner dies")
    assert codes == [9, 0]
    lines = asker.splitlines()
    assert "asker: r0: None" in lines
    assert sum("blocks of 'r" in line for line in lines) == 2, asker
    assert float(lines[-1].split()[1]) < 10


@pytest.mark.slow
def test_an_asker_that_dies() -> None:
    codes, (owner, _) = play("asker dies")
    assert codes == [0, 9]
    lost = "blocks of 'r{}' to peer 'asker': expected all of them, got its channel is closed" + AGAIN
    assert owner.splitlines() == ["owner:", lost.format(0), lost.format(1), "None"]


@pytest.mark.slow
def test_processes_that_close_nothing_end_well() -> None:
    """A thread that received when Python was gone called std::terminate."""
    assert play("nobody closes")[0] == [0, 0]


def test_threads_of_a_transport_that_nobody_has_end(wire: Wire) -> None:
    transport, memory = TorchDistributed(part_bytes=8), torch.arange(64, dtype=torch.uint8)
    layout = PoolLayout("m", 1, 0, 1, (64,), (), ())
    transport.register(layout, [memory])
    transport.connect("p", layout, b'{"rank": 1, "size": 2}')
    ticket = transport.expect("p", runs(4), 5)
    del transport
    gc.collect()
    assert (ticket.poll(), ticket.error) == (TicketState.FAILED, "its transport is gone")
    until(lambda: not any(thread.name.startswith("kvdock") and thread.name.endswith(" p") for thread in threading.enumerate()))


@pytest.mark.slow
def test_sides_with_parts_of_other_sizes_say_so() -> None:
    codes, (_, asker) = play("other parts")
    assert codes == [0, 0]
    assert "expected parts of 1 to 32 bytes, got" in asker
    assert "give both sides the same part_bytes" in asker


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_a_process_group() -> None:
    with pytest.raises(ArgumentValueError, match=r"group: expected a process group, got none: .* not set up\. Fix: call torch"):
        TorchDistributed()
    with pytest.raises(ArgumentTypeError, match=r"part_bytes: expected an int, got '1'"):
        TorchDistributed(part_bytes="1")  # type: ignore[arg-type]  # on purpose
    for size in (0, (1 << 30) + 1):
        with pytest.raises(ArgumentValueError, match=rf"part_bytes: expected 1 to 2\*\*30, got {size}"):
            create_transport(part_bytes=size)


@pytest.mark.parametrize(
    ("described", "text"),
    [
        (b"", "peer 'p': expected its rank in a process group, got b''"),
        (b"\x80\x04K\x01.", "expected its rank in a process group"),
        (b"[" * 199, "expected its rank in a process group"),
        (b"[1]", "expected its rank in a process group"),
        (b'{"rank": 1}', "expected its rank in a process group"),
        (b'{"rank": 0, "size": 1}', "expected another rank of the group of 1, in which this is rank 0, got rank 0 of 1"),
        (b'{"rank": 1, "size": 1}', "got rank 1 of 1"),
        (b'{"rank": 1, "size": 2}', "got rank 1 of 2"),
        (b'{"rank": true, "size": 1}', "got rank True of 1"),
        (b'{"rank": -1, "size": 1}', "got rank -1 of 1"),
    ],
)
def test_a_peer_that_is_no_rank(described: bytes, text: str, group: None) -> None:
    side = Side.make(kvdock.KVSpec((kvdock.LayerSpec(2, 2, 2, 2),), 64, torch.float16), 1, 4)
    transport = create_transport("torch.distributed")
    assert transport.register(side.layouts[0], side.caches[0].region_bytes()) == b'{"rank": 0, "size": 1}'
    with pytest.raises(TransferError, match=text):
        transport.connect("p", side.layouts[0], described)
    with pytest.raises(TransferError, match=r"peer 'p': expected a connection, got a peer that is not connected\. Fix: connect it"):
        transport.push("p", runs(4), 1, b"")
    transport.disconnect("p")
    transport.close()


def runs(nbytes: int) -> Spans:
    """Return a run of so many bytes, from byte 8 to byte 16."""
    return Spans(*(np.array([number], dtype=np.int64) for number in (0, 8, 0, 16, nbytes)))


class Wire:
    """Stands for the one-to-one calls of a process group: what is sent to rank 1 is in ``sent``, and ``deliver`` is what comes from it."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.coming: list[torch.Tensor] = []
        self.more = threading.Condition()
        self.error = ""
        self.polite = True

    def isend(self, tensor: torch.Tensor, **_: Any) -> Any:
        self.sent.append(tensor.clone())
        if self.polite and tensor.dtype == torch.int64 and tensor[2] == -1:
            self.part(-1, 0, [], 0)
        return self

    def irecv(self, tensor: torch.Tensor, **_: Any) -> Any:
        with self.more:
            self.more.wait_for(lambda: self.coming or self.error, timeout=20)
            if self.error:
                raise RuntimeError(self.error)
            tensor.copy_(self.coming.pop(0))
        return self

    def wait(self, timeout: object) -> None:
        assert str(timeout).startswith("10000 days"), "one that passes would break other connections"

    def deliver(self, *tensors: torch.Tensor) -> None:
        with self.more:
            self.coming += tensors
            self.more.notify_all()

    def part(self, tag: int, begin: int, data: list[int], total: int, nbytes: int | None = None, version: int = 1) -> None:
        header = [0x6B76646F636B, version, tag, begin, len(data) if nbytes is None else nbytes, total]
        self.deliver(torch.tensor(header), *([torch.tensor(data, dtype=torch.uint8)] if data else []))

    def fail(self, error: str) -> None:
        with self.more:
            self.error = error
            self.more.notify_all()


def until(true: Any) -> None:
    """Wait for another thread, at most 10 s."""
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    made = Wire()
    for name in ("isend", "irecv"):
        monkeypatch.setattr(dist, name, getattr(made, name))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    yield made
    made.fail("the test is over")


@pytest.fixture
def linked(wire: Wire) -> Iterator[tuple[TorchDistributed, torch.Tensor]]:
    """A transport that knows rank 1 as "p", with a memory of 64 bytes."""
    transport, memory = TorchDistributed(part_bytes=8), torch.arange(64, dtype=torch.uint8)
    layout = PoolLayout("m", 1, 0, 1, (64,), (), ())
    transport.register(layout, [memory])
    transport.connect("p", layout, b'{"rank": 1, "size": 2}')
    yield transport, memory
    transport.close()


Linked = tuple[TorchDistributed, torch.Tensor]


def test_a_push_is_headers_and_parts(linked: Linked, wire: Wire) -> None:
    ticket = linked[0].push("p", runs(20), 5, b"")
    until(lambda: ticket.poll() is TicketState.DONE)
    assert [each[2:].tolist() for each in wire.sent[::2]] == [[5, 0, 8, 20], [5, 8, 8, 20], [5, 16, 4, 20]]
    assert torch.cat(wire.sent[1::2]).tolist() == list(range(8, 28))


def test_what_comes_is_written_and_nothing_else(linked: Linked, wire: Wire) -> None:
    ticket = linked[0].expect("p", runs(12), 5)
    wire.part(5, 0, [200] * 8, 12)
    until(lambda: linked[1][16] == 200)
    assert ticket.poll() is TicketState.PENDING
    wire.part(5, 8, [201] * 4, 12)
    until(lambda: ticket.poll() is TicketState.DONE)
    assert linked[1].tolist() == [*range(16), *[200] * 8, *[201] * 4, *range(28, 64)]


def test_what_nobody_expects_goes_nowhere(linked: Linked, wire: Wire) -> None:
    cancelled, wanted = (linked[0].expect("p", runs(4), tag) for tag in (5, 6))
    cancelled.cancel("too late")
    for tag in (4, 5, 6):
        wire.part(tag, 0, [tag] * 4, 4)
    until(lambda: wanted.poll() is TicketState.DONE)
    assert linked[1].tolist() == [*range(16), *[6] * 4, *range(20, 64)]
    assert (cancelled.poll(), cancelled.error) == (TicketState.FAILED, "too late")


@pytest.mark.parametrize(
    ("begin", "data", "total", "text"),
    [
        (0, 4, 8, "expected bytes from 0 on of 4, got 0 to 4 of 8"),
        (2, 2, 4, "expected bytes from 0 on of 4, got 2 to 4 of 4"),
        (0, 8, 4, "expected bytes from 0 on of 4, got 0 to 8 of 4"),
        (-4, 4, 4, "expected bytes from 0 on of 4, got -4 to 0 of 4"),
    ],
)
def test_bytes_that_were_not_asked_for_fail_the_ticket_and_are_not_written(
    begin: int, data: int, total: int, text: str, linked: Linked, wire: Wire
) -> None:
    ticket = linked[0].expect("p", runs(4), 5)
    wire.part(5, begin, [200] * data, total)
    until(lambda: ticket.poll() is TicketState.FAILED)
    assert ticket.error == text
    assert linked[1].tolist() == list(range(64))
    assert linked[0].expect("p", runs(4), 5).poll() is TicketState.PENDING, "others go on"


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ({"nbytes": 9}, "peer 'p': expected parts of 1 to 8 bytes, got 9. Fix: give both sides the same part_bytes"),
        ({"nbytes": 1 << 40}, "peer 'p': expected parts of 1 to 8 bytes, got 1099511627776"),
        ({"nbytes": -1}, "peer 'p': expected parts of 1 to 8 bytes, got -1"),
        ({"version": 2}, "peer 'p': expected parts of version 1, got 6b76646f636b, version 2"),
    ],
)
def test_a_stream_that_cannot_be_read_breaks_the_connection(header: dict[str, int], text: str, linked: Linked, wire: Wire) -> None:
    tickets = [linked[0].expect("p", runs(4), 5), linked[0].expect("p", runs(4), 6)]
    wire.part(5, 0, [1], 4, **header)
    until(lambda: all(ticket.poll() is TicketState.FAILED for ticket in tickets))
    assert tickets[0].error.startswith(text)
    with pytest.raises(TransferError, match="peer 'p': expected a connection, got a connection that is broken: peer 'p'"):
        linked[0].push("p", runs(4), 7, b"")


def test_a_peer_that_says_goodbye_or_is_gone(linked: Linked, wire: Wire) -> None:
    wire.polite = False  # it has said goodbye first, and does not answer another
    ticket = linked[0].expect("p", runs(4), 5)
    wire.part(-1, 0, [], 0)
    until(lambda: ticket.poll() is TicketState.FAILED)
    assert ticket.error == "it said goodbye"
    until(lambda: [each[2].item() for each in wire.sent] == [-1])  # an answer, so that the other side's thread ends
    until(lambda: not any(thread.name == "kvdock receive p" for thread in threading.enumerate()))
    linked[0].disconnect("p")
    linked[0].connect("p", PoolLayout("m", 1, 0, 1, (64,), (), ()), b'{"rank": 1, "size": 2}')
    ticket = linked[0].expect("p", runs(4), 5)
    wire.fail("Connection closed by peer\nand more")
    until(lambda: ticket.poll() is TicketState.FAILED)
    assert ticket.error == "Connection closed by peer"


def test_a_rank_that_may_still_send_is_not_connected_again(linked: Linked, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdock.integrations.torch_distributed._PATIENCE", 0.05)
    layout, described = PoolLayout("m", 1, 0, 1, (64,), (), ()), b'{"rank": 1, "size": 2}'
    with pytest.raises(TransferError, match=r"peer 'q': expected one that is not known yet, got rank 1 again\. Fix: disconnect"):
        linked[0].connect("q", layout, described)
    ticket, wire.polite = linked[0].expect("p", runs(4), 5), False
    linked[0].disconnect("p")
    assert (ticket.poll(), ticket.error) == (TicketState.FAILED, "it was disconnected")
    until(lambda: [each[2].item() for each in wire.sent] == [-1])
    with pytest.raises(TransferError, match="expected a rank that has said goodbye, got rank 1, left on this side only"):
        linked[0].connect("p", layout, described)
    before = time.monotonic()
    linked[0].close()
    assert time.monotonic() - before < 1.5, "a peer that hangs is not waited for"
    monkeypatch.setattr("kvdock.integrations.torch_distributed._PATIENCE", 0.6)
    monkeypatch.setattr(wire, "isend", lambda tensor, **_: wire.irecv(tensor))  # now both threads hang
    other = TorchDistributed(part_bytes=8)
    other.register(layout, [torch.zeros(64, dtype=torch.uint8)])
    other.connect("p", layout, described)
    before = time.monotonic()
    other.close()
    assert 0.5 < time.monotonic() - before < 1, "so long for all threads together"
    wire.part(-1, 0, [], 0)


def test_one_tag_is_expected_once(linked: Linked) -> None:
    linked[0].expect("p", runs(4), 5)
    with pytest.raises(TransferError, match="peer 'p': tag: expected one that nothing is expected by, got 5"):
        linked[0].expect("p", runs(4), 5)


def test_a_push_that_was_cancelled_reads_nothing_more(linked: Linked, wire: Wire) -> None:
    ticket = linked[0].push("p", runs(0), 4, b"")
    assert ticket.poll() is TicketState.DONE, "nothing is nothing to wait for"
    ticket = linked[0].push("p", runs(40), 5, b"")
    ticket.cancel("no more")
    sent = len(wire.sent)
    assert ticket.poll() in (TicketState.FAILED, TicketState.DONE)
    linked[1].fill_(99)
    time.sleep(0.05)
    late = wire.sent[sent + 2 :]
    assert not any((each == 99).any() for each in late if each.dtype == torch.uint8), "the pool is read before the call returns, or never"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a pool on a device is sent to another device: needs two")
@pytest.mark.parametrize("scene", ["whole", "parts"])
def test_pools_on_devices(scene: str) -> None:
    """The same calls, on a group that serves host memory and devices."""
    codes, (owner, _) = play(scene, "cuda")
    assert codes == [0, 0]
    assert owner == "owner:\nNone\nNone\nNone\n"
