"""`paged_attention` in Triton: the descriptor that launches its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import attrs
import torch

from kvdock.plugin import Descriptor, Request, quantised_reasons
from kvdock_triton.attention_caches import LONG, MAPPED_POOLS, long_chunk, map_layout, may_be_within
from kvdock_triton.attention_results import OPENER
from kvdock_triton.attention_specs import (
    MOST_KEYS,
    MOST_SPLITS,
    attend_spec,
    join_few_spec,
    join_spec,
    prefill_tile,
    unit_of,
)
from kvdock_triton.launch import KernelSpec, has_maps, is_interpreting
from kvdock_triton.support import TritonKernel, ceil_div
from kvdock_triton.written import Launch

__all__ = ["MOST_DIM", "PagedAttention", "PagedAttentionDescriptor"]

MOST_DIM = {"k_cache": 576, "v_cache": 512}
"""Length of a head at most, that of latents: a tile of longer ones has no room in some GPU's shared memory."""

MOST_MAPS = 1024
"""Pairs of caches whose maps are kept: a layer has one, of a hundred bytes."""


@attrs.frozen(eq=False)
class _Way:
    """One way to attend: a kernel, what joins what several programs found of a row, and how its grid is laid out.

    Args:
        launch: the kernel.
        join: what joins.
        queries: of a tile.
        segments: programs of a tile at least, one for each head of the cache and each share of its group.
        rows: of a program.
        served: rows of a program that may be a query and a head.
        wanted: programs that the keys are shared out among.
        least: keys of a part at least.
        pieces: of a chunk of ``long`` keys at least, for as many programs one after the other.
        long: see there.
    """

    launch: Launch
    join: Launch
    queries: int
    segments: int
    rows: int
    served: int
    wanted: int
    least: int
    pieces: int
    long: int

    @classmethod
    def of(cls, spec: KernelSpec, launch: Launch, join: Launch, wanted: int, pieces: int, long: int) -> Self:
        """Read the layout off what was compiled."""
        names = ("TILE", "HEADS", "GROUP", "SHARE", "ROWS", "LEAST")
        tile, heads, group, share, rows, least = (spec.constant(name) for name in names)
        return cls(launch, join, tile, heads * ceil_div(group, share), rows, tile * share, wanted, least, pieces, long)

    def chunks(self, batch: int, room: int) -> tuple[int, int, int]:
        """Return how the keys of few queries of each row are cut: into so many chunks, of so many pieces, and so many of a segment.

        As many as are wanted and have ``least`` keys each, and as many of each segment where there are enough: programs with nothing to
        do would take the places of others.
        """
        segments = batch * self.segments
        each = min(self.wanted // segments, ceil_div(room, self.least)) if segments else 0
        chunks = max(segments * each, 1) if segments <= self.wanted else self.wanted
        return chunks, self.pieces if segments * room >= chunks * self.long else 1, each

    def has_parts(self, programs: int, batch: int, room: int) -> bool:
        """Whether any of so many programs may have a part of a row only."""
        return programs != batch * self.segments or (batch > 1 and room > self.least)

    def splits(self, tiles: int, queries: int, room: int) -> int:
        """Return in how many splits the keys of each of ``tiles`` tiles of many queries are looked at, at most."""
        programs = max(tiles, ceil_div(queries, self.queries)) * self.segments
        return max(1, min(self.wanted // programs, ceil_div(room, self.least), MOST_SPLITS))


_Ways = tuple[_Way, _Way]
"""For few queries of each row of the batch, and for any number."""


class PagedAttentionDescriptor(Descriptor):
    """Launches one of two kernels, by whether the queries of a row fit into a tile, and what joins what several programs found of it.

    Where values may be the first elements of keys, there are two more, for when they are.
    What is to be joined lies in memory that each call takes from torch's allocator, so that calls on several streams, and replays of
    graphs, share none of it.
    """

    uses_autograd = False  # kernels read and write by address
    notes_capture = True  # a graph needs the compiled kernels alone, which the process keeps

    def __init__(self, request: Request, apart: _Ways, within: _Ways, skipped: int) -> None:
        self._apart, self._within, self._skipped = apart, within, skipped
        k_cache, v_cache = request.tensor("k_cache"), request.tensor("v_cache")
        self._num_blocks, self._block = int(k_cache.shape[0] or 0), int(k_cache.shape[1] or 1)
        self._width = int(v_cache.shape[3] or 0) + 1  # of one part with its sum
        self._layouts = [map_layout(pool) for pool in (k_cache, v_cache)]
        self._known_maps: dict[tuple[_Way, tuple[int, ...]], tuple[Any, ...]] = {}
        self._q_unit, self._out_unit = unit_of(request.tensor("q")), unit_of(request.tensor("out"))
        most = max(way.wanted * way.pieces * (2 * way.rows * self._width + OPENER.value) for way in (*apart, *within))
        self.workspace_bytes = most * 4

    def __call__(self, *args: Any) -> None:
        """Attend, on the current stream of the tensors' device."""
        q, k_cache, v_cache, table, lens, cu, starts, sinks, _, _, most, _, _, _, _, out, lse = args
        few, many = self._within if k_cache.data_ptr() == v_cache.data_ptr() else self._apart
        rows = [tensor.data_ptr() for tensor in (lens, cu, starts) if tensor is not None]
        ends = [tensor.data_ptr() for tensor in (sinks, out, lse) if tensor is not None]
        inputs = (q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), table.data_ptr(), *rows)
        q_token, q_head, _ = q.stride()
        steps = [tensor.stride(0) for tensor in (lens, cu, starts) if tensor is not None]
        strides = (q_token // self._q_unit, q_head // self._q_unit, *table.stride(), *steps)
        written = self._output_strides(out, lse)
        queries, (batch, width) = len(q), table.shape
        room = min(width * self._block, MOST_KEYS)
        sizes = (queries, batch, room, self._num_blocks)
        if cu is None or most <= few.queries:
            chunks, pieces, each = few.chunks(batch, room)
            programs = chunks * pieces
            joined, openers = pieces > 1 or few.has_parts(chunks, batch, room), min(programs, batch * few.segments)
            memory, *found = self._workspace(2 * programs * few.rows if joined else 0, out, openers)
            maps = self._maps(few, k_cache.data_ptr(), v_cache.data_ptr()) if few.launch.maps else ()
            few.launch.run(chunks, pieces, *inputs, *ends, *found, self._skipped, *sizes, each, *strides, *written, *maps)
            if joined:
                few.join.run(openers * few.served, 1, *found, *ends, *written)
        else:
            tiles = queries // many.queries + batch
            splits = many.splits(tiles, queries, room)
            memory, *found, _ = self._workspace(queries * q.shape[1] * splits if splits > 1 else 0, out)
            maps = self._maps(many, k_cache.data_ptr(), v_cache.data_ptr()) if many.launch.maps else ()
            many.launch.run(tiles * many.segments, splits, *inputs, *ends, *found, self._skipped, *sizes, splits, *strides, *written, *maps)
            if splits > 1:
                many.join.run(queries * q.shape[1], 1, *found, *ends, splits, *written)
        del memory  # not before all is launched: it would be another call's

    def _workspace(self, parts: int, out: torch.Tensor, openers: int = 0) -> tuple[torch.Tensor, int, int, int]:
        """Return memory for so many parts, where they are, where their sums are, and where it is said whose they are."""
        size = parts * self._width + OPENER.value * openers
        memory = torch.empty(size, dtype=torch.float32, device=out.device) if size else out  # of which nothing is written then
        begin = memory.data_ptr()
        return memory, begin, begin + 4 * parts * (self._width - 1), begin + 4 * parts * self._width

    def _maps(self, way: _Way, *addresses: int) -> tuple[Any, ...]:
        """Return what a launch takes for the maps of both caches. Layers share a descriptor, and each has an address of its own."""
        known = self._known_maps.get((way, addresses))
        if known is None:
            if len(self._known_maps) >= MOST_MAPS:
                self._known_maps.clear()
            made = [way.launch.maps[name](at, *layout) for name, at, layout in zip(MAPPED_POOLS, addresses, self._layouts, strict=True)]
            known = self._known_maps[way, addresses] = tuple(value for each in made for value in each)
        return known

    def _output_strides(self, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[int, ...]:
        """Return the strides of what is written, in the kernels' order."""
        out_token, out_head, _ = out.stride()
        return (out_token // self._out_unit, out_head // self._out_unit, *(() if lse is None else lse.stride()))


class PagedAttention(TritonKernel):
    """Prepares `PagedAttentionDescriptor`."""

    def supports(self, request: Request) -> Sequence[str]:
        """Serve 16 and 32-bit floats, and heads that a tile has room for."""
        reasons = quantised_reasons(request)
        if request.tensor("q").dtype == torch.float64:
            reasons.append("matrix units compute no float64")
        for name, most in MOST_DIM.items():
            meta = request.tensor(name)
            most, dim = min(most, LONG) if meta.dtype == torch.float32 else most, int(meta.shape[3] or 0)
            reasons += [f"heads of {name} have {dim} elements, more than {most}"] * (dim > most)
        return reasons

    def prepare(self, request: Request) -> Descriptor:
        """Compile the kernels."""
        apart = self._ways(request, within=False)
        within = self._ways(request, within=True) if may_be_within(request) else apart
        return PagedAttentionDescriptor(request, apart, within, self.skipped(request.device))

    def _ways(self, request: Request, *, within: bool) -> _Ways:
        tuning, processors = self.tuning(request.device), self.processors(request.device)
        early = tuning.early and has_maps() and not is_interpreting()  # the interpreter ends one kernel before the next
        decode = tuning.decode if has_maps() else attrs.evolve(tuning.decode, mapped=None)
        prefill = prefill_tile(request, tuning) if has_maps() and not within else tuning.prefill
        tiles = {False: decode} | ({} if request.args["cu_query_lens"] is None else {True: prefill})
        ways = []
        for many, tile in tiles.items():
            spec = attend_spec(request, tile, many, within, early)
            join = join_spec(request) if many else join_few_spec(request, spec, early)
            launches = self.launch(spec, request), self.launch(join, request)
            ways.append(_Way.of(spec, *launches, tile.programs * processors, tile.pieces, long_chunk(request, tile)))
        return ways[0], ways[-1]
