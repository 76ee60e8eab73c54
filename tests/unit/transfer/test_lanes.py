"""A lane of each side: what is written when, and what a receiver believes."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch

from kvdock.errors import TransferError
from kvdock.transfer import Runs, TicketState
from kvdock.transfer.lanes import NOTE, Arena, Receiver, Sender, Shape
from kvdock.transfer.streams import StreamTicket
from support_one_sided import Direct

SHAPE = Shape(100, 2)
MAGIC = int.from_bytes(b"kvdock\x00\x01", "big")
BEHIND = 3 * SHAPE.lane
"""Where the arenas end."""


def ticket(nbytes: int, tag: int = 1) -> StreamTicket:
    return StreamTicket(Runs(*(np.array([number], dtype=np.int64) for number in (0, 0, nbytes))), tag)


class Lane:
    """The lane of a sender, that of a receiver, and the engines between."""

    def __init__(self) -> None:
        self.engines = [Direct(name) for name in ("sender", "receiver")]
        self.arenas = [Arena(SHAPE, torch.zeros(BEHIND, dtype=torch.uint8), engine) for engine in self.engines]
        described = [engine.register(arena.memory) for engine, arena in zip(self.engines, self.arenas, strict=True)]
        for engine, other in zip(self.engines, reversed(described), strict=True):
            engine.connect("peer", other)
        self.sender, self.receiver = Sender(self.arenas[0], "peer", SHAPE.lane), Receiver(self.arenas[1], "peer", 2 * SHAPE.lane, BEHIND)
        self.pools = [torch.arange(1, 1001).to(torch.uint8), torch.zeros(1000, dtype=torch.uint8)]

    def begin(self, nbytes: int, tag: int = 1) -> tuple[StreamTicket, StreamTicket]:
        sent, comes = ticket(nbytes, tag), ticket(nbytes, tag)
        self.receiver.expect(comes)
        self.sender.push(sent, NOTE.unpack(comes.note))
        return sent, comes

    def send(self) -> int:
        """Let the sender go on; returns how many writes it has begun in all."""
        self.sender.advance(self.pools[:1])
        return len(self.engines[0].writes)

    def take(self) -> int:
        """Let the receiver go on; returns how many writes it has begun in all."""
        self.receiver.advance(self.pools[1:])
        return len(self.engines[1].writes)

    def say(self, part: int = 0, data: bytes = b"\xff" * 8, **other: int) -> None:
        """Write a part with a label into the receiver's lane, as a peer could."""
        said = {"magic": MAGIC, "number": self.receiver._number, "which": part, "tag": 1, "begin": 0, "total": 8, "nbytes": len(data)}
        fields = [*(said | {key: value for key, value in other.items() if key in said}).values(), other.get("cell", 0)]
        label = struct.pack("<8Q", *fields)
        whole = data + label + struct.pack("<Q", zlib.crc32(data, zlib.crc32(label)) ^ other.get("flip", 0))
        end = self.arenas[1].slot_end(2 * SHAPE.lane, part)
        self.arenas[1].memory[end - len(whole) : end] = torch.frombuffer(bytearray(whole), dtype=torch.uint8)


@pytest.mark.parametrize(("part_bytes", "parts", "slot"), [(1, 1, 128), (56, 4, 128), (57, 4, 192), (4 << 20, 4, (4 << 20) + 128)])
def test_the_sizes_of_slots_and_lanes(part_bytes: int, parts: int, slot: int) -> None:
    shape = Shape(part_bytes, parts)
    assert (shape.slot, shape.lane) == (slot, slot * parts + 128)
    assert (shape.lane % 64, shape.slot >= part_bytes + 72) == (0, True), "cells are aligned, and a label fits behind a part"


def test_writes_stay_in_the_lanes() -> None:
    lane = Lane()
    lane.begin(900)
    for _ in range(20):
        lane.send()
        lane.take()
    assert torch.equal(lane.pools[1][:900], lane.pools[0][:900])
    for arena, at in zip(lane.arenas, (SHAPE.lane, 2 * SHAPE.lane), strict=True):
        arena.memory[at : at + SHAPE.lane] = 0
        assert not arena.memory.any()


def test_a_push_is_done_when_the_last_of_its_writes_has_ended() -> None:
    lane = Lane()
    lane.engines[0].held = True
    sent, _ = lane.begin(150)
    assert lane.send() == 2
    first, second = lane.engines[0].pending()
    second.land()
    lane.send()
    assert sent.state is TicketState.PENDING
    first.state = TicketState.DONE
    second.state = TicketState.PENDING
    lane.send()
    assert sent.state is TicketState.PENDING
    second.state = TicketState.DONE
    lane.send()
    assert sent.state is TicketState.DONE


def test_a_slot_is_not_filled_while_a_write_reads_it_though_the_peer_took_its_part() -> None:
    lane = Lane()
    lane.begin(400)
    assert lane.send() == 2
    for write in lane.engines[0].writes:
        write.state = TicketState.PENDING  # all of it has landed, but the engine has not noticed
    lane.take()
    assert lane.send() == 2
    lane.engines[0].writes[0].state = TicketState.DONE
    assert lane.send() == 3


def test_a_new_lane_is_not_written_while_writes_to_the_old_one_go_on() -> None:
    lane = Lane()
    lane.engines[0].held = True
    _, comes = lane.begin(100)
    lane.send()
    comes.cancel("nobody was told")
    _, comes = lane.begin(60, tag=2)
    assert lane.send() == 1
    lane.engines[0].land()
    lane.engines[0].held = False
    assert lane.send() == 2
    lane.take()
    assert comes.state is TicketState.DONE
    assert torch.equal(lane.pools[1][:60], lane.pools[0][:60])


def test_what_was_taken_is_told_once_at_a_time() -> None:
    lane = Lane()
    lane.engines[0].held = lane.engines[1].held = True
    lane.begin(400)
    lane.send()
    first, second = lane.engines[0].pending()
    first.land()
    assert lane.take() == 1
    second.land()
    assert lane.take() == 1, "what is written from does not change meanwhile"
    (told,) = lane.engines[1].pending()
    assert told.source.tolist()[:4] == [1, 0, 0, 0]
    told.land()
    assert [lane.send(), lane.take()] == [3, 2]
    assert told.source.tolist()[:4] == [2, 0, 0, 0]


@pytest.mark.parametrize(("number", "taken"), [(0, 3), (1, 1), (1, 3)])
def test_a_count_that_is_late_or_wrong_makes_no_room(number: int, taken: int) -> None:
    """Of another lane, or more than was sent: the peer's own comes yet."""
    lane = Lane()
    sent, comes = lane.begin(900)
    assert lane.send() == 2
    mine = NOTE.unpack(comes.note)[1] & 0x7FFFFFFF
    lane.arenas[0].write_cell(lane.arenas[0].cell(SHAPE.lane), (mine ^ (not number) ^ (taken == 1) << 30) << 32 | taken)
    assert lane.send() == 2
    for _ in range(10):
        lane.take()
        lane.send()
    assert sent.state is comes.state is TicketState.DONE


def test_a_part_is_copied_before_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane()
    _, comes = lane.begin(100)
    lane.send()
    put = comes.put

    def late(*arguments: Any) -> None:
        lane.arenas[1].memory.fill_(0xEE)  # a write of somebody who was given up, between the look and the pool
        put(*arguments)

    monkeypatch.setattr(comes, "put", late)
    lane.take()
    assert torch.equal(lane.pools[1][:100], lane.pools[0][:100])


@pytest.mark.parametrize(
    "wrong",
    [
        {"flip": 1},
        {"magic": MAGIC + 1},
        {"number": 5},
        {"which": 1},
        {"nbytes": 0, "data": b""},
        {"nbytes": 101, "data": b"\xff" * 101},
        {"nbytes": 1 << 60},
        {"tag": 2},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_is_no_part_of_what_is_expected_goes_nowhere(wrong: dict[str, Any]) -> None:
    lane = Lane()
    comes = ticket(8)
    lane.receiver.expect(comes)
    lane.say(**{"cell": 64, **wrong})
    lane.take()
    assert comes.state is TicketState.PENDING
    assert not lane.pools[1].any()
    lane.say(part=1 if "tag" in wrong else 0)
    lane.take()
    assert comes.state is TicketState.DONE, "then the right one comes"


@pytest.mark.parametrize("cell", [4, BEHIND - 4, BEHIND, (1 << 64) - 8])
def test_a_cell_outside_the_peers_memory_is_an_error(cell: int) -> None:
    lane = Lane()
    lane.receiver.expect(ticket(8))
    lane.say(cell=cell)
    with pytest.raises(TransferError, match=f"peer 'peer': expected a cell within its {BEHIND} bytes, got one at {cell}"):
        lane.take()
    assert lane.engines[1].writes == []


@pytest.mark.parametrize("which", [0, 1])
def test_writes_that_fail_are_errors_and_leave_a_lane_that_is_still(which: int) -> None:
    lane = Lane()
    lane.begin(100)
    lane.engines[which].held = True
    lane.send()
    if which:
        lane.take()
    end = (lane.sender, lane.receiver)[which]
    assert not end.is_still()
    lane.engines[which].fails = True
    with pytest.raises(TransferError, match="peer 'peer': expected a write that comes to an end, got one that failed"):
        end.advance(lane.pools[which : which + 1])
    assert end.is_still()
    assert Lane().sender.is_still()


def test_an_error_of_a_push_leaves_no_half_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane()
    sent, _ = lane.begin(100)
    monkeypatch.setattr(lane.engines[0], "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lane.send()
    lane.sender.cancel("broken")
    assert (sent.state, sent.error, lane.sender.is_still()) == (TicketState.FAILED, "broken", True)
