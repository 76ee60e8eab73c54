"""`paged_attention` as data: what it takes, which queries see which keys, what its index values must be, and how results are merged.

A sequence has ``seq_lens[b]`` tokens in the cache, its queries' own keys included: its queries are its last tokens. So query ``i`` of
``n`` stands at position ``seq_lens[b] - n + i``. It sees the keys from `visible`'s first to its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError, IndexRangeError
from kvdock.interface import HOST
from kvdock.ops.schema import Arg, OpSchema, Relation, Role
from kvdock.spec import QUANTISED_DTYPES

__all__ = ["FAR", "PAGED_ATTENTION", "check_paged_attention", "merge_attention", "query_rows", "visible"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INDICES = (torch.int32, torch.int64)

FAR = 1 << 62
"""A window that leaves nothing behind, and has room in 64 bits beside a position."""


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= torch.finfo(torch.float32).max


def _expect_scale(value: Any) -> str:
    return "" if value is None or _number(value) else "a finite number that float32 has room for, or None for the square root of 1 / Dk"


def _expect_bool(value: Any) -> str:
    return "" if isinstance(value, bool) else "True or False"


def _expect_window(value: Any) -> str:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return "" if value is None or (is_int and value > 0) else "an int of at least 1 key, or None for all"


def _expect_softcap(value: Any) -> str:
    is_cap = value is None or (_number(value) and value >= torch.finfo(torch.float32).tiny)
    return "" if is_cap else "a finite number above 0 that float32 has room for, or None for no cap"


def check_paged_attention(args: Mapping[str, Any]) -> list[str]:
    """Raise on index values that are out of range; nothing about them is doubtful. All lie in host memory.

    Raises:
        IndexRangeError: names the first argument and place.
    """
    table, lens, cu, starts = (_values(args[name]) for name in ("block_table", "seq_lens", "cu_query_lens", "starts"))
    num_blocks, block = args["k_cache"].shape[:2]
    room = table.shape[1] * block
    _raise_first("seq_lens", lens, (lens < 0) | (lens > room), f"between 0 and {room}, for which block_table has room")
    counts = _query_counts(cu, args["q"].shape[0], args["max_query_len"], lens)
    _raise_first("seq_lens", lens, (lens < counts) & (lens > 0), "0 for padding, or at least the number of queries of the sequence")
    first = np.zeros_like(lens)
    if starts is not None:
        _raise_first("starts", starts, (starts < 0) | (starts > lens), "between 0 and the length of the sequence")
        first = starts.astype(np.int64)
    if args["window"] is not None:
        first = np.maximum(first, lens - counts - min(args["window"], FAR) + 1)
    columns = np.arange(table.shape[1])
    used = (columns >= (first // block)[:, None]) & (columns < ((lens + block - 1) // block)[:, None])
    bad = used & ((table < 0) | (table >= num_blocks))
    _raise_first("block_table", table, bad, f"a block id between 0 and {num_blocks - 1} wherever a query looks")
    return []


def _values(tensor: torch.Tensor | None) -> Any:
    """Return index values as numpy sees them, which costs a third of the same in torch; lengths and sums do not overflow."""
    if tensor is None:
        return None
    values = tensor.detach().numpy()
    return values if values.ndim == 2 else values.astype(np.int64)


def _query_counts(cu: Any, queries: int, most: int, lens: Any) -> Any:
    if cu is None:
        return 1
    counts = np.diff(cu)
    expected = f"sums of query counts, from 0 to the {queries} queries of q, none below the one before"
    wrong = np.concatenate([cu[:1] != 0, counts < 0])
    wrong[-1] |= cu[-1] != queries
    _raise_first("cu_query_lens", cu, wrong, expected)
    _raise_first("cu_query_lens", cu, np.concatenate([[False], counts > most]), f"at most max_query_len={most} more each")
    return counts


def _raise_first(name: str, values: Any, wrong: Any, expected: str) -> None:
    if wrong.any():
        place = np.argwhere(wrong)[0].tolist()
        got = int(values[tuple(place)])
        fix = "pass what the scheduler's BatchTables hold for this step, and a table of this pool's blocks"
        raise IndexRangeError(f"paged_attention: {name}{place}", expected=expected, got=got, fix=fix)


def query_rows(cu: torch.Tensor | None, queries: int, batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequence of each query, ``[N]``, and how many queries of its sequence come behind it. B stands for no sequence."""
    places = torch.arange(queries, device=device)
    if cu is None:
        return places, torch.zeros_like(places)
    ends = cu[1:].to(torch.int64).contiguous()
    rows = torch.searchsorted(ends, places, right=True)
    return rows, ends[rows.clamp(max=batch - 1)] - 1 - places


def visible(
    lens: torch.Tensor, behind: torch.Tensor, starts: torch.Tensor | None, *, causal: bool, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first key that each query sees, and the end of those, ``[N]`` int64.

    Args:
        lens: length of each query's sequence, ``[N]`` int64.
        behind: how many queries of its sequence come behind it.
        starts: first key of its sequence that may be seen.
        causal: whether a query sees none behind its own.
        window: how many keys it sees at most, its own the last of them; keys behind its own, where it sees such, do not count.
    """
    position = lens - 1 - behind
    first = torch.zeros_like(lens) if starts is None else starts.clamp(min=0)
    if window is not None:
        first = torch.maximum(first, position - window + 1)
    return first, (torch.minimum(position + 1, lens) if causal else lens)


def _see_nothing(args: dict[str, Any]) -> None:
    """Fill the outputs of a call without sequences, blocks of any, or queries."""
    if args["q"].device == HOST:
        check_paged_attention(args)
    args["out"].zero_()
    if args["lse"] is not None:
        args["lse"].fill_(-torch.inf) if args["sinks"] is None else args["lse"].copy_(args["sinks"])


PAGED_ATTENTION = OpSchema(
    "paged_attention",
    (
        Arg("q", Role.TENSOR, ("*N Hq Dk",), _DTYPES, same_dtype="k_cache"),
        Arg("k_cache", Role.TENSOR, ("NB block Hk Dk",), (*_DTYPES, *QUANTISED_DTYPES)),
        Arg("v_cache", Role.TENSOR, ("NB block Hk Dv",), (*_DTYPES, *QUANTISED_DTYPES), same_dtype="k_cache"),
        Arg("block_table", Role.TENSOR, ("*B *W",), (torch.int32,)),
        Arg("seq_lens", Role.TENSOR, ("*B",), _INDICES),
        Arg("cu_query_lens", Role.TENSOR, ("*C",), _INDICES, optional=True),
        Arg("starts", Role.TENSOR, ("*B",), _INDICES, optional=True),
        Arg("sinks", Role.TENSOR, ("Hq",), _DTYPES, optional=True),
        Arg("k_scale", Role.TENSOR, ("", "Hk"), (torch.float32,), optional=True, host=True, scale_of="k_cache"),
        Arg("v_scale", Role.TENSOR, ("", "Hk"), (torch.float32,), optional=True, host=True, scale_of="v_cache"),
        Arg("max_query_len", Role.RUNTIME_INT, default=1),
        Arg("scale", Role.STATIC, expects=_expect_scale),
        Arg("causal", Role.STATIC, default=True, expects=_expect_bool),
        Arg("window", Role.STATIC, expects=_expect_window),
        Arg("softcap", Role.STATIC, expects=_expect_softcap),
        Arg("out", Role.MUTATED, ("*N Hq Dv",), _DTYPES, same_dtype="q", returned=True),
        Arg("lse", Role.MUTATED, ("*N Hq",), (torch.float32,), optional=True),
    ),
    (
        Relation("Hq % Hk == 0", "q", "a multiple of the {Hk} heads of k_cache", "pass all query heads of the same rank as the cache"),
        Relation("C == B + 1", "cu_query_lens", "one number more than the {B} rows of block_table", "begin it with 0"),
        Relation(
            "N == B",
            "q",
            "one query for each of the {B} rows of block_table, since there is no cu_query_lens",
            "pass cu_query_lens, the sums of how many queries each sequence has",
            without="cu_query_lens",
        ),
    ),
    check_values=check_paged_attention,
    when_empty=_see_nothing,
)


def merge_attention(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what attention to all keys would, given attention to parts of them that have no key in common.

    So a prefix that many sequences share is read once, and ranks hold a part of a long context each. Logits of sinks belong into one
    part only. In float32, or float64 for such results; a row that saw no key in any part is zeros and -inf.

    Args:
        parts: ``(out, lse)`` of each, as `paged_attention` returns them with ``return_lse``: ``[N, Hq, Dv]`` and ``[N, Hq]`` float32.

    Returns:
        ``(out, lse)`` of all, new tensors in the dtypes of the parts.

    Raises:
        ArgumentTypeError: the parts are no sequence of pairs of tensors.
        ArgumentValueError: there is none, or their dtypes, shapes or devices do not agree.
    """
    _check_parts(parts)
    outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
    total = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - torch.where(total == -torch.inf, 0, total))
    dtype = torch.float64 if outs.dtype == torch.float64 else torch.float32
    seen = torch.where(weights[..., None] == 0, 0, outs.to(dtype) * weights[..., None])  # what has no weight may be anything
    return seen.sum(0).to(outs.dtype), total


def _check_parts(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    fix = "pass what paged_attention returned with return_lse=True, for each part"
    for place, part in enumerate(parts if isinstance(parts, Sequence) else [parts]):
        if not (isinstance(part, (tuple, list)) and len(part) == 2 and all(isinstance(one, torch.Tensor) for one in part)):
            subject, expected = f"merge_attention: parts[{place}]", "two tensors, (out, lse)"
            raise ArgumentTypeError(subject, expected=expected, got=type(part).__name__, fix=fix)
        for name, one, like in (("out", part[0], parts[0][0]), ("lse", part[1], parts[0][1])):
            if one.dtype != like.dtype or one.shape != like.shape or one.device != like.device:
                subject, got = f"merge_attention: parts[{place}]: {name}", f"{one.dtype} {list(one.shape)} on {one.device}"
                expected = f"{like.dtype} {list(like.shape)} on {like.device}, as of the first part"
                raise ArgumentValueError(subject, expected=expected, got=got, fix=fix)
    if not len(parts) or parts[0][0].shape[:-1] != parts[0][1].shape:
        got = "none" if not len(parts) else f"{list(parts[0][0].shape)} and {list(parts[0][1].shape)}"
        raise ArgumentValueError("merge_attention: parts", expected="[N, Hq, Dv] and [N, Hq] at least once", got=got, fix=fix)
