"""Whether blocks of one pool mean the same in another: asked once for each peer, before anything moves."""

from __future__ import annotations

from collections.abc import Iterator

from kvdock.errors import TransferError
from kvdock.transfer.layout import PlaceLayout, PoolLayout

__all__ = ["check_compatible", "differences"]

_KEEPS_ALL = "KeepAll()"


def check_compatible(peer: str, mine: PoolLayout, theirs: PoolLayout) -> None:
    """Refuse a peer whose blocks mean something else. Block sizes, memory orders, groups and ranks may differ.

    Raises:
        TransferError: it names the peer, and everything that differs.
    """
    if found := list(differences(mine, theirs)):
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        raise TransferError(
            f"layout of peer {peer!r}",
            expected="keys and values of the same model",
            got="; ".join(found[:3]) + more,
            fix="give both sides the same weights, dtype and KVSpec, and ranks that share heads evenly",
        )


def differences(mine: PoolLayout, theirs: PoolLayout) -> Iterator[str]:
    """Yield what differs and must not, in plain words."""
    if mine.model != theirs.model:
        yield f"model {theirs.model!r} where this is {mine.model!r}"
    here, there = ({(place.layer, place.name): place for place in layout.places} for layout in (mine, theirs))
    for key in sorted(here.keys() ^ there.keys()):
        yield f"layer {key[0]} keeps {key[1]!r} only on {'this' if key in here else 'its'} side"
    for key in sorted(here.keys() & there.keys()):
        for text in _between(mine, here[key], theirs, there[key]):
            yield f"layer {key[0]}, {key[1]!r}: {text}"


def _between(mine: PoolLayout, place: PlaceLayout, theirs: PoolLayout, other: PlaceLayout) -> Iterator[str]:
    if place.dtype != other.dtype:
        yield f"dtype {other.dtype} where this is {place.dtype}"
    if (place.whole, place.split, place.head) != (other.whole, other.split, other.head):
        yield f"{list(other.whole)} in the whole model where this is {list(place.whole)}"
    group, of = mine.groups[place.group], theirs.groups[other.group]
    if group.rule != of.rule and _KEEPS_ALL not in (group.rule, of.rule):
        yield f"{of.rule} where this is {group.rule}"
    if group.is_state != of.is_state:
        yield "a state on one side"
    elif group.is_state and mine.tp_size != theirs.tp_size:
        yield f"a state of {theirs.tp_size} ranks where this is of {mine.tp_size}: how ranks share it is not known"
