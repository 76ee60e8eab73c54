"""`paged_attention` in Triton: the descriptor that launches its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from kvdock.plugin import Descriptor, Request, quantised_reasons
from kvdock_triton.attention_specs import LONG, MOST_KEYS, MOST_SPLITS, attend_spec, join_spec, may_be_within, unit_of
from kvdock_triton.launch import KernelSpec
from kvdock_triton.support import TritonKernel, ceil_div
from kvdock_triton.written import Launch

__all__ = ["MOST_DIM", "PagedAttention", "PagedAttentionDescriptor"]

MOST_DIM = {"k_cache": 576, "v_cache": 512}
"""Length of a head at most, that of latents: a tile of longer ones has no room in some GPU's shared memory."""


@attrs.frozen
class _Attend:
    """One way to attend: a kernel, and how its grid is laid out.

    Args:
        launch: the kernel.
        queries: of a tile.
        programs: of a tile, one for each head of the cache and each share of its group.
        rows: of a program.
        wanted: programs that the keys are split for.
        uneven: as many, where some sequences are longer than others.
        least: keys of a split at least.
    """

    launch: Launch
    queries: int
    programs: int
    rows: int
    wanted: int
    uneven: int
    least: int

    @classmethod
    def of(cls, spec: KernelSpec, launch: Launch, wanted: int, uneven: int) -> _Attend:
        """Read the layout off what was compiled."""
        names = ("TILE", "HEADS", "GROUP", "SHARE", "ROWS", "LEAST")
        tile, heads, group, share, rows, least = (spec.constant(name) for name in names)
        return cls(launch, tile, heads * ceil_div(group, share), rows, wanted, uneven, least)

    def splits(self, tiles: int, queries: int, room: int) -> tuple[int, int]:
        """Return in how many splits the keys of ``tiles`` tiles are looked at, at most and where sequences are of about one length."""
        programs = max(tiles, ceil_div(queries, self.queries)) * self.programs
        most = min(ceil_div(room, self.least), MOST_SPLITS)
        even = max(1, min(self.wanted // programs, most))
        return max(even, min(2 * self.uneven // programs, most)) if tiles > 1 else even, even


_Ways = tuple[_Attend, _Attend]
"""For few queries of each sequence, and for any number."""


class PagedAttentionDescriptor(Descriptor):
    """Launches one of two kernels, by whether the queries of a sequence fit into a tile, and where keys were split, what joins them.

    Where values may be the first elements of keys, there are two more, for when they are.
    What splits found lies in memory that each call takes from torch's allocator, so that calls on several streams, and replays of
    graphs, share none of it.
    """

    uses_autograd = False  # kernels read and write by address
    notes_capture = True  # a graph needs the compiled kernels alone, which the process keeps

    def __init__(self, request: Request, apart: _Ways, within: _Ways, join: Launch, skipped: int) -> None:
        self._apart, self._within, self._join, self._skipped = apart, within, join, skipped
        k_cache, v_cache = request.tensor("k_cache"), request.tensor("v_cache")
        self._num_blocks, self._block = int(k_cache.shape[0] or 0), int(k_cache.shape[1] or 1)
        self._width = int(v_cache.shape[3] or 0) + 1  # of one part with its sum
        self._q_unit, self._out_unit = unit_of(request.tensor("q")), unit_of(request.tensor("out"))
        self.workspace_bytes = max(max(way.wanted, 2 * way.uneven) * way.rows for way in (*apart, *within)) * self._width * 4

    def __call__(self, *args: Any) -> None:
        """Attend, on the current stream of the tensors' device."""
        q, k_cache, v_cache, table, lens, cu, starts, sinks, _, _, most, _, _, _, _, out, lse = args
        queries, heads, _ = q.shape
        batch, width = table.shape
        room = min(width * self._block, MOST_KEYS)
        few, many = self._within if k_cache.data_ptr() == v_cache.data_ptr() else self._apart
        way = few if cu is None or most <= few.queries else many
        tiles = batch if way is few else queries // way.queries + batch
        splits, even = way.splits(tiles, queries, room)
        parts = queries * heads * splits
        workspace = torch.empty(parts * self._width, dtype=torch.float32, device=q.device) if splits > 1 else out
        pointers = [tensor.data_ptr() for tensor in (q, k_cache, v_cache, table, lens, cu, starts, sinks) if tensor is not None]
        ends = [out.data_ptr()] if lse is None else [out.data_ptr(), lse.data_ptr()]
        begin = workspace.data_ptr()
        found = (begin, begin + 4 * parts * (self._width - 1) if splits > 1 else begin)  # what splits found, and its sums
        read, written = self._strides(q, table, lens, cu, starts), self._output_strides(out, lse)
        sizes = (queries, batch, room, self._num_blocks, splits, even)
        way.launch.run(tiles * way.programs, splits, *pointers, *ends, *found, self._skipped, *sizes, *read, *written)
        if splits > 1:
            sink = [] if sinks is None else [sinks.data_ptr()]
            self._join.run(queries * heads, 1, *found, *sink, *ends, splits, *written)

    def _strides(self, q: torch.Tensor, table: torch.Tensor, *index: torch.Tensor | None) -> tuple[int, ...]:
        """Return the strides of what is read, in the kernel's order."""
        q_token, q_head, _ = q.stride()
        steps = (tensor.stride(0) for tensor in index if tensor is not None)
        return (q_token // self._q_unit, q_head // self._q_unit, *table.stride(), *steps)

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
        join = self.launch(join_spec(request), request)
        return PagedAttentionDescriptor(request, apart, within, join, self.skipped(request.device))

    def _ways(self, request: Request, *, within: bool) -> _Ways:
        tuning, processors = self.tuning(request.device), self.processors(request.device)
        tiles = {False: tuning.decode} | ({} if request.args["cu_query_lens"] is None else {True: tuning.prefill})
        ways = []
        for search, tile in tiles.items():
            spec = attend_spec(request, tile, search, within)
            uneven = 0 if search else tile.uneven * processors
            ways.append(_Attend.of(spec, self.launch(spec, request), tile.programs * processors, uneven))
        return ways[0], ways[-1]
