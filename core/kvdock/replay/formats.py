"""Reading a trace file, in whichever format its first line shows. A new format is a new class, and an entry in `FORMATS`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from kvdock.errors import ArgumentValueError
from kvdock.replay.azure import AzureFormat
from kvdock.replay.mooncake import MooncakeFormat
from kvdock.replay.trace import Trace, TraceFormat, TraceRequest

__all__ = ["FORMATS", "read_trace"]

FORMATS: Sequence[TraceFormat] = (MooncakeFormat(), AzureFormat())
"""The formats that are recognised."""


def read_trace(path: str | os.PathLike[str], *, limit: int | None = None, formats: Sequence[TraceFormat] = FORMATS) -> Trace:
    """Read a trace file. Empty lines are skipped.

    Args:
        path: the file; UTF-8.
        limit: how many requests to read; None for all. What follows is not looked at.
        formats: the formats to look for.

    Raises:
        ArgumentValueError: no such file, or not one that can be read; no format recognises it; a line is broken, or earlier
            than the one before; there is no request.
    """
    name = os.fspath(path)
    try:
        with Path(path).open(encoding="utf-8") as file:
            lines = ((number, text) for number, text in enumerate(file, 1) if text.strip())
            first = next(lines, None)
            if first is None:
                raise ArgumentValueError(name, expected="a trace", got="an empty file", fix=_known(formats))
            return _read(name, first, lines, limit, formats)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ArgumentValueError(
            "trace", expected="a text file that can be read", got=f"{name!r} ({reason})", fix="pass the path of a trace file"
        ) from error


def _read(name: str, first: tuple[int, str], rest: Iterator[tuple[int, str]], limit: int | None, formats: Sequence[TraceFormat]) -> Trace:
    fits = next((one for one in formats if one.recognises(first[1])), None)
    if fits is None:
        raise ArgumentValueError(
            f"{name}: line {first[0]}", expected="the beginning of a trace", got=repr(first[1].strip())[:80], fix=_known(formats)
        )
    requests: list[TraceRequest] = []
    for number, text in _bodies(first, rest, fits.header_lines):
        if len(requests) == limit:
            break
        requests.append(_checked(fits.parse(text, number, f"{name}: line {number}"), requests, name))
    if not requests:
        raise ArgumentValueError(name, expected="at least one request", got="none", fix="pass a trace with rows, and a --limit above 0")
    start = requests[0].arrival_s
    return Trace(fits.name, tuple(attrs.evolve(request, arrival_s=request.arrival_s - start) for request in requests))


def _bodies(first: tuple[int, str], rest: Iterator[tuple[int, str]], header_lines: int) -> Iterator[tuple[int, str]]:
    """Yield the lines behind the header, with their numbers."""
    for skipped, line in enumerate(_chain(first, rest)):
        if skipped >= header_lines:
            yield line


def _chain(first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _checked(request: TraceRequest, before: Sequence[TraceRequest], name: str) -> TraceRequest:
    """Return a request that does not come before the one above it."""
    if before and request.arrival_s < before[-1].arrival_s:
        raise ArgumentValueError(
            f"{name}: line {request.line}: time",
            expected=f"none before that of line {before[-1].line}",
            got=f"{before[-1].arrival_s - request.arrival_s:.6g} s before it",
            fix="sort the trace by time",
        )
    return request


def _known(formats: Sequence[TraceFormat]) -> str:
    return "pass a file that begins with " + ", or with ".join(f"{one.looks_like} ({one.name})" for one in formats)
