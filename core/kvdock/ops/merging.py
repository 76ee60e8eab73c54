"""Putting results of attention to parts of the keys together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["merge_attention"]


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
    _check(parts)
    outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
    total = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - torch.where(total == -torch.inf, 0, total))
    dtype = torch.float64 if outs.dtype == torch.float64 else torch.float32
    seen = torch.where(weights[..., None] == 0, 0, outs.to(dtype) * weights[..., None])  # what has no weight may be anything
    return seen.sum(0).to(outs.dtype), total


def _check(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
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
