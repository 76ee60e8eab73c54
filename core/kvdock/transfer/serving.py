"""What a sequence needs of each layer group, and whether an ask can be served."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvdock.errors import TransferError
from kvdock.layers.groups import LayerGroup
from kvdock.transfer.layout import PoolLayout
from kvdock.transfer.messages import Ask
from kvdock.transfer.spans import Table, Wanted

__all__ = ["are_whole", "check_ask", "needed_bytes", "nominal_tables", "wanted_tokens"]


def wanted_tokens(groups: Sequence[LayerGroup], start: int, stop: int) -> list[Wanted]:
    """Return of each group which of tokens ``start`` to ``stop - 1`` a sequence needs to go on; the state of a group of states."""
    found: list[Wanted] = []
    for group in groups:
        kept = ((max(span.start, start), span.stop) for span in group.retention.spans(stop))
        found.append(((0, 1),) if group.retention.is_state else tuple(pair for pair in kept if pair[0] < pair[1]))
    return found


def are_whole(groups: Sequence[LayerGroup], start: int, stop: int) -> bool:
    """Whether `wanted_tokens` fill all blocks that a sequence needs, as far as it has tokens, but for what was there before ``start``."""
    for group in groups:
        if group.retention.is_state:
            continue
        size, spans = group.block_size, group.retention.spans(stop)
        for blocks in group.retention.blocks(stop, size):
            first, last = max(blocks.start * size, min(start, stop)), min(blocks.stop * size, stop)
            if first < last and not any(span.start <= first and last <= span.stop for span in spans):
                return False
    return True


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
        raise TransferError(f"{subject}: num_tokens", expected=f"{'' if has_states else 'at most '}{num_tokens}", got=ask.num_tokens)
    if ask.digest != digest:
        raise TransferError(f"{subject}: digest", expected="the token ids that are offered", got="others", fix="use one name for one text")
    if len(ask.wanted) != len(theirs.groups):
        raise TransferError(f"{subject}: wanted", expected=f"one for each of {len(theirs.groups)} groups", got=len(ask.wanted))
    members = {
        (layer, buffer.name): group
        for group in groups
        for (layer, _), part in zip(group.members, group.parts, strict=True)
        for buffer in part.buffers
    }
    for place in theirs.places:
        group, wanted = members[place.layer, place.name], ask.wanted[place.group]
        held = [(0, 1)] if group.retention.is_state else [(span.start, span.stop) for span in group.retention.spans(ask.num_tokens)]
        for start, stop in wanted:
            if start < stop and not any(begin <= start and stop <= end for begin, end in held):
                expected = f"tokens that layer {place.layer} keeps: {held}"
                raise TransferError(f"{subject}: wanted", expected=expected, got=f"{start} to {stop}")
