"""Who runs in a step, and how many tokens of each: continuous batching, chunked prefill, prefix reuse, preemption.

A step has room for ``max_tokens`` tokens. Each request that decodes gets one, prompts share the rest, in chunks. A prompt begins behind
what others computed of it. When blocks run out, who came last gives its own back, and begins again behind what is still cached.
"""

from collections import deque

import kvdock
from tiny_engine.request import Request


class Batcher:
    """Requests that wait and requests that run, at most ``max_batch``, and their blocks."""

    def __init__(self, manager: kvdock.CacheManager, max_batch: int, max_tokens: int) -> None:
        self.manager, self.max_batch, self.max_tokens = manager, max_batch, max_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order in which they came

    def schedule(self) -> list[Request]:
        """Return who is in the next step, each with a ``count`` of tokens and room for them."""
        batch, left = [], self.max_tokens
        for request in sorted(self.running, key=lambda request: request.missing > 1):  # who decodes comes first
            request.count = min(request.missing, left)
            left -= request.count
            batch += [request] * (request.count > 0)
        if self._make_room(batch):
            while left and self.waiting and len(self.running) < self.max_batch and self._begin(self.waiting[0], left):
                self.running.append(self.waiting.popleft())
                batch.append(self.running[-1])
                left -= batch[-1].count
        return batch

    def leave(self, request: Request) -> None:
        """Take a request out, and release its blocks; what it has computed can still be found."""
        if request in self.running:
            self.running.remove(request)
            self.manager.finish(request.sequence)
            request.sequence, request.computed = None, 0
        elif request in self.waiting:
            self.waiting.remove(request)

    def _make_room(self, batch: list[Request]) -> bool:
        """Make room for the step, and return whether there was enough: otherwise those who came last have had to go."""
        running = len(self.running)
        while True:
            try:  # nobody forks here, so no block has to be copied before it is written
                self.manager.extend([request.sequence for request in batch], [request.count for request in batch])
                break
            except kvdock.OutOfBlocksError:  # nothing was changed
                last = self.running[-1]
                self.leave(last)
                self.waiting.appendleft(last)
                last.preemptions += 1
                batch[:] = [request for request in batch if request is not last]
        for request in batch:
            if request.missing > 1:  # of a prompt, others may have computed more meanwhile
                request.computed = request.sequence.computed
                request.count = request.sequence.num_tokens - request.computed
        return len(self.running) == running

    def _begin(self, request: Request, left: int) -> bool:
        """Take blocks for a first chunk, and have the rest of the prompt and a block more promised; not if there is no room."""
        tokens, size = request.tokens, self.manager.block_size
        chunk_end = min(len(tokens), self.manager.plan(tokens).cached_len + left)
        reserve = min(len(tokens) + size, request.most_tokens) - chunk_end  # else prompts would drive each other out
        try:
            request.sequence = self.manager.begin(tokens, at_most=left, reserve=reserve)
        except kvdock.OutOfBlocksError:
            return False
        request.computed = request.sequence.cached_len
        request.count = request.sequence.num_tokens - request.computed
        request.cached_tokens += request.computed * (not request.preemptions)
        return True
