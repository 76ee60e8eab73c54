"""The format of Mooncake's traces: one JSON object per line (kvcache-ai/Mooncake, FAST'25)."""

from __future__ import annotations

import json
from typing import Any

from kvdock.errors import ArgumentValueError
from kvdock.replay.trace import TRACE_BLOCK, TraceFormat, TraceRequest, count_of

__all__ = ["MooncakeFormat"]

_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_LATEST_MS = 1e15
"""Milliseconds beyond which a time is a mistake; a float keeps them exact to a microsecond or so up to there."""


class MooncakeFormat(TraceFormat):
    """``timestamp`` in milliseconds, ``input_length`` and ``output_length`` in tokens, ``hash_ids``: one per 512 of the input."""

    name = "mooncake"
    looks_like = '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, ...]}'
    header_lines = 0

    def recognises(self, first: str) -> bool:
        """Say whether a line is the beginning of a JSON object; the fields are looked at line by line."""
        return first.lstrip().startswith("{")

    def parse(self, text: str, line: int, subject: str) -> TraceRequest:
        """Read one object; see `TraceFormat.parse`."""
        row = _object(text, subject)
        input_length = count_of(subject, "input_length", row["input_length"], 1)
        return TraceRequest(
            line,
            _milliseconds(row["timestamp"], subject) / 1000,
            input_length,
            count_of(subject, "output_length", row["output_length"], 0),
            _ids(row["hash_ids"], input_length, subject),
        )


def _object(text: str, subject: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentValueError(subject, expected="a JSON object", got=f"{text.strip()[:80]!r} ({error})") from error
    missing = [name for name in _FIELDS if not isinstance(row, dict) or name not in row]
    if missing:
        raise ArgumentValueError(
            subject, expected=f"an object with {', '.join(_FIELDS)}", got=f"{text.strip()[:80]!r}, without {', '.join(missing)}"
        )
    found: dict[str, Any] = row
    return found


def _milliseconds(value: object, subject: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LATEST_MS:
        raise ArgumentValueError(f"{subject}: timestamp", expected="milliseconds", got=repr(value)[:80])
    return value


def _ids(value: object, input_length: int, subject: str) -> tuple[int, ...]:
    count = -(-input_length // TRACE_BLOCK)
    if not isinstance(value, list) or len(value) != count:
        got = f"{len(value)} of them" if isinstance(value, list) else repr(value)[:80]
        raise ArgumentValueError(f"{subject}: hash_ids", expected=f"{count}, one for each {TRACE_BLOCK} of {input_length} tokens", got=got)
    return tuple(count_of(subject, f"hash_ids[{place}]", number, 0) for place, number in enumerate(value))
