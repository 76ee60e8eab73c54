"""What peers tell one another, as bytes: a line with the version and a checksum, then JSON. Whoever reads trusts nothing of it.

::

    kvdock-transfer/2 ask 8f3b02c1
    {"tag": 7, ...}

The first line is compared before anything behind it is read, and the number of bytes before that. The checksum is of kind and JSON: a
block table with one changed digit is a block table, by which bytes would go to blocks of somebody else.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from kvdock.errors import TransferError
from kvdock.transfer.refusals import misplaced, refused

__all__ = ["MOST_BYTES", "VERSION", "Fields", "as_text", "read", "written"]

VERSION = 2
"""Of messages and layouts. It changes when one side could misread the other."""

MOST_BYTES = 16 << 20
"""Bytes of a message: a block table of a million entries has fewer."""

_NAME = b"kvdock-transfer/"
_LINE = 64


def written(kind: str, body: Mapping[str, Any]) -> bytes:
    """Return a message of some kind."""
    text = json.dumps(body, separators=(",", ":")).encode()
    return b"%s%d %s %08x\n%s" % (_NAME, VERSION, kind.encode(), _checksum(kind.encode(), text), text)


def _checksum(kind: bytes, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(kind))


def as_text(raw: bytes) -> str:
    """Return bytes as a text, for `Fields.raw`."""
    return base64.b64encode(raw).decode()


def read(peer: str, message: bytes) -> tuple[str, Fields]:
    """Return the kind of a message and what it says.

    Args:
        peer: who sent it, for errors.
        message: bytes from outside.

    Raises:
        TransferError: too long, of another version, damaged, or none of ours.
    """
    if not isinstance(message, bytes | bytearray | memoryview):
        raise misplaced(peer, "bytes", type(message).__name__)
    if len(message) > MOST_BYTES:
        raise refused(f"message of peer {peer!r}", f"at most {MOST_BYTES} bytes", f"{len(message)} bytes")
    first = bytes(message[:_LINE]).partition(b"\n")[0]
    version, _, rest = first.removeprefix(_NAME).partition(b" ")
    if not first.startswith(_NAME) or len(first) == _LINE:
        raise misplaced(peer, "one of kvdock's transfers", repr(first[:24]))
    if version != b"%d" % VERSION:
        raise TransferError(
            f"message of peer {peer!r}",
            expected=f"version {VERSION} of kvdock's transfers",
            got=f"version {version.decode('ascii', 'replace')[:20]}",
            fix="run the same version of kvdock on both sides",
        )
    (kind, _, said), text = rest.partition(b" "), bytes(message[len(first) + 1 :])
    if said != (checksum := b"%08x" % _checksum(kind, text)):
        got = f"{said.decode('ascii', 'replace')[:20]!r}, and what it says has {checksum.decode()!r}"
        fix = "use a channel that changes nothing, and pass on whole messages"
        raise TransferError(f"message of peer {peer!r}", expected="one with its checksum", got=got, fix=fix)
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refused(f"message of peer {peer!r}", "JSON behind its first line", str(error)[:80]) from error
    return kind.decode("ascii", "replace"), Fields(f"{kind.decode('ascii', 'replace')} of peer {peer!r}", body)


class Fields:
    """A JSON object from outside, of which each value is checked as it is read.

    Args:
        subject: what it is, for errors.
        body: what was read.

    Raises:
        TransferError: it is no object.
    """

    def __init__(self, subject: str, body: object) -> None:
        if not isinstance(body, dict):
            raise refused(subject, "an object", type(body).__name__)
        self.subject, self._body = subject, body

    def integer(self, name: str, low: int, high: int) -> int:
        """Return an integer from ``low`` to ``high``."""
        return self._integer(name, self._body.get(name), low, high)

    def integers(self, name: str, low: int, high: int, most: int) -> tuple[int, ...]:
        """Return a list of at most ``most`` integers."""
        return tuple(self._integer(name, value, low, high) for value in self._items(name, most))

    def text(self, name: str, most: int) -> str:
        """Return a text of at most ``most`` characters."""
        value = self._body.get(name)
        if not isinstance(value, str) or len(value) > most:
            raise self._refused(name, f"a text of at most {most} characters", value)
        return value

    def raw(self, name: str, most: int) -> bytes:
        """Return at most ``most`` bytes, which came as base64."""
        text = self.text(name, -(-most // 3) * 4)
        try:
            found = base64.b64decode(text, validate=True)
        except ValueError as error:
            raise self._refused(name, "base64", text) from error
        if len(found) > most:
            raise self._refused(name, f"at most {most} bytes", f"{len(found)} bytes")
        return found

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self._body.get(name)
        if not isinstance(value, bool):
            raise self._refused(name, "true or false", value)
        return value

    def fields(self, name: str) -> Fields:
        """Return an object."""
        return Fields(f"{self.subject}: {name}", self._body.get(name))

    def objects(self, name: str, most: int) -> Sequence[Fields]:
        """Return a list of at most ``most`` objects."""
        return [Fields(f"{self.subject}: {name}[{place}]", each) for place, each in enumerate(self._items(name, most))]

    def lists(self, name: str, low: int, high: int, most: int, longest: int) -> list[tuple[int, ...]]:
        """Return a list of at most ``most`` lists of integers, each of at most ``longest``."""
        found = [self._as_list(name, each, longest) for each in self._items(name, most)]
        return [tuple(self._integer(name, value, low, high) for value in each) for each in found]

    def _items(self, name: str, most: int) -> list[Any]:
        return self._as_list(name, self._body.get(name), most)

    def _as_list(self, name: str, value: object, most: int) -> list[Any]:
        if not isinstance(value, list) or len(value) > most:
            got = f"{len(value)} of them" if isinstance(value, list) else value
            raise self._refused(name, f"a list of at most {most}", got)
        return value

    def _integer(self, name: str, value: object, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            raise self._refused(name, f"an integer from {low} to {high}", value)
        return value

    def _refused(self, name: str, expected: str, got: object) -> TransferError:
        return refused(f"{self.subject}: {name}", expected, repr(got)[:80])
