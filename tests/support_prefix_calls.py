"""Whole requests on a cache manager, and what is cached then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvdock.scheduler import CacheManager

__all__ = ["cached", "run"]


def cached(manager: CacheManager, tokens: Sequence[int], namespace: tuple[Any, ...] = ()) -> int:
    """How many tokens of a prompt are cached."""
    return manager.prefix.match_prefix(list(tokens), namespace, record=False).handle.cached_len


def run(manager: CacheManager, tokens: Sequence[int], **how: Any) -> None:
    """A whole request, all of it computed."""
    seq = manager.begin(list(tokens))
    manager.commit(seq, [], computed=len(tokens))
    manager.finish(seq, **how)
