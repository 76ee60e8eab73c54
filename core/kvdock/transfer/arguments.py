"""What callers of an exchange pass: refused here and now, before a peer takes it for hostile or a block is written that is another's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvdock.cache.grouped import GroupedCache
from kvdock.checks import check_int
from kvdock.errors import ArgumentTypeError, ArgumentValueError, PluginError
from kvdock.scheduler.cache_manager import CacheManager
from kvdock.scheduler.cached import block_sizes, check_open, has_tables_of, num_blocks
from kvdock.scheduler.sequence import CacheSequence
from kvdock.transfer.interface import Ticket, Transport
from kvdock.transfer.leases import Limits, Transfer
from kvdock.transfer.messages import MOST_NOTE

__all__ = ["check_lendable", "check_parts", "check_text", "count_of", "names_of", "ticket_of"]


def check_parts(manager: object, cache: object, transport: object, limits: object) -> None:
    """Check what an exchange is made of: a manager that hands out the blocks of that cache, and the like."""
    kinds = (("manager", manager, CacheManager), ("cache", cache, GroupedCache), ("transport", transport, Transport))
    for name, value, kind in (*kinds, ("limits", limits, Limits)):
        if not isinstance(value, kind):
            fix = (
                "make one with kvdock.transfer.create_transport" if kind is Transport else f"pass one of kvdock's own: {kind.__name__}(...)"
            )
            raise ArgumentTypeError(f"Exchange: {name}", expected=f"a {kind.__name__}", got=repr(value)[:80], fix=fix)
    if isinstance(manager, CacheManager) and isinstance(cache, GroupedCache):
        sizes, found = [group.block_size for group in cache.groups], list(block_sizes(manager))
        if not has_tables_of(manager, cache.groups) or num_blocks(manager) > cache.num_blocks:
            expected = f"one of this cache, with blocks of {sizes} tokens, at most {cache.num_blocks}"
            got, fix = f"{num_blocks(manager)} blocks of {found}", "make it with CacheManager(cache.num_blocks, groups=cache.groups)"
            raise ArgumentValueError("Exchange: manager", expected=expected, got=got, fix=fix)


def check_text(subject: str, value: object, most: int) -> None:
    """Check a text that peers are told: they refuse a longer one."""
    if not isinstance(value, str):
        raise ArgumentTypeError(subject, expected="a str", got=repr(value)[:80], fix="pass what both sides call it")
    if len(value) > most:
        raise ArgumentValueError(subject, expected=f"at most {most} characters", got=len(value), fix="pass a digest of it")


def count_of(subject: str, value: object, default: int) -> int:
    """Return a number of tokens as an int, since peers are told it; numpy's integers are taken too."""
    return default if value is None else check_int(subject, int(value) if isinstance(value, np.integer) else value, 0)


def names_of(subject: str, peers: Iterable[str]) -> tuple[str, ...]:
    """Return names of peers. A text is a sequence of texts, too: one is no list of names."""
    if isinstance(peers, str) or not isinstance(peers, Sequence | set | frozenset) or not all(isinstance(peer, str) for peer in peers):
        raise ArgumentTypeError(subject, expected="a list of names of peers", got=repr(peers)[:80], fix='pass ["name"]')
    return tuple(peers)


def check_lendable(subject: str, manager: CacheManager, seq: CacheSequence, lent: Iterable[Transfer]) -> None:
    """Check that a sequence is this manager's, is open, and that no other transfer will end it: its blocks would be given away."""
    check_open(manager, f"{subject}: seq", seq)
    if other := next((each for each in lent if each.seq is seq), None):
        fix = "wait until that is over, or fork it first"
        raise ArgumentValueError(f"{subject}: seq", expected="one in no transfer", got=f"that of {other.name!r}", fix=fix)


def ticket_of(transport: Transport, made: object) -> Ticket:
    """Return what a transport's method returned, if it is a ticket."""
    if not isinstance(made, Ticket):
        fix = "report it to the transport's author"
        raise PluginError(f"transport {transport.name!r}", expected="a Ticket", got=repr(made)[:80], fix=fix)
    if not isinstance(made.note, bytes) or len(made.note) > MOST_NOTE:
        made.cancel("its note cannot be sent")
        fix, got = "report it to the transport's author", repr(made.note)[:80]
        raise PluginError(f"transport {transport.name!r}: note", expected=f"at most {MOST_NOTE} bytes", got=got, fix=fix)
    return made
