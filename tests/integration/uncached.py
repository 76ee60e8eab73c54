"""What a model gives without any cache: the whole text is computed anew for each token, by a copy that no other call has touched."""

from __future__ import annotations

import copy
from typing import Any

import torch

from integration import zoo
from integration.prefixes import CLOSE

Inputs = dict[str, torch.Tensor]


class Uncached:
    """A copy of a model, made before anything is run through it, and never given a cache.

    Args:
        model: a new model.
        first: the position of a prompt's first token.
    """

    def __init__(self, model: Any, first: int = 0) -> None:
        self.model = copy.deepcopy(model)
        self.first = first

    def logits(self, ids: torch.Tensor, mask: torch.Tensor | None = None, **told: Any) -> torch.Tensor:
        """Return logits of all tokens, ``[rows, tokens, vocabulary]``."""
        mask = torch.ones_like(ids) if mask is None else mask
        positions = (mask.cumsum(dim=-1) - 1).clamp(min=0) + self.first
        with torch.no_grad():
            fresh = copy.deepcopy(self.model)  # what a pass leaves behind is gone with it
            logits: torch.Tensor = fresh(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, **told).logits
        return logits

    def generate(self, inputs: Inputs, tokens: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Generate greedily, without ever ending a sequence; return the sequences and the logits of each new token."""
        ids, mask, steps = inputs["input_ids"], inputs["attention_mask"], []
        for _ in range(tokens):
            steps.append(self.logits(ids, mask)[:, -1])
            ids = torch.cat([ids, steps[-1][:, : zoo.VOCAB - 1].argmax(dim=-1, keepdim=True)], dim=1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        return ids, steps

    def assert_same(self, inputs: Inputs, got: Any) -> None:
        """Compare what ``generate`` returned, with logits: tokens exactly, logits closely."""
        ids, steps = self.generate(inputs, len(got.logits))
        assert torch.equal(ids, got.sequences)
        for expected, logits in zip(steps, got.logits, strict=True):
            torch.testing.assert_close(logits, expected, **CLOSE)
