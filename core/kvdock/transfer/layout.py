"""Where a pool's blocks lie, as plain numbers that another process can read: what both sides compute their spans from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvdock.cache.grouped import GroupedCache
from kvdock.cache.regions import Place
from kvdock.checks import COPY_DTYPES
from kvdock.errors import ArgumentValueError, KVDockError, UnsupportedError
from kvdock.layers.interface import Buffer
from kvdock.rank import RankInfo
from kvdock.transfer.refusals import misplaced, refused
from kvdock.transfer.wire import Fields, read, written

__all__ = ["GroupLayout", "PlaceLayout", "PoolLayout"]

_SIZES: Mapping[str, int] = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in COPY_DTYPES}
_MOST_PLACES, _MOST_DIMS, _MOST_RANKS, _MOST_BLOCKS, _MOST_BYTES = 1 << 16, 8, 1 << 16, 1 << 31, 1 << 56
_MOST_TEXT = 256


@attrs.frozen
class GroupLayout:
    """A layer group: tokens in a block, the rule by which tokens are let go as a text, and whether a block holds a state."""

    block_size: int
    rule: str
    is_state: bool


@attrs.frozen
class PlaceLayout:
    """A buffer of a layer, as `kvdock.cache.regions.Place` has it, and which part of the model's it is.

    Args:
        layer, name, group, offset, block_stride: as there.
        region: number of the region that it lies in.
        strides: of one block in bytes; the first is from token to token, but in a state.
        shape: of a token's part, or of a state, on this rank.
        dtype: name of it, such as ``"bfloat16"``.
        split: the dimension of ``shape`` that ranks share, or -1 where each rank has all of it.
        start: the first element of that dimension that this rank has, of the whole model's ``total``.
        total: see there.
        head: elements of that dimension in one head.
    """

    layer: int
    name: str
    group: int
    region: int
    offset: int
    block_stride: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    split: int
    start: int
    total: int
    head: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _SIZES[self.dtype]

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of a token's part, or of a state, in the whole model."""
        return tuple(self.total if dim == self.split else size for dim, size in enumerate(self.shape))

    def copies(self, tp_size: int) -> int:
        """Return how many of ``tp_size`` ranks hold the same of it."""
        return tp_size if self.split < 0 else max(tp_size // (self.total // self.head), 1)


@attrs.frozen
class PoolLayout:
    """A pool of one rank: groups, places and regions, in numbers.

    Args:
        model: what the keys and values are of; only pools of equal ones exchange blocks.
        tp_size: ranks that share the heads.
        tp_rank: which of them this is.
        num_blocks: blocks of each place.
        regions: bytes of each region of memory.
        groups: the layer groups.
        places: what lies where.
    """

    model: str
    tp_size: int
    tp_rank: int
    num_blocks: int
    regions: tuple[int, ...]
    groups: tuple[GroupLayout, ...]
    places: tuple[PlaceLayout, ...]

    @classmethod
    def of(cls, cache: GroupedCache, rank: RankInfo, model: str) -> PoolLayout:
        """Describe a cache.

        Args:
            cache: a cache in blocks.
            rank: the one that it was made with.
            model: a name of the weights, such as a repository and its revision: caches of other weights are refused by it.
        """
        if not isinstance(model, str) or len(model) > _MOST_TEXT:
            fix = "name the weights, such as by a repository and its revision: peers are told it"
            raise ArgumentValueError(
                "PoolLayout: model", expected=f"a str of at most {_MOST_TEXT} characters", got=repr(model)[:80], fix=fix
            )
        groups = tuple(GroupLayout(group.block_size, repr(group.retention), group.retention.is_state) for group in cache.groups)
        shares = _shares(cache, rank)
        regions = cache.memory_regions()
        places = tuple(_described(place, index, shares) for index, region in enumerate(regions) for place in region.places)
        return cls(model, rank.tp_size, rank.tp_rank, cache.num_blocks, tuple(each.nbytes for each in regions), groups, places)

    def to_bytes(self) -> bytes:
        """Return it as a message, for `from_bytes`."""
        return written("layout", self.to_fields())

    def to_fields(self) -> dict[str, Any]:
        """Return it as what JSON holds."""
        return attrs.asdict(self)

    @classmethod
    def from_bytes(cls, peer: str, message: bytes) -> PoolLayout:
        """Read a layout from outside.

        Raises:
            TransferError: another version, another kind of message, or numbers that no pool has; it names the peer.
        """
        kind, fields = read(peer, message)
        if kind != "layout":
            raise misplaced(peer, "a layout", repr(kind[:20]))
        return cls.from_fields(fields)

    @classmethod
    def from_fields(cls, fields: Fields) -> PoolLayout:
        """Read and check it. Raises `TransferError`."""
        tp_size, num_blocks = fields.integer("tp_size", 1, _MOST_RANKS), fields.integer("num_blocks", 1, _MOST_BLOCKS)
        regions = fields.integers("regions", 0, _MOST_BYTES, _MOST_PLACES)
        groups = tuple(
            GroupLayout(each.integer("block_size", 1, _MOST_BLOCKS), each.text("rule", _MOST_TEXT), each.flag("is_state"))
            for each in fields.objects("groups", _MOST_PLACES)
        )
        rank = fields.integer("tp_rank", 0, tp_size - 1)
        places = tuple(_read_place(each, regions, groups, num_blocks) for each in fields.objects("places", _MOST_PLACES))
        if len({(place.layer, place.name) for place in places}) != len(places):
            raise refused(f"{fields.subject}: places", "each buffer of a layer once", "one that is there twice")
        for place in places:
            _check_share(f"{fields.subject}: layer {place.layer}, {place.name}", place, tp_size, rank)
        return cls(fields.text("model", _MOST_TEXT), tp_size, rank, num_blocks, regions, groups, places)


def _shares(cache: GroupedCache, rank: RankInfo) -> dict[tuple[int, str], tuple[Buffer, int, int, int, int]]:
    """Return of each buffer: itself on this rank, the dimension that ranks share, where its part begins, its whole, and a head of it.

    A layer says its shape for any share of the heads. So its shape with one head, and with all, say which dimension they are in.
    """
    found = {}
    for layer, kind in enumerate(cache.spec.layers):
        splits = (rank.head_range, lambda heads, name: range(heads), lambda heads, name: range(1))
        kept = ([buffer for part in kind.parts(split, cache.spec.dtype) for buffer in part.buffers] for split in splits)
        for mine, whole, one in zip(*kept, strict=True):
            dims = [dim for dim, size in enumerate(whole.shape) if size != one.shape[dim]]
            if len(dims) > 1 or (dims and whole.shape[dims[0]] % one.shape[dims[0]]):
                got = f"{list(whole.shape)} with all heads, {list(one.shape)} with one"
                fix = "have its kind share heads along one dimension of each buffer"
                raise UnsupportedError(f"layer {layer}: {mine.name}", expected="one dimension with as much for each head", got=got, fix=fix)
            share = (-1, 0, 0, 0)
            if dims:
                head, total = one.shape[dims[0]], whole.shape[dims[0]]
                share = dims[0], rank.head_range(total // head).start * head, total, head
            found[layer, mine.name] = mine, *share
    return found


def _described(place: Place, region: int, shares: Mapping[tuple[int, str], tuple[Buffer, int, int, int, int]]) -> PlaceLayout:
    mine, *share = shares[place.layer, place.name]
    dtype = str(place.dtype).removeprefix("torch.")
    where = place.layer, place.name, place.group, region, place.offset, place.block_stride
    return PlaceLayout(*where, place.strides, mine.shape, dtype, *share)


def _read_place(fields: Fields, regions: Sequence[int], groups: Sequence[GroupLayout], num_blocks: int) -> PlaceLayout:
    dtype = fields.text("dtype", _MOST_TEXT)
    if dtype not in _SIZES:
        raise refused(f"{fields.subject}: dtype", f"one of {', '.join(_SIZES)}", repr(dtype[:20]))
    shape = fields.integers("shape", 1, 1 << 31, _MOST_DIMS)
    split = fields.integer("split", -1, len(shape) - 1)
    place = PlaceLayout(
        fields.integer("layer", 0, _MOST_PLACES),
        fields.text("name", _MOST_TEXT),
        fields.integer("group", 0, len(groups) - 1),
        fields.integer("region", 0, len(regions) - 1),
        fields.integer("offset", 0, _MOST_BYTES),
        fields.integer("block_stride", 0, _MOST_BYTES),
        fields.integers("strides", 0, _MOST_BYTES, _MOST_DIMS + 1),
        shape,
        dtype,
        split,
        fields.integer("start", 0, 1 << 31),
        fields.integer("total", 0, 1 << 31),
        fields.integer("head", 0, 1 << 31),
    )
    _check_place(fields.subject, place, regions[place.region], groups[place.group], num_blocks)
    return place


def _check_place(subject: str, place: PlaceLayout, nbytes: int, group: GroupLayout, num_blocks: int) -> None:
    """Refuse a place that no pool has: bytes outside its region, elements of a head that do not lie side by side."""
    sizes = place.shape if group.is_state else (group.block_size, *place.shape)
    if len(place.strides) != len(sizes):
        raise refused(f"{subject}: strides", len(sizes), len(place.strides))
    last = sum((size - 1) * stride for size, stride in zip((num_blocks, *sizes), (place.block_stride, *place.strides), strict=True))
    if place.offset + last + place.itemsize > nbytes:
        got = f"bytes up to {place.offset + last + place.itemsize}"
        raise refused(f"{subject}: offset and strides", f"bytes of a region of {nbytes}", got)
    last_dim = max((dim for dim, size in enumerate(place.shape) if size > 1), default=-1)
    stride = place.strides[last_dim - len(place.shape)]
    if last_dim >= 0 and stride != place.itemsize and (last_dim, 1) != (place.split, place.head):
        # Else a peer could have each element be a run of its own: 40 bytes of this side's memory for each that is sent.
        raise refused(f"{subject}: strides", f"elements side by side, {place.itemsize} bytes each", f"{stride} bytes")


def _check_share(subject: str, place: PlaceLayout, tp_size: int, tp_rank: int) -> None:
    """Refuse heads that are not those of the rank."""
    if place.split < 0:
        return
    heads, rest = divmod(place.total, max(place.head, 1))
    said = range(place.start, place.start + place.shape[place.split])
    try:
        held = RankInfo("cpu", tp_size, tp_rank).head_range(heads)
    except KVDockError as error:
        raise refused(f"{subject}: total", "heads that its ranks share evenly", str(error)) from error
    mine = range(held.start * place.head, held.stop * place.head)
    if rest or said != mine:
        expected = f"elements {mine.start} to {mine.stop} of {place.total}, with {place.head} in a head, on rank {tp_rank} of {tp_size}"
        raise refused(f"{subject}: start, total and head", expected, f"{said.start} to {said.stop}")
