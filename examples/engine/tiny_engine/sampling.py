"""The next token of each row: the likeliest, or one that is drawn with the request's own random numbers."""

from collections.abc import Sequence

import torch

from tiny_engine.request import Request


def choose(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """Return a token for each row of ``logits`` [rows, vocabulary]."""
    tokens = logits.argmax(-1)
    drawn = [row for row, request in enumerate(requests) if request.temperature > 0]
    if drawn:
        settings = [(request.temperature, request.top_p, request.draw()) for request in requests if request.temperature > 0]
        tokens[drawn] = _draw(logits[drawn].float(), *torch.tensor(settings, device=logits.device)[..., None].unbind(1))
    return tokens.tolist()  # the one time in a step that the host waits for the device


def _draw(logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Return a token of each row; the other arguments are ``[rows, 1]``."""
    likeliest, tokens = torch.softmax(logits / temperature, -1).sort(-1, descending=True)
    kept = likeliest.cumsum(-1) - likeliest < top_p  # while all likelier tokens have less than that
    sums = (likeliest * kept).cumsum(-1)
    # One number decides: its place among the sums. So a row's token does not depend on the other rows.
    place = torch.searchsorted(sums, number * sums[:, -1:], right=True)
    return tokens.gather(1, place.minimum(kept.sum(-1, keepdim=True) - 1))[:, 0]
