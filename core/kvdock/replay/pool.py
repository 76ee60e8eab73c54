"""One request's way through a `CacheManager`, as a scheduler takes it.

::

    begin    find what is cached of the prompt, and make room for the rest     the request holds its blocks
    extend   make room for its output, where that is held
    commit   its prompt is computed                                            whole blocks of it can be found
    finish   it is over                                                        what is not cached is free again
"""

from __future__ import annotations

import attrs
import numpy as np

from kvdock.errors import ArgumentValueError, OutOfBlocksError
from kvdock.replay.times import OperationTimes
from kvdock.replay.tokens import TokenIds
from kvdock.replay.trace import TraceRequest
from kvdock.scheduler import CacheManager, CacheSequence

__all__ = ["OPERATIONS", "Begun", "ReplayPool"]

OPERATIONS = ("plan", "begin", "extend", "commit", "finish")
"""The calls of the manager that are timed, in the order of a request."""


@attrs.frozen(eq=False)
class Begun:
    """A request that has its blocks.

    Args:
        request: the request.
        sequence: what holds them.
        cached_len: tokens of its prompt that were there.
    """

    request: TraceRequest
    sequence: CacheSequence
    cached_len: int


class ReplayPool:
    """A pool of blocks, and who has them.

    Args:
        manager: an empty one.
        holds_output: whether a request also takes blocks for the tokens that it generates.
    """

    def __init__(self, manager: CacheManager, *, holds_output: bool = False) -> None:
        self.manager = manager
        self.times = OperationTimes(OPERATIONS)
        self._holds_output = holds_output

    def check_fits(self, request: TraceRequest) -> None:
        """Raise ArgumentValueError if a request needs more blocks than the pool has."""
        size, have = self.manager.block_size, self.manager.allocator.num_blocks
        need = -(-(request.input_length + self._output_of(request)) // size)
        if need > have:
            output = f" and {request.output_length} output tokens" if self._holds_output else ""
            raise ArgumentValueError(
                f"trace: line {request.line}",
                expected=f"a request of at most the pool's {have * size} tokens ({have} blocks of {size})",
                got=f"{request.input_length} input tokens{output}, which need {need} blocks",
                fix=f"replay it with a pool of at least {need * size} tokens",
            )

    def begin(self, request: TraceRequest, tokens: TokenIds) -> Begun | None:
        """Let a request find its prefix, and take the blocks that it needs beside that.

        A token that will be generated is looked up with the prompt, and gets no room here: so all of a prompt can be found, and
        not only what is before its last token.

        Returns:
            The request with its blocks; or None if others hold too many, and nothing has changed then.
        """
        call, manager, output = self.times.call, self.manager, self._output_of(request)
        # Any id will do: it stands for the token to be generated, and at least one must be left to compute.
        ids = np.append(tokens, tokens[:1])
        cached_len = call("plan", manager.plan, ids, at_most=0).cached_len
        try:
            seq = call("begin", manager.begin, ids, at_most=tokens.size - cached_len, reserve=output)
        except OutOfBlocksError:
            return None
        if output:
            call("extend", manager.extend, seq, output, match=False)
        return Begun(request, seq, cached_len)

    def store(self, begun: Begun) -> None:
        """Let others find the whole blocks of a prompt, now that all of it is computed."""
        self.times.call("commit", self.manager.commit, begun.sequence, (), computed=begun.request.input_length)

    def finish(self, begun: Begun) -> None:
        """Release what a request holds."""
        self.times.call("finish", self.manager.finish, begun.sequence)

    def close(self) -> None:
        """Prove that free and cached blocks are the pool, and empty the cache.

        Raises:
            IntegrityError: a block is lost, or owned twice.
            ArgumentValueError: a request is not finished.
        """
        self.manager.check_integrity()
        self.manager.reset()

    def _output_of(self, request: TraceRequest) -> int:
        """Return for how many tokens of its output a request holds blocks."""
        return request.output_length if self._holds_output else 0
