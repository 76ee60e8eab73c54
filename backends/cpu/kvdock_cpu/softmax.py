"""Weights of scores, and how what two sets of keys give is joined."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Weigh", "join", "softmax", "softmax_with_lse"]

Weigh = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Turns scores ``[heads, rows, keys]`` into weights that sum to 1, and the logarithms of their sums before."""


def softmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights, in fewer passes than `softmax_with_lse`, and nothing to join them by."""
    return torch.softmax(scores, 2), scores


def softmax_with_lse(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights, which take the place of the scores, and the logarithms of their sums: -inf where no score is more, and no weights."""
    highest = scores.amax(2, keepdim=True)
    highest.masked_fill_(highest == -torch.inf, 0)  # of -inf and -inf there is no difference
    weights = scores.sub_(highest).exp_()
    total = weights.sum(2, keepdim=True)
    weights.div_(total.clamp(min=torch.finfo(total.dtype).tiny))
    return weights, highest.add_(total.log_()).squeeze(2)


def join(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what two sets of keys give together; changes the first result."""
    lse = torch.logaddexp(one[1], other[1])
    level = lse.masked_fill(lse == -torch.inf, 0)
    weights = [(part[1] - level).exp_().unsqueeze(2) for part in (one, other)]
    return one[0].mul_(weights[0]).addcmul_(other[0], weights[1]), lse
