"""The format of Azure's traces: CSV with lengths only (Azure/AzurePublicDataset; Splitwise, ISCA'24)."""

from __future__ import annotations

from datetime import UTC, datetime

from kvdock.errors import ArgumentValueError
from kvdock.replay.trace import TraceFormat, TraceRequest, count_of

__all__ = ["AzureFormat"]

_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_SHORTEST_PROMPT, _SHORTEST_ANSWER = 1, 0
_MOST_DIGITS = 18


class AzureFormat(TraceFormat):
    """Date and time, tokens of the prompt, tokens of the answer. Nothing says which prompts share a prefix, so none do."""

    name = "azure"
    looks_like = ",".join(_HEADER)
    header_lines = 1

    def recognises(self, first: str) -> bool:
        """Say whether a line is the header."""
        return tuple(field.strip() for field in first.split(",")) == _HEADER

    def parse(self, text: str, line: int, subject: str) -> TraceRequest:
        """Read one row; see `TraceFormat.parse`."""
        fields = [field.strip() for field in text.split(",")]
        if len(fields) != len(_HEADER):
            raise ArgumentValueError(subject, expected=f"{len(_HEADER)} fields: {self.looks_like}", got=repr(text.strip())[:80])
        return TraceRequest(
            line,
            _seconds(fields[0], subject),
            _count(subject, _HEADER[1], fields[1], _SHORTEST_PROMPT),
            _count(subject, _HEADER[2], fields[2], _SHORTEST_ANSWER),
            None,
        )


def _seconds(text: str, subject: str) -> float:
    """Return a date and time as seconds; only differences of them mean something."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        expected = "a date and time such as 2023-11-16 18:17:03.9799600"
        raise ArgumentValueError(f"{subject}: {_HEADER[0]}", expected=expected, got=repr(text)[:80]) from error


def _count(subject: str, name: str, text: str, at_least: int) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    return count_of(subject, name, int(text) if is_number else text, at_least)
