"""What a sequence needs of each layer group, and whether an ask can be served."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np

from kvdock.errors import TransferError
from kvdock.layers.groups import LayerGroup
from kvdock.layers.retention import KeepAll
from kvdock.scheduler.cache_manager import CacheManager
from kvdock.transfer.layout import PoolLayout
from kvdock.transfer.messages import Ask, Part
from kvdock.transfer.refusals import refused
from kvdock.transfer.spans import Table, Wanted

__all__ = ["check_ask", "check_held", "groups_of", "needed_bytes", "nominal_tables", "rest_of_blocks", "wanted_tokens"]


def groups_of(manager: CacheManager, groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
    """Return a cache's groups with what a manager keeps of them: one that lets nothing go lets others find all of it."""
    if manager.lets_go:
        return tuple(groups)
    return tuple(each if each.retention.is_state else attrs.evolve(each, retention=KeepAll()) for each in groups)


def wanted_tokens(groups: Sequence[LayerGroup], start: int, stop: int) -> list[Wanted]:
    """Return of each group which of tokens ``start`` to ``stop - 1`` a sequence needs to go on; the state of a group of states."""
    found: list[Wanted] = []
    for group in groups:
        kept = ((max(span.start, start), span.stop) for span in group.retention.spans(stop))
        found.append(((0, 1),) if group.retention.is_state else tuple(pair for pair in kept if pair[0] < pair[1]))
    return found


def rest_of_blocks(groups: Sequence[LayerGroup], start: int, stop: int) -> list[Wanted]:
    """Return of each group what `wanted_tokens` leave out of their blocks from ``start`` on, as where a window begins within one."""
    found: list[Wanted] = []
    for group, wanted in zip(groups, wanted_tokens(groups, start, stop), strict=True):
        held = _held(group, stop, whole=True)
        blocks = held if group.retention.is_state else [(max(first, start), max(last, start)) for first, last in held]
        edges = sorted(edge for pair in (*blocks, *wanted) for edge in pair)  # what is wanted lies in blocks: the rest is between
        found.append(tuple(pair for pair in zip(edges[::2], edges[1::2], strict=True) if pair[0] < pair[1]))
    return found


def _held(group: LayerGroup, stop: int, *, whole: bool) -> Wanted:
    """Return which of its first ``stop`` tokens a sequence has in a group: what later ones read, or whole blocks of it."""
    if group.retention.is_state:
        return ((0, 1),)
    size = group.block_size if whole else 1
    return tuple((part.start * size, min(part.stop * size, stop)) for part in group.retention.blocks(stop, size))


def needed_bytes(layout: PoolLayout, wanted: Sequence[Wanted]) -> int:
    """Return the bytes of what a rank wants."""
    tokens = [sum(stop - start for start, stop in group) for group in wanted]
    return sum(tokens[place.group] * math.prod(place.shape) * place.itemsize for place in layout.places)


def nominal_tables(layout: PoolLayout, num_tokens: int) -> list[Table]:
    """Return block tables that stand for those of a peer, which it alone knows: what a target gets does not depend on them."""
    return [np.zeros(-(-num_tokens // group.block_size), dtype=np.int64) for group in layout.groups]


def check_ask(ask: Ask, peer: str, num_tokens: int, digest: str, groups: Sequence[LayerGroup], theirs: PoolLayout) -> None:
    """Refuse an ask for other tokens than those that are offered.

    Args:
        ask: the ask.
        peer: whose.
        num_tokens: tokens that are offered.
        digest: of as many of them as are asked for.
        groups: what has them.
        theirs: where they are to go.

    Raises:
        TransferError: it names the peer.
    """
    subject = f"ask of peer {peer!r} for {ask.name!r}"
    has_states = any(group.retention.is_state for group in groups)
    if ask.num_tokens > num_tokens or (has_states and ask.num_tokens < num_tokens):
        expected = f"{'' if has_states else 'at most '}{num_tokens}, which are offered"
        raise TransferError(f"{subject}: num_tokens", expected=expected, got=ask.num_tokens, fix="give ask and offer the same num_tokens")
    if ask.digest != digest:
        raise TransferError(f"{subject}: digest", expected="the token ids that are offered", got="others", fix="use one name for one text")
    check_held(f"{subject}: needed", ask.needed, ask.num_tokens, groups, theirs, whole=False)


def check_held(subject: str, part: Part, stop: int, groups: Sequence[LayerGroup], theirs: PoolLayout, *, whole: bool) -> None:
    """Refuse a part of an ask for tokens that a sequence of ``stop`` tokens has not.

    Args:
        subject: what is refused.
        part: what is wanted.
        stop: the tokens that are asked for.
        groups: what has them.
        theirs: where they are to go.
        whole: whether all is there of the blocks that have what later tokens read, and not these alone.

    Raises:
        TransferError: it names layer and tokens.
    """
    if len(part.wanted) != len(theirs.groups):
        raise refused(subject, f"one for each of {len(theirs.groups)} groups", len(part.wanted))
    members = {
        (layer, buffer.name): group
        for group in groups
        for (layer, _), kept in zip(group.members, group.parts, strict=True)
        for buffer in kept.buffers
    }
    for place in theirs.places:
        held = _held(members[place.layer, place.name], stop, whole=whole)
        for start, end in part.wanted[place.group]:
            if start < end and not any(first <= start and end <= last for first, last in held):
                expected, fix = (
                    f"tokens that layer {place.layer} has: {list(held)}",
                    "make both managers with groups that let go of the same",
                )
                raise TransferError(subject, expected=expected, got=f"{start} to {end}", fix=fix)
