"""What a prompt finds and needs, before anything is taken for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentValueError, OutOfBlocksError
from kvdock.prefix.inputs import as_integers, count_of
from kvdock.prefix.interface import Namespace, PartialMatch, PrefixHandle, PrefixMatch
from kvdock.scheduler.pool_blocks import PoolBlocks

__all__ = ["Fit", "Needs", "Planner", "Prompt"]


class Fit(NamedTuple):
    """What `CacheManager.plan` foresees.

    Args:
        cached_len: tokens that need not be computed.
        new_blocks: blocks that `CacheManager.begin` would take, and promise with ``reserve``.
        fits: whether it would get them now.
    """

    cached_len: int
    new_blocks: int
    fits: bool


@attrs.frozen(eq=False)
class Prompt:
    """A prompt as `CacheManager.begin` takes it; its arguments say what each part is.

    Args:
        ids: its token ids, at least one.
        namespace: where it is looked up.
        reserve: tokens to come.
        at_most: tokens behind the cached ones to make room for.
        max_cached_len: cached tokens to use.
        matches_again: whether it is matched again for each chunk: ``at_most`` was named, and no limit to what is cached.
        is_chunked: whether ``at_most`` was named.
    """

    ids: npt.NDArray[Any]
    namespace: Namespace
    reserve: int
    at_most: int
    max_cached_len: int
    matches_again: bool
    is_chunked: bool

    @classmethod
    def read(
        cls,
        subject: str,
        tokens: npt.ArrayLike,
        namespace: Namespace,
        *,
        reserve: int,
        at_most: int | None,
        max_cached_len: int | None = None,
    ) -> Prompt:
        """Check what a caller passed to ``subject``."""
        ids = as_integers(f"{subject}: tokens", tokens)
        if not ids.size:
            fix = "refuse an empty request, or open_empty() a sequence whose ids come later"
            raise ArgumentValueError(f"{subject}: tokens", expected="at least one token", got="none", fix=fix)
        return cls(
            ids,
            namespace,
            count_of(f"{subject}: reserve", reserve),
            ids.size if at_most is None else count_of(f"{subject}: at_most", at_most),
            ids.size if max_cached_len is None else count_of(f"{subject}: max_cached_len", max_cached_len),
            at_most is not None and max_cached_len is None,
            at_most is not None,
        )


class Needs(NamedTuple):
    """What a prompt finds and needs.

    Args:
        match: what is cached of it; more than is used, where that is limited.
        partial: a block behind that whose first tokens are used.
        cached_len: tokens that need not be computed.
        num_tokens: tokens to make room for, the cached ones included.
        new: blocks to take.
        promised: blocks to promise.
    """

    match: PrefixMatch
    partial: PartialMatch | None
    cached_len: int
    num_tokens: int
    new: int
    promised: int

    @property
    def handle(self) -> PrefixHandle:
        """What must be locked while blocks are taken."""
        return self.match.handle if self.partial is None else self.partial.handle

    @property
    def blocks(self) -> int:
        """Blocks that must be there."""
        return self.new + self.promised


class Planner:
    """Looks prompts up. Changes nothing.

    Args:
        pool: the blocks.
    """

    def __init__(self, pool: PoolBlocks) -> None:
        self._pool = pool
        self._block_size = pool.prefix.block_size

    def look_up(self, prompt: Prompt, *, partial: bool, match: PrefixMatch | None = None) -> Needs:
        """Return what a prompt finds and needs, with ``partial`` also within a block; ``match`` is what it finds, if that is known."""
        ids, size, most = prompt.ids, self._block_size, prompt.max_cached_len
        if match is None:
            match = self._pool.match(self.looked_up(prompt), prompt.namespace)
        cached, found = min(match.handle.cached_len, most), None
        if partial and self._pool.uses_parts and cached == match.handle.cached_len:
            found = self._pool.prefix.match_partial(match.handle, ids[cached : min(ids.size - 1, most, cached + size)])
            cached += found.num_tokens if found else 0
        return self._needs(prompt, match, found, cached, cached // size)

    def looked_up(self, prompt: Prompt) -> npt.NDArray[Any]:
        """Return the token ids that are looked up: whole blocks, as far as they may be used."""
        size, most = self._block_size, prompt.max_cached_len
        # Without the last token, so that the block it is in is neither taken nor locked where all of it is cached.
        count = min((prompt.ids.size - 1) // size, self._blocks_for(most) if self._pool.uses_parts else most // size)
        return prompt.ids[: count * size]

    def behind(self, prompt: Prompt, match: PrefixMatch, count: int) -> Needs:
        """Return what a prompt needs that goes on behind ``count`` blocks, of which those behind what was found are to be taken, too."""
        size = self._block_size
        cached = min(count * size, prompt.max_cached_len)
        return self._needs(prompt, match, None, cached, cached // size - (count - match.blocks.size))

    def _needs(self, prompt: Prompt, match: PrefixMatch, found: PartialMatch | None, cached: int, have: int) -> Needs:
        """Return what a prompt needs behind so many cached tokens, of which so many blocks need not be taken."""
        tokens = min(prompt.ids.size, cached + prompt.at_most)
        if prompt.is_chunked:
            tokens = int(self._pool.states.chunk_ends(np.array(cached), np.array(tokens), np.array(prompt.ids.size)))
        blocks = self._blocks_for(tokens)
        return Needs(match, found, cached, tokens, blocks - have, self._blocks_for(tokens + prompt.reserve) - blocks)

    def check_size(self, needs: Needs) -> None:
        """Raise OutOfBlocksError for a prompt that the pool could never hold."""
        have = needs.cached_len // self._block_size
        if not self._pool.could_hold(have, needs.blocks):
            raise OutOfBlocksError(
                "CacheManager.begin: tokens",
                expected=f"at most {self._pool.capacity * self._block_size} tokens, the whole pool, reserved ones included",
                got=f"{needs.num_tokens}, and {needs.promised} blocks to reserve",
                fix="refuse the request, or make the pool larger; where windows let go of tokens, begin it in chunks with at_most",
            )

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
