"""What exchanges say to one another: who is there, who wants which blocks, that one is alive, that something is over."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.prefix.names import namespace_text
from kvdock.transfer.layout import PoolLayout
from kvdock.transfer.refusals import misplaced, refused
from kvdock.transfer.spans import Wanted
from kvdock.transfer.wire import Fields, as_text, read, written

__all__ = ["BEAT", "MOST_NOTE", "MOST_TAG", "MOST_TEXT", "Ask", "Hello", "Part", "Stop", "digest_of", "read_any"]

MOST_TAG = (1 << 62) - 1
MOST_TEXT = 1024
MOST_NOTE = 1024
_MOST_TOKENS, _MOST_GROUPS, _MOST_BLOCKS = 1 << 31, 1 << 16, 1 << 24

BEAT = written("beat", {})
"""Says that one is alive."""


@attrs.frozen
class Hello:
    """A pool and how to reach it: its layout, the transport's name, and what that one's `Transport.register` returned."""

    layout: PoolLayout
    transport: str
    described: bytes

    def to_bytes(self) -> bytes:
        """Return it as a message."""
        return written("hello", {"transport": self.transport, "described": as_text(self.described), "layout": self.layout.to_fields()})

    @classmethod
    def from_bytes(cls, peer: str, message: bytes) -> Hello:
        """Read one. Raises `TransferError`, which names the peer."""
        kind, fields = read(peer, message)
        if kind != "hello":
            raise misplaced(peer, "a hello", repr(kind[:20]))
        described = fields.raw("described", 1 << 23)
        return cls(PoolLayout.from_fields(fields.fields("layout")), fields.text("transport", MOST_TEXT), described)


@attrs.frozen
class Part:
    """Tokens that come by one push.

    Args:
        tag: by which they are pushed.
        wanted: of each layer group of the asker, which tokens.
        note: of the asker's transport to the owner's.
    """

    tag: int
    wanted: tuple[Wanted, ...]
    note: bytes = b""

    def to_fields(self) -> dict[str, Any]:
        """Return what JSON can say."""
        wanted = [[edge for pair in group for edge in pair] for group in self.wanted]
        return {"tag": self.tag, "wanted": wanted, "note": as_text(self.note)}

    @classmethod
    def from_fields(cls, fields: Fields) -> Part:
        """Read one. Raises `TransferError`."""
        edges = fields.lists("wanted", 0, _MOST_TOKENS, _MOST_GROUPS, _MOST_GROUPS)
        for group in edges:
            if len(group) % 2 or any(stop < start for start, stop in pairwise(group)):
                raise refused(f"{fields.subject}: wanted", "pairs of ascending tokens", str(group)[:80])
        wanted = tuple(tuple(zip(group[::2], group[1::2], strict=True)) for group in edges)
        return cls(fields.integer("tag", 0, MOST_TAG), wanted, fields.raw("note", MOST_NOTE))


@attrs.frozen
class Ask:
    """A request for blocks.

    Args:
        name: what the engines call the sequence.
        num_tokens: the tokens that the sequence has.
        digest: of their ids, see `digest_of`.
        tables: of each layer group of the asker its blocks.
        needed: what it cannot go on without.
        rest: what is beside these tokens in their blocks, if anything is. An owner that lacks it stops this part, and sends the other.
    """

    name: str
    num_tokens: int
    digest: str
    tables: tuple[tuple[int, ...], ...]
    needed: Part
    rest: Part | None = None

    @property
    def num_blocks(self) -> int:
        """Block ids in its tables."""
        return sum(map(len, self.tables))

    def to_bytes(self) -> bytes:
        """Return it as a message."""
        parts = {"needed": self.needed.to_fields(), "rest": [self.rest.to_fields()] if self.rest else []}
        return written("ask", {"name": self.name, "num_tokens": self.num_tokens, "digest": self.digest, "tables": self.tables, **parts})

    @classmethod
    def from_fields(cls, fields: Fields) -> Ask:
        """Read one. Raises `TransferError`."""
        found = cls(
            fields.text("name", MOST_TEXT),
            fields.integer("num_tokens", 1, _MOST_TOKENS),
            fields.text("digest", 64),
            tuple(fields.lists("tables", 0, _MOST_TOKENS, _MOST_GROUPS, _MOST_BLOCKS)),
            Part.from_fields(fields.fields("needed")),
            next(map(Part.from_fields, fields.objects("rest", 1)), None),
        )
        if found.rest and found.rest.tag == found.needed.tag:
            raise refused(f"{fields.subject}: rest: tag", "another than that of what is needed", found.rest.tag)
        return found


@attrs.frozen
class Stop:
    """Says that what has a tag is over, and why."""

    tag: int
    reason: str

    def to_bytes(self) -> bytes:
        """Return it as a message."""
        return written("stop", {"tag": self.tag, "reason": self.reason[:MOST_TEXT]})

    @classmethod
    def from_fields(cls, fields: Fields) -> Stop:
        """Read one. Raises `TransferError`."""
        return cls(fields.integer("tag", 0, MOST_TAG), fields.text("reason", MOST_TEXT))


def read_any(peer: str, message: bytes) -> Ask | Stop | None:
    """Return what a peer asks or ends; None where it says that it is alive. Raises `TransferError`, which names the peer."""
    kind, fields = read(peer, message)
    if kind == "beat":
        return None
    if kind not in ("ask", "stop"):
        raise misplaced(peer, "an ask, a stop or a beat", repr(kind[:20]))
    return Ask.from_fields(fields) if kind == "ask" else Stop.from_fields(fields)


def digest_of(tokens: npt.NDArray[Any], namespace: tuple[object, ...]) -> str:
    """Return a digest of token ids and of where they are shared: equal prefixes have equal ones, on any machine, in any Python.

    Raises:
        ArgumentValueError: a namespace that cannot be written.
    """
    found = hashlib.sha256(namespace_text("namespace", namespace).encode())
    found.update(np.ascontiguousarray(tokens, dtype="<i8").tobytes())
    return found.hexdigest()
