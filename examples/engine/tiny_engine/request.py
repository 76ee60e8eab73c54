"""A request: what is asked, how far it is, and to whom each new token goes at once (streaming)."""

from collections.abc import Callable

import attrs
import torch

from kvdock.scheduler import CacheSequence


@attrs.define(eq=False)
class Request:
    """A prompt and what becomes of it. The engine's thread has it from `Engine.add` until ``emit(None)``."""

    tokens: list[int] = attrs.field(converter=list)  # ids of the prompt; new ones are appended
    max_tokens: int = 16
    temperature: float = 0.0  # 0 takes the likeliest token, others draw
    top_p: float = 1.0  # draws from the likeliest tokens that have this much of the probability together
    seed: int | None = None  # of what is drawn, whatever else is in the batch; None for another each time
    stop: frozenset[int] = frozenset()  # ids that end it
    emit: Callable[[int | None], None] = lambda token: None  # called with each new token, and with None at the end
    finish_reason: str = attrs.field(default="", init=False)  # "stop", "length", "cancelled" or "error"
    error: str = attrs.field(default="", init=False)
    cached_tokens: int = attrs.field(default=0, init=False)  # of the prompt, found when it first began
    preemptions: int = attrs.field(default=0, init=False)
    prompt_len: int = attrs.field(default=attrs.Factory(lambda self: len(self.tokens), takes_self=True), init=False)
    sequence: CacheSequence | None = attrs.field(default=None, init=False)  # its blocks, while it runs
    computed: int = attrs.field(default=0, init=False)  # tokens whose keys and values are in the cache
    count: int = attrs.field(default=0, init=False)  # tokens behind those that this step computes
    _random: torch.Generator | None = attrs.field(default=None, init=False)

    @property
    def missing(self) -> int:
        """Tokens to compute before the next can be chosen: 1 while it decodes."""
        return len(self.tokens) - self.computed

    @property
    def most_tokens(self) -> int:
        """Tokens that ever need room: the last that is generated does not."""
        return self.prompt_len + self.max_tokens - 1

    def draw(self) -> float:
        """Return its next random number, from 0 to 1."""
        if self._random is None:
            self._random = torch.Generator().manual_seed(torch.Generator().seed() if self.seed is None else self.seed)
        return float(torch.rand((), generator=self._random))

    def take(self, token: int) -> str:
        """Append a token; return why it is over, or an empty text."""
        self.tokens.append(token)
        self.emit(token)
        return "stop" if token in self.stop else "length" if len(self.tokens) > self.most_tokens else ""

    def end(self, reason: str, error: str = "") -> None:
        """Say that it is over."""
        self.finish_reason, self.error = reason, error
        self.emit(None)
