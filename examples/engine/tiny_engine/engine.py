"""The engine: a step computes what is due of every request that runs, and hands out new tokens.

A step in which all decode is one captured call: a graph on devices that have graphs, see `kvdock.captured`. One with parts of
prompts in it launches its kernels one by one.
"""

from collections.abc import Sequence
from typing import Any

import torch

import kvdock
from kvdock.captured import CapturedSteps
from kvdock.scheduler import BatchTables
from tiny_engine.batching import Batcher
from tiny_engine.model import Decoder
from tiny_engine.request import Request
from tiny_engine.sampling import choose


class Engine:
    """Answers requests with a Transformers model, on the model's device. Belongs to the thread that uses it first.

    Args:
        model: see `Decoder`.
        num_blocks: blocks of the pool, of ``block_size`` tokens; block 0 stays empty.
        batch_sizes: sizes that decoding is captured for; the largest is how many requests run at a time.
        max_tokens: most tokens of a step: a longer prompt is computed in chunks.
    """

    def __init__(
        self, model: Any, num_blocks: int, block_size: int = 16, batch_sizes: Sequence[int] = (1, 2, 4, 8, 16), max_tokens: int = 512
    ) -> None:
        self.decoder = Decoder(model, kvdock.PagedKVCacheConfig(num_blocks=num_blocks, block_size=block_size, keep_all=True))
        self.manager = kvdock.CacheManager(num_blocks, block_size, null_block=True)
        self.batcher = Batcher(self.manager, max(batch_sizes), max(max_tokens, *batch_sizes))
        self.max_context = min((num_blocks - 1) * block_size, self.decoder.max_positions)
        width, device = -(-self.max_context // block_size), self.decoder.cache.device
        self.tables = BatchTables(self.manager, max(batch_sizes), width, max_tokens=self.batcher.max_tokens, device=device)
        self.captured = CapturedSteps(self.decoder, self.tables, batch_sizes=batch_sizes)

    @property
    def is_busy(self) -> bool:
        """Whether there is something to do."""
        return bool(self.batcher.waiting or self.batcher.running)

    def add(self, request: Request) -> None:
        """Take a request. One that cannot be served ends at once, and says why; others are not affected."""
        if error := self._refusal(request):
            request.end("error", error)
        elif request.max_tokens <= 0:
            request.end("length")
        else:
            self.batcher.waiting.append(request)

    def _refusal(self, request: Request) -> str:
        if not request.tokens:
            return "the prompt is empty: there is nothing to go on from"
        if min(request.tokens) < 0 or max(request.tokens) >= len(self.decoder.embedding):
            return f"the prompt has ids of {min(request.tokens)} to {max(request.tokens)}; the model has {len(self.decoder.embedding)}"
        if not (0 <= request.temperature < float("inf") and 0 < request.top_p <= 1):
            return f"temperature is {request.temperature} and top_p {request.top_p}; expected at least 0, and above 0 to 1"
        if request.most_tokens > self.max_context:
            asked = f"the prompt has {request.prompt_len} tokens, and {request.max_tokens} new ones are asked for"
            return f"{asked}; pool and model hold {self.max_context}. Fix: a shorter prompt, or fewer new tokens"
        return ""

    def cancel(self, request: Request, reason: str = "cancelled", error: str = "") -> None:
        """End a request, wherever it is, and release its blocks; one that is over stays as it is."""
        if not request.finish_reason:
            self.batcher.leave(request)
            request.end(reason, error)

    def step(self) -> None:
        """Compute what is due, and hand out the tokens that follow from it."""
        batch = self.batcher.schedule()
        if not batch:
            return
        logits = self._logits(batch)
        for request in batch:
            request.computed += request.count
        ready = [row for row, request in enumerate(batch) if not request.missing]  # the others have more of a prompt to compute
        tokens = choose(logits if len(ready) == len(batch) else logits[ready], [batch[row] for row in ready])
        new = dict(zip(ready, tokens, strict=True))
        ids = [[new[row]] if row in new else [] for row in range(len(batch))]
        # From here on, whole blocks of what was computed can be found by other prompts.
        self.manager.commit([request.sequence for request in batch], ids, computed=[request.computed for request in batch])
        for row, token in new.items():
            if reason := batch[row].take(token):
                self.batcher.leave(batch[row])
                batch[row].end(reason)

    def _logits(self, batch: list[Request]) -> torch.Tensor:
        """Run the model, and return the logits behind each one's last token, ``[rows, vocabulary]``."""
        sequences, counts = [request.sequence for request in batch], [request.count for request in batch]
        tokens = [token for request in batch for token in request.tokens[request.computed : request.computed + request.count]]
        if len(tokens) == len(batch):
            return self.captured.run(sequences, tokens)
        self.tables.update(sequences, counts)
        on_device = self.tables.staged(torch.tensor(tokens)).to(self.decoder.cache.device, non_blocking=True)
        return self.decoder(self.tables.first(len(batch), len(tokens)), on_device, max(counts))
