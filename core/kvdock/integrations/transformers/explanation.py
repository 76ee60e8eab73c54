"""How a cache's attention gets keys and values, and why: for its ``repr``, for `kvdock explain` and for programs."""

from __future__ import annotations

import attrs

from kvdock.integrations.transformers.state import PagedState

__all__ = ["CacheExplanation", "explained"]


@attrs.frozen
class CacheExplanation:
    """How a cache's attention gets keys and values; as text, what the cache's ``repr`` says.

    Args:
        attention: ``"pages"``, where they lie, or ``"gather"``.
        reason: why all layers gather, or "".
        layers: for each layer that stores any, why it gathers; "" where it reads pages.
        last_pass: why the last pass gathered in a cache that reads pages, or "".
        states: how many layers keep states, which are beside the pool.
    """

    attention: str
    reason: str
    layers: tuple[str, ...]
    last_pass: str = ""
    states: int = 0

    def __str__(self) -> str:
        return self._read() + (f", and states of {self.states} layers" if self.states else "")

    def _read(self) -> str:
        if self.reason:
            return f"{self.attention} ({self.reason})"
        gathering = [index for index, reason in enumerate(self.layers) if reason]
        some = f" (but layers {gathering}: {self.layers[gathering[0]]})" if gathering else ""
        return self.attention + some + (f" (not in the last pass: {self.last_pass})" if self.last_pass else "")


def explained(state: PagedState) -> CacheExplanation:
    """Return how the attention of a cache with this state gets keys and values."""
    reader, states = state.reader, len(state.states)
    if reader.why:
        return CacheExplanation("gather", reader.why, (reader.why,) * state.pool.num_layers, states=states)
    return CacheExplanation("pages", "", reader.problems, state.odd, states)
