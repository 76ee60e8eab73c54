"""The table of moves: what each op that copies reads and writes, and which places its indices stand for.

Faults of all these ops are made of it, see `families`. A new op is one more entry: functions that say where its rows come
from and go to, what names a place out of range, and how such places are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch

from kvdock_conformance.cases.every_op import OPS
from kvdock_conformance.faults.fault import Args, BackendCall
from kvdock_conformance.faults.tensors import bits, capacity, in_range

__all__ = ["COPY", "GATHER", "MOVES", "STATIC", "WRITE", "Move", "Places", "by_slots", "starts_of"]

_WRITE, _STATIC, _GATHER, _COPY = OPS
Index = tuple[torch.Tensor, ...]
View = Callable[[str, torch.Tensor], torch.Tensor]
"""Given an argument's name and the tensor, returns how a faulty call sees it."""


@attrs.frozen
class Places:
    """The places of a call that are padding neither nor out of range, one after the other.

    Args:
        at: number of each in the call: of the token, of the pair, of the new position.
        source: where its row is read: an index into what is read.
        to: where it is written.
    """

    at: torch.Tensor
    source: Index
    to: Index


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@attrs.frozen
class Move:
    """An op that copies rows.

    Args:
        op: its name.
        prefix: what its faults are called: ``"write"``.
        roles: what its requirements are about, a word for each in the order of their numbers: those of `families` notice its faults.
        pairs: names of what is read and what is written, of keys and of values.
        index: name of the argument that says where.
        places: returns the good places of a call.
        limit: returns the first index that is out of range.
        count: returns how many tokens, pairs or new positions a call has.
        beyond: returns how an error names each place out of range, in order.
        left_out: makes a call without what is out of range.
        arranged: returns a tensor of a call so that `Places` index it.
        names: what faults are called that have another name than with other ops.
        seen: returns a call as one of keys and values, and its arguments so.
    """

    op: str
    prefix: str
    roles: str
    pairs: tuple[tuple[str, str], tuple[str, str]]
    index: str
    places: Callable[[Args], Places]
    limit: Callable[[Args], int]
    count: Callable[[Args], int]
    beyond: Callable[[Args], list[str]]
    left_out: Callable[[BackendCall, Args], None]
    arranged: Callable[[torch.Tensor], torch.Tensor] = _as_it_is
    names: Mapping[str, str] = MappingProxyType({})
    seen: Callable[[BackendCall, Args], tuple[BackendCall, Args]] = lambda run, args: (run, args)

    def killer(self, role: str) -> str:
        """Return the id of the requirement that is about something."""
        return f"KVD-{self.prefix.upper()}-{self.roles.split().index(role) + 1:03}"

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the arguments that hold rows."""
        return tuple(dict.fromkeys(name for pair in self.pairs for name in pair))

    def with_index(self, run: BackendCall, args: Args, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Make a call with other indices."""
        index = args[self.index]
        changed = int(change(torch.tensor(index))) if isinstance(index, int) else change(index).to(index.dtype)
        run({**args, self.index: changed})

    def written(self, args: Args) -> list[torch.Tensor]:
        """Return the bits of what a call writes, of keys and of values, as `Places` index them."""
        return [bits(self.arranged(args[to])) for _, to in self.pairs]

    def dropping(self, run: BackendCall, args: Args, is_dropped: Callable[[Places], torch.Tensor]) -> None:
        """Make a call, and put back what was there before at some places."""
        places, written = self.places(args), self.written(args)
        dropped = is_dropped(places)
        to = tuple(index[dropped] for index in places.to)
        before = [rows[to] for rows in written]
        run(args)
        for rows, old in zip(written, before, strict=True):
            rows[to] = old

    def partly(self, run: BackendCall, args: Args, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Make a call, and put back what was there before in all but a part of each row."""
        places, written = self.places(args), self.written(args)
        before = [rows[places.to] for rows in written]
        run(args)
        for rows, old in zip(written, before, strict=True):
            part(old).copy_(part(rows[places.to]))
            rows[places.to] = old

    def again(
        self,
        run: BackendCall,
        args: Args,
        view: View = lambda name, tensor: tensor,
        change: Callable[[torch.Tensor], torch.Tensor] = _as_it_is,
    ) -> None:
        """Make a call for its errors, put back what was there, and move in plain torch: through other views, or other elements."""
        places = self.places(args)
        before = [rows[places.to] for rows in self.written(args)]
        run(args)
        for rows, old in zip(self.written(args), before, strict=True):
            rows[places.to] = old
        self.move(args, places, view, change)

    def move(
        self,
        args: Args,
        places: Places | None = None,
        view: View = lambda name, tensor: tensor,
        change: Callable[[torch.Tensor], torch.Tensor] = _as_it_is,
    ) -> None:
        """Move what is good in a call, in plain torch."""
        places = self.places(args) if places is None else places
        for source, to in self.pairs:
            rows = bits(self.arranged(view(source, args[source])))[places.source].view(args[source].dtype)
            bits(self.arranged(view(to, args[to])))[places.to] = bits(change(rows))

    def reach(self, args: Args, places: Places) -> torch.Tensor:
        """Return how many elements from the beginning of a tensor each place is, at most."""
        found = torch.zeros_like(places.at)
        for names, index in zip(zip(*self.pairs, strict=True), (places.source, places.to), strict=True):
            for tensor in (self.arranged(args[name]) for name in names):
                steps = zip(index, tensor.stride(), strict=False)
                found = torch.maximum(found, sum((at * step for at, step in steps), torch.zeros_like(found)))
        return found


# Slots


def _slot_places(args: Args, *, is_read: bool) -> Places:
    valid, block = in_range(args), args["k_cache"].shape[1]
    slots = args["slot_mapping"][valid].long()
    tokens, pool = valid.nonzero(as_tuple=True), (slots // block, slots % block)
    at = torch.arange(valid.numel(), device=valid.device).reshape(valid.shape)[valid]
    return Places(at, pool, tokens) if is_read else Places(at, tokens, pool)


def _slots_beyond(args: Args) -> list[str]:
    return [f"slot_mapping{place}" for place in (args["slot_mapping"] >= capacity(args)).nonzero().tolist()]


def _slots_left_out(run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"]
    run({**args, "slot_mapping": torch.where(slots >= capacity(args), -1, slots)})


def by_slots(
    op: str, prefix: str, roles: str, pairs: tuple[tuple[str, str], tuple[str, str]], names: Mapping[str, str], **more: Any
) -> Move:
    """Return an op that goes by slots; ``more`` is of `Move`."""
    is_read = pairs[0][0] == "k_cache"
    return Move(
        op,
        prefix,
        roles,
        pairs,
        "slot_mapping",
        lambda args: _slot_places(args, is_read=is_read),
        capacity,
        lambda args: int(args["slot_mapping"].numel()),
        _slots_beyond,
        _slots_left_out,
        names=names,
        **more,
    )


_SLOT_ROLES = "blocks dims heads unlike many grid orders parts rows addresses numbers inputs"
WRITE = by_slots(
    _WRITE,
    "write",
    f"first bytes padding beyond ends index batch nothing equal {_SLOT_ROLES} quantised far repeated together",
    (("k", "k_cache"), ("v", "v_cache")),
    {
        "last-slot-is-beyond": "last-slot-dropped",
    },
)
GATHER = by_slots(
    _GATHER,
    "gather",
    f"first out-bytes padding beyond ends index batch nothing again {_SLOT_ROLES} expanded returned out far repeated kept quantised "
    "refused together",
    (("k_cache", "k_out"), ("v_cache", "v_out")),
    {
        "last-token-dropped": "last-token-left",
        "keys-into-values": "keys-for-values",
        "token-strides-ignored": "output-strides-ignored",
        "one-byte-past-the-row": "one-byte-past-the-outputs",
        "input-scaled-in-place": "pool-changed",
        "no-tokens-refused": "no-slots-refused",
    },
)


# Pairs of blocks


def _blocks(args: Args) -> int:
    return int(args["k_cache"].shape[0])


def _pair_places(args: Args) -> Places:
    pairs = args["block_pairs"].to(args["k_cache"].device).long()
    good = ((pairs >= 0) & (pairs < _blocks(args))).all(1)
    return Places(good.nonzero()[:, 0], (pairs[good, 0],), (pairs[good, 1],))


def _pairs_beyond(args: Args) -> list[str]:
    pairs = args["block_pairs"]
    return [f"block_pairs{place}" for place in ((pairs >= _blocks(args)) & (pairs >= 0).all(1, keepdim=True)).nonzero().tolist()]


def _pairs_left_out(run: BackendCall, args: Args) -> None:
    beyond = (args["block_pairs"] >= _blocks(args)).any(1)
    run({**args, "block_pairs": torch.where(beyond[:, None], -1, args["block_pairs"])})


COPY = Move(
    _COPY,
    "copy",
    "first bytes padding beyond ends doubled chained host-read index host forms nothing blocks dims heads unlike "
    "many grid orders parts addresses numbers quantised inputs far repeated refused together products",
    (("k_cache", "k_cache"), ("v_cache", "v_cache")),
    "block_pairs",
    _pair_places,
    _blocks,
    lambda args: len(args["block_pairs"]),
    _pairs_beyond,
    _pairs_left_out,
    names={
        "last-slot-is-beyond": "last-block-is-beyond",
        "slot-zero-is-padding": "block-zero-is-padding",
        "last-token-dropped": "last-pair-dropped",
        "tail-of-tokens-dropped": "tail-of-pairs-dropped",
        "error-after-a-partial-write": "error-after-a-partial-copy",
        "slots-cut-to-32-bits": "ids-cut-to-32-bits",
        "slot-strides-ignored": "pair-stride-ignored",
        "slots-clamped-in-place": "pairs-clamped-in-place",
        "heads-past-512-threads-dropped": "heads-past-512-threads-left",
        "one-byte-past-the-row": "one-byte-past-the-block",
        "first-slots-kept": "first-pairs-kept",
        "no-tokens-refused": "no-pairs-refused",
    },
)


# Rows of a static cache


def starts_of(args: Args) -> torch.Tensor:
    """Return the length of each row of a call."""
    given, rows = args["cache_lengths"], args["k"].shape[0]
    lengths = torch.as_tensor(given, device=args["k"].device).reshape(-1).long()
    return lengths.expand(rows) if len(lengths) == 1 else lengths


def _room(args: Args) -> int:
    """Return the first length that leaves no room for the new positions."""
    return int(args["k_cache"].shape[2] - args["k"].shape[2]) + 1


def _new_places(args: Args) -> Places:
    starts, new = starts_of(args), torch.arange(args["k"].shape[2], device=args["k"].device)
    rows = ((starts >= 0) & (starts < _room(args))).nonzero()[:, 0]
    row, at = rows.repeat_interleave(len(new)), new.repeat(len(rows))
    return Places(at, (row, at), (row, starts[row] + at))


def _rows_beyond(args: Args) -> list[str]:
    starts = starts_of(args)
    return [f"cache_lengths[{row}]" for row in ((starts < 0) | (starts >= _room(args))).nonzero()[:, 0].tolist()]


def _rows_left_out(run: BackendCall, args: Args) -> None:
    if _rows_beyond(args):
        STATIC.move(args)
    else:
        run(args)


STATIC: Move = Move(
    _STATIC,
    "static",
    "first bytes index lengths filled beyond negative nothing fewer many dims heads unlike orders parts rows "
    "addresses numbers inputs repeated far grid together",
    (("k", "k_cache"), ("v", "v_cache")),
    "cache_lengths",
    _new_places,
    _room,
    lambda args: int(args["k"].shape[2]),
    _rows_beyond,
    _rows_left_out,
    lambda tensor: tensor.transpose(1, 2),
    {
        "last-token-dropped": "last-position-dropped",
        "tail-of-tokens-dropped": "tail-of-positions-dropped",
        "beyond-the-pool-clamped": "overflow-clamped",
        "beyond-the-pool-silent": "overflow-silent",
        "error-names-another-place": "error-names-another-row",
        "slots-cut-to-32-bits": "lengths-cut-to-32-bits",
        "slot-strides-ignored": "lengths-strides-ignored",
        "pool-strides-ignored": "cache-strides-ignored",
        "block-stride-ignored": "row-stride-ignored",
        "token-strides-ignored": "source-strides-ignored",
        "one-byte-past-the-row": "one-byte-past-the-position",
        "minus-zero-lost": "minus-zero-lost-in-many-rows",
        "input-scaled-in-place": "values-scaled-in-place",
        "first-slots-kept": "first-length-kept",
        "no-tokens-refused": "no-positions-refused",
    },
)

MOVES: Mapping[str, Move] = MappingProxyType({move.prefix: move for move in (WRITE, GATHER, COPY, STATIC)})
"""Every op that copies, by the name of its faults."""
