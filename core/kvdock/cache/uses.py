"""How what a layer keeps is used: written, read and attended to, by the ops for it. Another way to use a layer is another class here.

Which it is follows from the buffers of a part alone, so that a kind of layer that keeps keys and values, or latents, has nothing to add.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, cast

import torch

from kvdock.cache.interface import OpSource
from kvdock.errors import ArgumentValueError
from kvdock.layers.interface import Part
from kvdock.ops.api import new_latents, output_pair

__all__ = ["KeysAndValues", "Latents", "Use", "attention_arguments", "check_latent_scale", "use_of"]

Pair = tuple[torch.Tensor, torch.Tensor]


class Use(ABC):
    """A way to use a part of a layer, bound to its memory.

    Args:
        pair: what attention reads as keys and values, see `attended`.
        ops: where the ops come from.
        named: backend to use for good, or None.
    """

    def __init__(self, pair: Pair, ops: OpSource, named: str | None) -> None:
        self.pair = pair
        self._attend = ops.op("paged_attention").bind(*pair, named=named)

    @staticmethod
    @abstractmethod
    def serves(part: Part) -> bool:
        """Whether a part is used so."""

    @staticmethod
    @abstractmethod
    def attended(named: Mapping[str, torch.Tensor], part: Part) -> Pair:
        """Return what attention reads as keys and values, ``[num_blocks, block_size, heads, dim]``, of a part's buffers."""

    @abstractmethod
    def write(self, first: torch.Tensor, second: torch.Tensor, slot_mapping: torch.Tensor) -> Pair:
        """Write new tokens, and return the pair. See `kvdock.PagedKVCache.update`."""

    @abstractmethod
    def read(self, slot_mapping: torch.Tensor, out: Pair | None) -> Pair:
        """Read slots. See `kvdock.PagedKVCache.gather`."""

    def attend(self, q: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
        """Attend to it. See `kvdock.PagedKVCache.attend`."""
        found = self._attend(q, block_table, seq_lens, *attention_arguments(**options))
        return cast(torch.Tensor, found)


def attention_arguments(
    *,
    cu_query_lens: torch.Tensor | None = None,
    max_query_len: int = 1,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[Any, ...]:
    """Return what `paged_attention` takes behind lengths, in its schema's order, from what `kvdock.PagedKVCache.attend` takes."""
    return cu_query_lens, starts, sinks, None, None, max_query_len, scale, True, window, softcap, out, None


class KeysAndValues(Use):
    """Keys and values of one dtype, each of heads of its own."""

    def __init__(self, pair: Pair, ops: OpSource, named: str | None) -> None:
        super().__init__(pair, ops, named)
        self._write, self._read = (ops.op(name).bind(*pair, named=named) for name in ("paged_caching_", "gather_paged"))

    @staticmethod
    def serves(part: Part) -> bool:
        """Two buffers, ``k`` and ``v``, of ``[heads, dim]`` a token."""
        alike = len({buffer.dtype for buffer in part.buffers}) == 1 and all(len(buffer.shape) == 2 for buffer in part.buffers)
        return alike and not part.retention.is_state and [buffer.name for buffer in part.buffers] == ["k", "v"]

    @staticmethod
    def attended(named: Mapping[str, torch.Tensor], part: Part) -> Pair:
        """Return both as they are."""
        return named["k"], named["v"]

    def write(self, first: torch.Tensor, second: torch.Tensor, slot_mapping: torch.Tensor) -> Pair:
        """Write keys and values."""
        return self._write(first, second, slot_mapping, None, None) or self.pair  # None, but what is traced returns views of its own

    def read(self, slot_mapping: torch.Tensor, out: Pair | None) -> Pair:
        """Read keys and values."""
        k_out, v_out = (None, None) if out is None else output_pair(out)
        return cast(Pair, self._read(slot_mapping, None, None, k_out, v_out))


class Latents(Use):
    """Rows of latents, as `kvdock.MLALayerSpec` has them: one key head, whose values are the first elements of the keys."""

    def __init__(self, pair: Pair, ops: OpSource, named: str | None) -> None:
        super().__init__(pair, ops, named)
        self._write, self._read = (ops.op(name).bind(pair[0], named=named) for name in ("mla_caching_", "mla_gather"))

    @staticmethod
    def serves(part: Part) -> bool:
        """One buffer whose rows say how many of their elements are values."""
        return len(part.buffers) == 1 and part.buffers[0].values > 0 and not part.retention.is_state

    @staticmethod
    def attended(named: Mapping[str, torch.Tensor], part: Part) -> Pair:
        """Return the rows with a dim for their one head, and of these the first elements."""
        rows = named[part.buffers[0].name].unsqueeze(2)
        return rows, rows[..., : part.buffers[0].values]

    def write(self, first: torch.Tensor, second: torch.Tensor, slot_mapping: torch.Tensor) -> Pair:
        """Write latents and rotary parts."""
        written = self._write(first, second, slot_mapping, None)
        return self.pair if written is None else (written[0], written[0][..., : self.pair[1].shape[3]])  # a view of what is traced

    def read(self, slot_mapping: torch.Tensor, out: Pair | None) -> Pair:
        """Read latents and rotary parts."""
        kv_c, k_pe = new_latents(self.pair[0], slot_mapping, self.pair[1].shape[3]) if out is None else output_pair(out, "mla_gather")
        self._read(slot_mapping, None, kv_c, k_pe)
        return kv_c, k_pe

    def attend(self, q: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
        """Attend in the absorbed form."""
        check_latent_scale(options.get("scale"))
        return super().attend(q, block_table, seq_lens, options)


def check_latent_scale(scale: float | None) -> None:
    """Refuse attention to latents without a scale.

    Raises:
        ArgumentValueError: there is none.
    """
    if scale is None:
        expected = "a number, since rank + rope is no head's length"
        fix = "pass (head_dim without rotation + rope) ** -0.5, as the model's own attention has it"
        raise ArgumentValueError("MLAKVCache.attend: scale", expected=expected, got="None", fix=fix)


_USES: tuple[type[Use], ...] = (KeysAndValues, Latents)


def use_of(part: Part) -> type[Use] | None:
    """Return how a part is used, or None for what no op knows: states, and bytes in somebody's format."""
    return next((use for use in _USES if use.serves(part)), None)
