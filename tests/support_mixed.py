"""Mixtures of kinds of layers, and caches of them as plain bytes: which of a memory each write may change, found slowly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

import kvdock
from kvdock.layers import Buffer, ChunkedLayerSpec, HybridLayerSpec, LayerGroup, LayerKind, OpaqueLayerSpec, SharedLayerSpec, StateLayerSpec

Bytes = npt.NDArray[np.uint8]

CANARY = 512
"""Bytes of a known pattern before and behind a memory."""

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16

small = st.integers(1, 3)
HEADS = st.builds(kvdock.LayerSpec, small, small, st.integers(1, 9), st.integers(1, 9), st.sampled_from([None, None, 5, 9]))
STATES = st.builds(
    lambda rows, columns, dtype: StateLayerSpec([Buffer("conv", (rows, columns), BF16), Buffer("recurrent", (columns,), dtype)]),
    st.integers(1, 40),
    st.integers(1, 9),
    st.sampled_from([F32, F16, torch.float64, torch.uint8]),
)
KINDS: st.SearchStrategy[LayerKind] = st.one_of(
    HEADS,
    STATES,
    st.builds(ChunkedLayerSpec, small, small, st.integers(1, 9), st.integers(1, 9), st.just(8)),
    st.builds(kvdock.MLALayerSpec, st.integers(1, 12), st.integers(1, 5)),
    st.builds(OpaqueLayerSpec, st.integers(1, 20)),
    st.builds(lambda heads, state: HybridLayerSpec([heads, state]), HEADS, STATES),
)


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[kvdock.KVSpec, dict[str, Any]]:
    """Draw layers of any kinds, some of which share an earlier one's, and a configuration of a few blocks that holds them."""
    layers = draw(st.lists(KINDS, min_size=1, max_size=6))
    for of in draw(st.lists(st.integers(0, len(layers) - 1), max_size=2)):
        layers.append(SharedLayerSpec(of))
    spec = kvdock.KVSpec(layers, 4096, draw(st.sampled_from([BF16, F16, F32])))
    options: dict[str, Any] = {
        "num_blocks": draw(st.integers(2, 4)),
        "block_size": draw(small),
        "head_layout": draw(st.sampled_from(kvdock.HeadLayout)),
        "alignment": draw(st.sampled_from([1, 1, 64, 256])),
        "keep_all": draw(st.booleans()),
    }
    return spec, options


def config_of(options: dict[str, Any]) -> kvdock.PagedKVCacheConfig:
    """Return the configuration."""
    return kvdock.PagedKVCacheConfig(**options)


def planned(spec: kvdock.KVSpec, options: dict[str, Any], rank: kvdock.RankInfo) -> Any:
    """Return the plan of a mixture in one memory, or None where its bytes cannot agree."""
    try:
        return kvdock.plan_blocks(spec, config_of(options), rank, in_one_memory=True)
    except kvdock.ArgumentValueError as error:
        if "whose bytes can agree" not in str(error):
            raise
        return None


def guarded(nbytes: int, alignment: int = 16) -> tuple[Bytes, torch.Tensor]:
    """Return random bytes with a memory of ``nbytes`` in them as a tensor, at such an address, and bytes on both sides."""
    whole = np.random.default_rng(nbytes).integers(0, 256, nbytes + 2 * CANARY + alignment, dtype=np.uint8)
    begin = CANARY + -(whole.ctypes.data + CANARY) % alignment
    return whole, torch.from_numpy(whole[begin : begin + nbytes])


@attrs.frozen
class Spot:
    """Where a buffer lies in each block, as the documents say it: one after another, each at a multiple of 16 bytes."""

    layer: int
    buffer: Buffer
    group: LayerGroup
    number: int
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.buffer.nbytes * self.group.block_size

    def token(self, offset: int, is_hnd: bool) -> list[int]:
        """Return the place in a block of each byte of a token, in the order of its row."""
        size = self.buffer.dtype.itemsize
        row = np.arange(self.buffer.nbytes)
        if not (is_hnd and len(self.buffer.shape) == 2):
            return list(self.begin + offset * self.buffer.nbytes + row)
        width = self.buffer.shape[1] * size
        return list(self.begin + (row // width * self.group.block_size + offset) * width + row % width)


def spots(groups: Sequence[LayerGroup]) -> list[Spot]:
    """Return all of them."""
    found = []
    for number, group in enumerate(groups):
        at = 0
        for (layer, _), part in zip(group.members, group.parts, strict=True):
            for buffer in part.buffers:
                found.append(Spot(layer, buffer, group, number, at))
                at = (found[-1].end + 15) // 16 * 16
    return found


def as_bytes(rows: torch.Tensor) -> Bytes:
    """Return the bytes of each row ``[T, ...]`` as ``[T, bytes]``."""
    found: Bytes = rows.contiguous().flatten(1).view(torch.uint8).numpy()
    return found
