"""Token ids for the requests of a trace, which says where prefixes are equal but not what they consist of."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvdock.replay.trace import TRACE_BLOCK, TraceRequest

__all__ = ["VOCABULARY", "TokenIds", "TokenMaker"]

TokenIds = npt.NDArray[np.int32]
"""Token ids of one request."""

VOCABULARY = 150_000
"""Token ids are below this, but for the first one of a request that shares nothing."""


class TokenMaker:
    """Makes the token ids of one request at a time: the same ids for the same request, on every machine.

    A block id h stands for `TRACE_BLOCK` pseudo-random ids seeded by h; a prompt is its blocks' ids one after the other, cut to
    its length. A request without block ids gets pseudo-random ids that begin with one of its own, so that it shares not even a
    block of one token with another.

    Args:
        remembered: ids of how many blocks to keep for the next request; each takes 2 KiB.
    """

    def __init__(self, remembered: int = 16_384) -> None:
        self._block = lru_cache(remembered)(_block)

    def tokens(self, request: TraceRequest) -> TokenIds:
        """Return the ids of a prompt, int32 ``[input_length]``; the caller's own array."""
        if request.block_ids is None:
            alone = np.random.default_rng((request.line, 1)).integers(0, VOCABULARY, request.input_length, dtype=np.int32)
            alone[0] = VOCABULARY + request.line
            return alone
        return np.concatenate([self._block(number) for number in request.block_ids])[: request.input_length]


def _block(number: int) -> TokenIds:
    """Return the ids that a block id stands for."""
    return np.random.default_rng(number).integers(0, VOCABULARY, TRACE_BLOCK, dtype=np.int32)
