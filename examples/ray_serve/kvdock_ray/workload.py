"""Conversations that come at the same time: each question follows the whole of what was said before it."""

import asyncio
import random
import time
from collections import Counter
from pydoc_data.topics import topics
from typing import Any

import attrs
from tiny_engine.request import Request

from kvdock_ray.client import Replicas

QUESTIONS = ("What is this text about?", "Explain it to a child.", "Give one example.", "Say it in one sentence.")
WORDS, LONGEST, THINKS, SECONDS = 90, 16, 3.0, 300  # of each text; tokens of an answer; seconds before a question; that an answer may take
TEXTS = [" ".join(words[:WORDS]) for words in map(str.split, topics.values()) if len(words) >= WORDS]
SAYS = "<|im_start|>{}\n{}<|im_end|>\n".format


@attrs.define
class Talk:
    """What was said, and what it took."""

    tokens: dict[tuple[int, int], list[int]] = attrs.Factory(dict)  # of each answer, its prompt included
    prompts: int = 0  # tokens of all prompts
    found: int = 0  # of these, tokens that were cached
    findable: int = 0  # that would have been, had each conversation stayed where it began
    replicas: Counter[str] = attrs.Factory(Counter)  # requests that each answered
    seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        """The share of the prompts' tokens that was cached."""
        return self.found / self.prompts

    def row(self) -> list[str]:
        """Return it as texts, for a table."""
        each = ", ".join(map(str, sorted(self.replicas.values())))
        return [f"{self.prompts:,}", f"{self.findable:,}", f"{self.found:,}", f"{self.hit_rate:.3f}", each, f"{self.seconds:.0f} s"]


class Conversations:
    """So many conversations, each about a text of its own.

    Args:
        handle: of the deployment `Replica`.
        tokenizer: of a model that was trained on ``<|im_start|>`` and ``<|im_end|>``.
        count: conversations, at the same time; at most as many as there are `TEXTS`.
        block_size: of the engines.
    """

    def __init__(self, handle: Any, tokenizer: Any, count: int, block_size: int = 16) -> None:
        self.handle, self.tokenizer, self.count, self.block_size = handle, tokenizer, count, block_size

    def run(self) -> Talk:
        """Have all of them."""
        return asyncio.run(self._all())

    async def _all(self) -> Talk:
        talk, replicas, start = Talk(), Replicas(self.handle, 0), time.perf_counter()
        await asyncio.gather(*(self._one(number, replicas, talk) for number in range(self.count)))
        talk.seconds = time.perf_counter() - start
        return talk

    async def _one(self, number: int, replicas: Replicas, talk: Talk) -> None:
        draw = random.Random(number)  # noqa: S311 - no secret: the same pauses each time
        said, before = self._ids(SAYS("system", "Answer briefly.") + SAYS("user", f"{TEXTS[number]}\n\n{QUESTIONS[0]}")), 0
        stop = frozenset({self.tokenizer.eos_token_id})
        for turn, question in enumerate([*QUESTIONS[1:], ""]):
            await asyncio.sleep(draw.uniform(0, THINKS))
            request = Request(said + self._ids("<|im_start|>assistant\n"), draw.randint(LONGEST // 2, LONGEST), stop=stop)
            name = await asyncio.wait_for(replicas.answer(request), SECONDS)
            if request.error:
                raise RuntimeError(request.error)
            talk.tokens[number, turn] = request.tokens
            talk.prompts += request.prompt_len
            talk.found += request.cached_tokens
            talk.findable += before // self.block_size * self.block_size
            talk.replicas[name] += 1
            before = len(request.tokens) - 1  # the last one was not computed
            answered = request.tokens[: len(request.tokens) - (request.finish_reason == "stop")]
            said = answered + self._ids("<|im_end|>\n" + SAYS("user", question))

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])
