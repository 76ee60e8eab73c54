"""Managers that are busy at random, and publishers and readers of their events over real sockets."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import kvdock
from kvdock.integrations.kv_events import KVEventPublisher, KVEventSubscriber
from kvdock.prefix import block_names
from support_prefix import tree_of

SPACES: list[tuple[Any, ...]] = [(), (("lora", "a"),), (("salt", "a"),), ("a",)]
_NUMBERS = itertools.count()


def inproc() -> str:
    """An address of this process that nobody has."""
    return f"inproc://kv-events-{next(_NUMBERS)}"


def busy(manager: kvdock.CacheManager, steps: int, seed: int, reset: bool = True) -> None:
    """Let sequences begin, grow, fork, be cut and end, in a pool that is too small for what they leave behind."""
    choose = random.Random(seed)  # noqa: S311 - no secret
    open_: list[Any] = []
    size = manager.block_size
    for _ in range(steps):
        what = choose.random()
        if what < 0.02 and reset:
            while open_:
                manager.abort(open_.pop())
            manager.reset()
        elif (what < 0.5 and len(open_) < 3) or not open_:
            prompt = [choose.randrange(3) for _ in range(choose.randrange(1, 6 * size))]
            seq = attempt(manager.begin, prompt, choose.choice(SPACES))
            if seq is not None:
                manager.commit(seq, [], computed=len(prompt))
                open_.append(seq)
        elif what < 0.75:
            seq, count = choose.choice(open_), choose.randrange(1, 2 * size)
            if attempt(manager.extend, seq, count) is not None:
                manager.commit(seq, [choose.randrange(3) for _ in range(count)], computed=seq.num_tokens)
        else:
            manager.finish(open_.pop(choose.randrange(len(open_))), keep=choose.random() < 0.7)
    while open_:
        manager.abort(open_.pop())


def attempt(call: Callable[..., Any], *args: Any) -> Any:
    """What a call returns, or None where blocks are missing."""
    try:
        return call(*args)
    except kvdock.OutOfBlocksError:
        return None


def store(manager: kvdock.CacheManager, tokens: Any, namespace: tuple[Any, ...] = ()) -> None:
    """Compute and publish a prompt."""
    seq = manager.begin(tokens, namespace)
    manager.commit(seq, [], computed=len(tokens))
    manager.finish(seq)


def stored(manager: kvdock.CacheManager) -> dict[bytes, bytes | None]:
    """The name of each block of a manager's radix tree, with that of the block before it: a walk over the tree itself."""
    spaces, found = {repr(space): space for space in SPACES}, {}
    for space, path in tree_of(manager.prefix):
        names = block_names([token for block in path for token in block], manager.block_size, spaces[space])
        found[names[-1]] = names[-2] if names[1:] else None
    return found


def until(reader: KVEventSubscriber, done: Callable[[], bool], timeout: float = 10.0) -> None:
    """Read until something is so."""
    end = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < end, f"{reader} waits in vain"
        reader.poll(0.05)


@contextmanager
def pair(*managers: kvdock.CacheManager, slow: bool = False, **options: Any) -> Iterator[tuple[KVEventPublisher, KVEventSubscriber]]:
    """A publisher and a reader that is connected; a slow one has room for one message."""
    where = inproc()
    with (
        KVEventPublisher(*managers, endpoint=inproc(), replay_endpoint=where, **options) as publisher,
        KVEventSubscriber(publisher.endpoint, where, max_waiting=1 if slow else 100_000) as reader,
    ):
        yield publisher, reader
