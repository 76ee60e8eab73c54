"""Gradients end at a cache."""

from __future__ import annotations

from typing import Any

import torch

from kvdock.errors import UnsupportedError

__all__ = ["refuse_backward"]


class _Detached(torch.autograd.Function):
    """Keys and values out of a pool: the forward pass works, and a backward pass is refused instead of being wrong."""

    @staticmethod
    def forward(ctx: Any, new: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        return read.view_as(read)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        raise UnsupportedError(
            "PagedCacheForTransformers",
            expected="no backward pass",
            got="one through cached keys and values",
            fix="train with use_cache=False; to generate, wrap the forward pass in torch.no_grad()",
        )


def refuse_backward(new: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """Return what was read from a pool, such that a backward pass through it raises.

    Args:
        new: keys or values that went in last; without a graph on them nothing is to be refused.
        read: what the pool returned.
    """
    if not (torch.is_grad_enabled() and new.requires_grad):
        return read
    result: torch.Tensor = _Detached.apply(new, read)  # type: ignore[no-untyped-call]  # torch does not annotate it
    return result
