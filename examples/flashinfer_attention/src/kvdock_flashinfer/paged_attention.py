"""`paged_attention` by FlashInfer's wrappers for pages."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import flashinfer
import torch

from kvdock.plugin import Descriptor, Kernel, Request

from .batches import Batch
from .planned import MOST_ROWS, MOST_TOKENS, WORKSPACE_BYTES, Planned, take
from .reasons import reasons
from .steps import planned

__all__ = ["PagedAttention", "PagedAttentionDescriptor"]

_NAMES = (
    *("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_query_lens", "starts", "sinks", "k_scale", "v_scale"),
    *("max_query_len", "scale", "causal", "window", "softcap", "out", "lse"),
)


class PagedAttentionDescriptor(Descriptor):
    """Plans on the host, which waits for the device, and runs what was planned.

    What cannot be planned is the built-in kernel's: a call that is captured into a graph, since nothing can be read then, and one with
    a table or lengths that are out of range, which the built-in kernel guards against and counts.
    """

    notes_capture = True  # a graph holds launches of the built-in kernel alone, whose descriptor takes care of them

    def __init__(self, request: Request, built_in: Descriptor) -> None:
        self._built_in, self._device = built_in, request.device
        self.workspace_bytes = max(built_in.workspace_bytes, WORKSPACE_BYTES)
        q, k_cache = request.tensor("q"), request.tensor("k_cache")
        self._dtype = q.dtype
        self._sizes = tuple(int(size or 0) for size in (q.shape[1], k_cache.shape[2], k_cache.shape[3], k_cache.shape[1]))
        # The wrapper for decode sums weights that were rounded to 16 bits. What it returns is exact enough, but its sums are not.
        self._is_decode = request.args["cu_query_lens"] is None and request.args["lse"] is None
        self._is_aligned = request.tensor("out").alignment == 16
        window, softcap, scale = (request.args[name] for name in ("window", "softcap", "scale"))
        self._options = {
            "window_left": -1 if window is None else window - 1,  # keys before the query's own
            "logits_soft_cap": softcap,
            "sm_scale": scale,
            **({} if self._is_decode else {"causal": request.args["causal"]}),
        }

    def __call__(self, *values: Any) -> None:
        """Attend, on the current stream of the tensors' device."""
        args = dict(zip(_NAMES, values, strict=True))
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                self._built_in(*values)
                return
            of = (self, threading.get_ident(), torch.cuda.current_stream().cuda_stream, args["q"].shape[0], args["max_query_len"])
            tensors = [args[name] for name in ("block_table", "seq_lens", "cu_query_lens")]
            with planned(of, tensors, lambda: self.plan(args)) as plan:
                if plan is None:
                    self._built_in(*values)
                else:
                    self.run(plan, args)

    def plan(self, args: dict[str, Any]) -> Planned | None:
        """Read a batch and plan it; None where the built-in kernel is to serve it."""
        batch = Batch.read(args)
        if batch is None or batch.tokens > MOST_TOKENS or len(batch.last) > MOST_ROWS:
            return None
        wrapper, back = take(self._device, self._wrapper, "decode" if self._is_decode else "prefill")
        ends = () if self._is_decode else (batch.query_ends,)
        blocks = batch.blocks.to(self._device)
        types = {"q_data_type": self._dtype, "kv_data_type": self._dtype}
        wrapper.plan(*ends, batch.block_ends, blocks, batch.last, *self._sizes, **types, **self._options)
        unseeing = batch.unseeing.to(self._device) if len(batch.unseeing) else None
        return Planned(wrapper, int(batch.query_ends[-1]), unseeing, back)

    def _wrapper(self, room: torch.Tensor) -> Any:
        """Return a new wrapper. It honours strides, so that pools of any memory order are pools of tokens, heads and elements."""
        if self._is_decode:
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=True)
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(room, "NHD")

    def run(self, plan: Planned, args: dict[str, Any]) -> None:
        """Run what was planned, into outputs of any strides."""
        q, k_cache, v_cache, out = (args[name].detach() for name in ("q", "k_cache", "v_cache", "out"))
        lse = args["lse"]
        found = out if self._is_aligned and out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        sums = lse if lse is None or lse.is_contiguous() else torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
        counted = slice(plan.queries)
        part = None if sums is None else sums[counted]
        plan.wrapper.run(q[counted], (k_cache, v_cache), out=found[counted], lse=part, return_lse=part is not None)
        if found is not out:
            out.copy_(found)
        if lse is not None:
            torch.mul(sums, math.log(2), out=lse)  # its logarithms have the base 2
        if plan.unseeing is not None:
            out.index_fill_(0, plan.unseeing, 0)
            if lse is not None:
                lse.index_fill_(0, plan.unseeing, -torch.inf)

    def warm(self, window: int | None, *, with_sums: bool) -> None:
        """Run a smallest call, for which FlashInfer compiles or loads what the others need too."""
        heads, kv_heads, dim, block = self._sizes
        new = torch.zeros(1, heads, dim, dtype=self._dtype, device=self._device)
        pool = torch.zeros(1, block, kv_heads, dim, dtype=self._dtype, device=self._device)
        absent: dict[str, Any] = dict.fromkeys(_NAMES)
        one, ends = torch.tensor([1], device="cpu"), torch.tensor([0, 1], device="cpu")
        sizes = {"seq_lens": one, "cu_query_lens": None if self._is_decode else ends, "max_query_len": 1}
        args = absent | sizes | {"q": new, "k_cache": pool, "v_cache": pool, "out": torch.empty_like(new), "window": window}
        args["lse"] = torch.empty(1, heads, device=self._device) if with_sums else None
        plan = self.plan(args | {"block_table": torch.zeros(1, 1, dtype=torch.int32, device="cpu")})
        if plan is not None:
            self.run(plan, args)
            plan.give_back()

    def destroy(self) -> None:
        """Destroy what the built-in kernel prepared."""
        self._built_in.destroy()


class PagedAttention(Kernel):
    """Prepares `PagedAttentionDescriptor`.

    Args:
        built_in: the kernel of kvdock's own CUDA backend.
        capability: returns the compute capability of a device.
    """

    def __init__(self, built_in: Kernel, capability: Callable[[torch.device], tuple[int, int]] = torch.cuda.get_device_capability) -> None:
        self._built_in, self._capability = built_in, capability

    def supports(self, request: Request) -> Sequence[str]:
        """Serve what FlashInfer has kernels for."""
        return reasons(request, self._capability(request.device)) or self._built_in.supports(request)

    def prepare(self, request: Request) -> Descriptor:
        """Prepare the built-in kernel's plan, and have FlashInfer compile its own: minutes, where it has not done so before."""
        made = PagedAttentionDescriptor(request, self._built_in.prepare(request))
        made.warm(request.args["window"], with_sums=request.args["lse"] is not None)
        return made
