"""Small traces, and slow ways to say what replaying one must find."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvdock.replay import Trace, TraceRequest
from kvdock.replay.tokens import TokenMaker

DATA = Path(__file__).parent / "data"
CONVERSATION = DATA / "mooncake_conversation_300.jsonl"
AZURE = DATA / "azure_conv_300.csv"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def row(ids: Sequence[int], *, length: int | None = None, at_ms: float = 0, output: int = 0) -> dict[str, Any]:
    """Return a row of a Mooncake trace, of whole blocks unless a length is given."""
    return {"timestamp": at_ms, "input_length": length or 512 * len(ids), "output_length": output, "hash_ids": list(ids)}


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


def trace_of(*rows: dict[str, Any]) -> Trace:
    """Return a trace as if it had been read."""
    requests = (
        TraceRequest(line, one["timestamp"] / 1000, one["input_length"], one["output_length"], tuple(one["hash_ids"]))
        for line, one in enumerate(rows, 1)
    )
    return Trace("mooncake", tuple(requests))


def endless_hits(trace: Trace, block_size: int) -> int:
    """Return the tokens that a cache without end hits: whole blocks whose prefix, as a tuple of all its ids, was there before."""
    maker, seen, hits = TokenMaker(), set[bytes](), 0
    for request in trace.requests:
        tokens = maker.tokens(request)
        prefixes = [tokens[:end].tobytes() for end in range(block_size, tokens.size + 1, block_size)]
        hits += block_size * sum(prefix in seen for prefix in prefixes)
        seen.update(prefixes)
    return hits
