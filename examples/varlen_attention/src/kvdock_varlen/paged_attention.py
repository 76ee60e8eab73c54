"""`paged_attention` by torch's `varlen_attn`, whose blocks may lie in any order in memory: it honours the strides of pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import current_flash_attention_impl
from torch.nn.attention.varlen import AuxRequest, varlen_attn_out

from kvdock.plugin import Descriptor, Kernel, Request

from .batches import Batch
from .reasons import reasons

__all__ = ["PagedAttention", "PagedAttentionDescriptor", "window_size"]

_NAMES = (
    *("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_query_lens", "starts", "sinks", "k_scale", "v_scale"),
    *("max_query_len", "scale", "causal", "window", "softcap", "out", "lse"),
)


def window_size(causal: bool, window: int | None) -> tuple[int, int]:
    """Return how many keys before and behind its own a query sees, -1 for all, as `varlen_attn` takes it."""
    return (-1 if window is None else window - 1), (0 if causal else -1)


class PagedAttentionDescriptor(Descriptor):
    """Makes tables and lengths safe, and calls `varlen_attn_out`. Nothing waits for the device."""

    def __init__(self, request: Request, skipped: torch.Tensor) -> None:
        self._device, self._skipped = request.device, skipped
        self._window = window_size(request.args["causal"], request.args["window"])

    def __call__(self, *values: Any) -> None:
        """Attend, on the current stream of the tensors' device."""
        args = dict(zip(_NAMES, values, strict=True))
        with torch.cuda.device(self._device):
            batch = Batch.of(args)
            self._skipped.add_(batch.wrong)
            sums, nothing = self._attend(args, batch), batch.sees_nothing[:, None]
            args["out"].masked_fill_(nothing[..., None], 0)  # also where nothing was written
            if args["lse"] is not None:
                args["lse"].copy_(sums.transpose(0, 1)).masked_fill_(nothing, -torch.inf)

    def _attend(self, args: dict[str, Any], batch: Batch) -> torch.Tensor:
        """Write results, and return logarithms of sums, ``[Hq, N]``."""
        most = 1 if args["cu_query_lens"] is None else args["max_query_len"]
        out, q, k_cache, v_cache = (args[name].detach() for name in ("out", "q", "k_cache", "v_cache"))
        _, sums = varlen_attn_out(
            out,
            q,
            k_cache,
            v_cache,
            batch.ends,
            None,
            most,
            batch.table.shape[1] * k_cache.shape[1],
            return_aux=AuxRequest(lse=True),
            scale=args["scale"],
            window_size=self._window,
            enable_gqa=True,
            seqused_k=batch.lens,
            block_table=batch.table,
        )
        return sums


class PagedAttention(Kernel):
    """Prepares `PagedAttentionDescriptor`.

    Args:
        skipped: returns a device's count of what is out of range, int64 ``[]``.
        capability: returns the compute capability of a device.
        active: returns the name of the flash attention that torch runs.
    """

    def __init__(
        self,
        skipped: Callable[[torch.device], torch.Tensor],
        capability: Callable[[torch.device], tuple[int, int]] = torch.cuda.get_device_capability,
        active: Callable[[], str | None] = current_flash_attention_impl,
    ) -> None:
        self._skipped, self._capability, self._active = skipped, capability, active

    def supports(self, request: Request) -> Sequence[str]:
        """Serve what torch has kernels for."""
        return reasons(request, self._capability(request.device), self._active())

    def prepare(self, request: Request) -> Descriptor:
        """Make sure that the device has a count."""
        return PagedAttentionDescriptor(request, self._skipped(request.device))
