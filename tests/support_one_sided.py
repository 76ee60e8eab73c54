"""An engine of one-sided writes in one process: its writes land when they are told to, in pieces, in any order, or never."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import attrs
import torch

from kvdock.transfer import OneSided, TicketState, Writer


@attrs.define(eq=False)
class Write:
    """A write: from where to where, and how far it is. Its bytes are read when they land."""

    source: torch.Tensor
    target: torch.Tensor
    state: TicketState = TicketState.PENDING
    left: list[tuple[int, int]] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.left = [(0, len(self.source))]

    def land(self, chance: random.Random | None = None) -> None:
        """Let all of it land; with a chance some of it, and perhaps be done."""
        if chance is not None:
            begin, end = self.left.pop(chance.randrange(len(self.left)))
            cut = chance.randint(begin, end)
            pieces = [(begin, cut), (cut, end)]
            now = chance.randrange(2)
            self.left += [] if pieces[1 - now][0] == pieces[1 - now][1] else [pieces[1 - now]]
            self.target[slice(*pieces[now])] = self.source[slice(*pieces[now])]
        else:
            for begin, end in self.left:
                self.target[begin:end] = self.source[begin:end]
            self.left = []
        if not self.left:
            self.state = TicketState.DONE


class Direct(Writer):
    """Writes into memory of the same process.

    Attributes:
        held: whether writes wait for `land`.
        fails: whether writes fail.
    """

    here: ClassVar[dict[str, Direct]] = {}

    def __init__(self, me: str) -> None:
        self.me, self.held, self.fails, self.is_open = me, False, False, True
        self.writes: list[Write] = []
        self.peers: dict[str, Direct] = {}
        self.here[me] = self

    def register(self, memory: torch.Tensor) -> bytes:
        self.memory = memory
        return json.dumps(self.me).encode()

    def connect(self, peer: str, described: bytes) -> None:
        self.peers[peer] = self.here[json.loads(described)]

    def write(self, peer: str, begin: int, at: int, nbytes: int) -> object:
        assert self.is_open
        target = self.peers[peer].memory
        assert 0 <= at <= at + nbytes <= len(target)
        made = Write(self.memory[begin : begin + nbytes], target[at : at + nbytes])
        self.writes.append(made)
        if not self.held:
            made.land()
        return made

    def state(self, write: object) -> TicketState:
        assert isinstance(write, Write)
        return TicketState.FAILED if self.fails else write.state

    def pending(self) -> Iterator[Write]:
        """Yield what has not landed."""
        return (write for write in self.writes if write.left)

    def land(self, chance: random.Random | None = None) -> None:
        """Let all writes land, or with a chance some pieces of some."""
        for write in list(self.pending()):
            if chance is None or chance.random() < 0.5:
                write.land(chance)

    def disconnect(self, peer: str) -> None:
        del self.peers[peer]

    def close(self) -> None:
        self.is_open = False


class Lanes(OneSided):
    """The transport over it."""

    def __init__(self, me: str, **options: Any) -> None:
        self.writer = Direct(me)
        super().__init__("lanes", self.writer, **{"part_bytes": 96, "parts": 3, "lanes": 4, **options})
