"""Reading a batch that came from outside: nothing is made of it but what a batch has, and no more than there are bytes for.

Each container's header is read by itself, and what it claims is compared with the bytes that are left before anything is read: a few
bytes cannot claim millions of values, and values cannot be nested deeper than a batch is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import msgpack

from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.integrations.kv_events.wire import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    ExtraKey,
    KVEvent,
    KVEventBatch,
)

__all__ = ["read_batch"]

_T = TypeVar("_T")

_LONGEST_HASH = 64
"""Bytes of the longest digest that anybody calls blocks by."""

_BLOCK_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)
_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": _BLOCK_STORED,
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""The events, and their fields in the order of arrays."""

_NEEDED = {"BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size"), "BlockRemoved": ("block_hashes",)}


def read_batch(payload: bytes) -> KVEventBatch:
    """Return a batch, of events as maps or as arrays. Fields that came with a later version are skipped.

    Args:
        payload: the third frame of a message.

    Raises:
        ArgumentValueError: it is no batch: not msgpack, another shape, an event of a name that is not known here, values of other
            types, numbers of things that do not agree, bytes that are missing or too many.
    """
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise ArgumentTypeError("read_batch: payload", expected="bytes", got=repr(payload)[:80], fix="pass the third frame of a message")
    try:
        return _Reader(payload).batch()
    except _Refused as error:
        raise _refusal(error.expected, error.got) from error
    except (ValueError, OverflowError, msgpack.UnpackException) as error:
        raise _refusal("msgpack of a batch", f"{len(payload)} bytes: {type(error).__name__} {error}".rstrip()) from error


class _Refused(Exception):  # noqa: N818 - a reason on its way to `read_batch`
    def __init__(self, expected: str, got: object) -> None:
        self.expected, self.got = expected, repr(got)[:80] if not isinstance(got, _Said) else got


class _Said(str):
    """A text that is no value from outside."""

    __slots__ = ()


def _refusal(expected: str, got: str) -> ArgumentValueError:
    fix = "connect to a publisher of vLLM's KV events; where it is one, its version is newer than what this one reads"
    return ArgumentValueError("KV events: message", expected=expected, got=got, fix=fix)


class _Reader:
    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        # A container where a plain value belongs is refused by its header: it may claim no entry.
        self._unpacker = msgpack.Unpacker(None, max_buffer_size=max(len(payload), 1), max_array_len=0, max_map_len=0)
        self._unpacker.feed(payload)
        self._value: Callable[[], Any] = self._unpacker.unpack

    def batch(self) -> KVEventBatch:
        count = self._array("a batch: an array of seconds, events and a rank")
        if count < 2:
            raise _Refused("a batch: an array of seconds, events and a rank", _Said(f"an array of {count}"))
        ts = self._value()
        if type(ts) not in (float, int):
            raise _Refused("seconds", ts)
        events = [self._event() for _ in range(self._array("an array of events"))]
        rank = self._unsigned("data_parallel_rank") if count > 2 else None
        self._skip(count - 3)
        if self._unpacker.tell() != len(self._payload):
            raise _Refused("the end of a batch", _Said(f"{len(self._payload) - self._unpacker.tell()} bytes behind it"))
        return KVEventBatch(float(ts), events, rank)

    def _event(self) -> KVEvent:
        fields = dict(self._named() if self._is_map() else self._listed())
        kind = fields.pop("type", None)
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise _Refused(f"an event: one of {', '.join(_FIELDS)}", kind)
        for name in _NEEDED.get(kind, ()):
            if name not in fields:
                raise _Refused(f"{kind} with {name}", _Said("none"))
        if kind == "AllBlocksCleared":
            return AllBlocksCleared()
        if kind == "BlockRemoved":
            return BlockRemoved(fields["block_hashes"], fields.get("medium"), fields.get("group_idx"))
        return self._stored(BlockStored(**fields))

    def _stored(self, event: BlockStored) -> BlockStored:
        count, size = len(event.block_hashes), event.block_size
        if not size or len(event.token_ids) != count * size:
            raise _Refused(f"token_ids of {count} blocks of {size}", _Said(f"{len(event.token_ids)} tokens"))
        if event.extra_keys is not None and len(event.extra_keys) != count:
            raise _Refused(f"extra_keys of {count} blocks", _Said(f"those of {len(event.extra_keys)}"))
        return event

    def _listed(self) -> Iterator[tuple[str, Any]]:
        """Yield the fields of an event that is an array."""
        count = self._array("an event: a map or an array")
        kind = self._value() if count else None
        yield "type", kind
        names = _FIELDS.get(kind, ()) if isinstance(kind, str) else ()
        for name, _ in zip(names, range(count - 1), strict=False):
            yield name, self._field(name)
        self._skip(count - 1 - len(names))

    def _named(self) -> Iterator[tuple[str, Any]]:
        """Yield the fields of an event that is a map."""
        seen = set[str]()
        for _ in range(self._within(self._unpacker.read_map_header(), 2)):
            name = self._value()
            if type(name) is not str or name in seen:
                raise _Refused("each field once, by its name", name)
            seen.add(name)
            if name == "type":
                yield name, self._text(name)
            elif name in _BLOCK_STORED or name == "cache_salt":
                yield name, self._field(name)
            else:
                self._skip(1)

    def _field(self, name: str) -> Any:
        if name == "block_hashes":
            return self._many(name, self._hash)
        if name == "token_ids":
            return self._many(name, self._token)
        if name == "extra_keys":
            return None if self._is_none() else self._many(name, self._keys)
        if name == "parent_block_hash":
            return None if self._is_none() else self._hash()
        if name in ("medium", "lora_name", "cache_salt"):
            return None if self._is_none() else self._text(name)
        return self._unsigned(name)

    def _many(self, name: str, one: Callable[[], _T]) -> list[_T]:
        return [one() for _ in range(self._array(f"{name}: an array"))]

    def _hash(self) -> BlockHash:
        value = self._value()
        if type(value) is int or (type(value) is bytes and 0 < len(value) <= _LONGEST_HASH):
            return value
        raise _Refused(f"a block's hash: an integer, or at most {_LONGEST_HASH} bytes", value)

    def _token(self) -> int:
        value = self._value()
        if type(value) is not int or value >= 2**63:
            raise _Refused("a token id of 64 bits", value)
        return value

    def _text(self, name: str) -> str:
        value = self._value()
        if type(value) is not str:
            raise _Refused(f"{name}: text", value)
        return value

    def _unsigned(self, name: str) -> int | None:
        value = self._value()
        if value is not None and (type(value) is not int or value < 0):
            raise _Refused(f"{name}: a number from 0, or none", value)
        return value

    def _keys(self) -> tuple[ExtraKey, ...] | None:
        return None if self._is_none() else tuple(self._many("extra_keys of a block", self._key))

    def _key(self) -> ExtraKey:
        if self._is_array():
            if self._array("") != 2:
                raise _Refused("an extra key: a value, or a pair of text and a number", _Said("an array of another length"))
            return self._text("an extra key"), self._token()
        value = self._value()
        if type(value) not in (str, bytes, int, float, bool):
            raise _Refused("an extra key: a value, or a pair of text and a number", value)
        return cast(ExtraKey, value)

    def _array(self, what: str) -> int:
        if not self._is_array():
            raise _Refused(what, _Said(f"msgpack's type 0x{self._next():02x}"))
        return self._within(self._unpacker.read_array_header(), 1)

    def _within(self, count: int, least: int) -> int:
        left = len(self._payload) - self._unpacker.tell()
        if count * least > left:
            raise _Refused(f"at most {left} bytes of values", _Said(f"a claim of {count} values"))
        return count

    def _skip(self, count: int) -> None:
        for _ in range(count):
            self._unpacker.skip()

    def _next(self) -> int:
        at = self._unpacker.tell()
        return self._payload[at] if at < len(self._payload) else 0xC1  # which msgpack never uses

    def _is_array(self) -> bool:
        return self._next() & 0xF0 == 0x90 or self._next() in (0xDC, 0xDD)

    def _is_map(self) -> bool:
        return self._next() & 0xF0 == 0x80 or self._next() in (0xDE, 0xDF)

    def _is_none(self) -> bool:
        if self._next() != 0xC0:
            return False
        self._skip(1)
        return True
