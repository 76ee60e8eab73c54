"""What a trace is, and what a format of trace files has to say: the contract of one small class per format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import attrs

from kvdock.errors import ArgumentValueError

__all__ = ["TRACE_BLOCK", "Trace", "TraceFormat", "TraceRequest", "count_of"]

TRACE_BLOCK = 512
"""Tokens that one of a request's ``block_ids`` stands for; the last one may stand for fewer."""


@attrs.frozen
class TraceRequest:
    """One request of a trace.

    Args:
        line: where it is in its file, from 1.
        arrival_s: when it came, in seconds; `read_trace` lets the first request come at 0.
        input_length: tokens of the prompt, at least 1.
        output_length: tokens that were generated, at least 0.
        block_ids: what the prompt consists of: an id for each `TRACE_BLOCK` tokens, equal where whole prefixes are equal. None
            where the trace does not say; such a request shares nothing.
    """

    line: int
    arrival_s: float
    input_length: int
    output_length: int
    block_ids: tuple[int, ...] | None


@attrs.frozen(slots=False)
class Trace:
    """The requests of a file, in its order.

    Args:
        format: name of the format.
        requests: at least one.
    """

    format: str
    requests: Sequence[TraceRequest]

    @cached_property
    def input_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.input_length for request in self.requests)

    @cached_property
    def output_tokens(self) -> int:
        """Tokens that were generated, by all requests."""
        return sum(request.output_length for request in self.requests)


class TraceFormat(ABC):
    """A format of trace files: text, with one request in each line.

    Attributes:
        name: what to call it.
        looks_like: how its first line begins, for people whose file is not recognised.
        header_lines: lines before the first request.
    """

    name: str
    looks_like: str
    header_lines: int

    @abstractmethod
    def recognises(self, first: str) -> bool:
        """Say whether a file whose first line is ``first`` has this format. No other format may say so too."""

    @abstractmethod
    def parse(self, text: str, line: int, subject: str) -> TraceRequest:
        """Read one line.

        Args:
            text: the line.
            line: its number.
            subject: what to call it in an error: file and line.

        Returns:
            The request, with ``arrival_s`` on whatever clock the file uses.

        Raises:
            ArgumentValueError: the line is broken; the text says what was expected there.
        """


def count_of(subject: str, name: str, value: object, at_least: int) -> int:
    """Return a field that has to be an int of at least ``at_least``; raises ArgumentValueError for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ArgumentValueError(f"{subject}: {name}", expected=f"an integer of at least {at_least}", got=repr(value)[:80])
    return value
