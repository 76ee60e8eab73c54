"""Tensors cut out of known bytes.

Every tensor of a test lies in an arena: memory full of random bytes, with a margin on both sides. An op is run on it, the
reference on a copy, and then all bytes are compared: places that were not addressed, gaps between rows, margins, and the
inputs. Random bytes make odd floats (NaN payloads, infinities, subnormals) of themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from kvdock_conformance.cases.drawing import Drawing, View, strides_of
from kvdock_conformance.checking.memory import BITS, filled
from kvdock_conformance.checking.rooms import MARGIN

__all__ = ["MARGIN", "Arena", "Copy", "Memory", "bits_of", "strides_of"]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers in host memory, to compare."""
    return tensor.detach().view(BITS[tensor.element_size()]).cpu()


@attrs.define(eq=False)
class Arena:
    """Random bytes between two margins. ``at`` is where the first tensor starts."""

    bytes: torch.Tensor
    at: int

    @classmethod
    def of(cls, size: int, device: str, seed: int, shift: int) -> Arena:
        """Make an arena for ``size`` bytes whose storage starts ``shift`` bytes behind a 64-byte boundary (host only)."""
        return cls(filled({"bytes": size, "seed": seed, "shift": shift}, torch.device(device)), MARGIN)

    def cut(self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], at: int) -> torch.Tensor:
        """Return a tensor whose first element is byte ``at``."""
        typed = self.bytes[at : at + (len(self.bytes) - at) // dtype.itemsize * dtype.itemsize].view(dtype)
        return typed.as_strided(tuple(shape), tuple(strides))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies here."""
        return tensor.untyped_storage().data_ptr() == self.bytes.untyped_storage().data_ptr()


class Memory:
    """The arenas of one test.

    Args:
        device: where they lie.
        seed: of the random bytes.
    """

    def __init__(self, device: str = "cpu", seed: int = 0) -> None:
        self.device = device
        self.arenas: list[Arena] = []
        self._seed = seed

    def tensor(
        self,
        dtype: torch.dtype,
        shape: Sequence[int],
        *,
        order: Sequence[int] | None = None,
        gaps: Sequence[int] | None = None,
        offset: int = 0,
        shift: int = 0,
        device: str | None = None,
    ) -> torch.Tensor:
        """Return a tensor full of random bits.

        Args:
            dtype: its dtype.
            shape: its sizes.
            order: its dims from the outermost to the innermost in memory.
            gaps: free elements behind each dim.
            offset: bytes between a 64-byte boundary and its first element, besides ``shift``.
            shift: bytes between a 64-byte boundary and the start of its storage.
            device: where it lies; by default where the memory does.
        """
        strides = strides_of(shape, order or range(len(shape)), gaps or [0] * len(shape))
        elements = 1 + sum(max(size - 1, 0) * stride for size, stride in zip(shape, strides, strict=True))
        self._seed += 1
        arena = Arena.of(elements * dtype.itemsize + offset, device or self.device, self._seed, shift)
        self.arenas.append(arena)
        return arena.cut(dtype, shape, strides, arena.at + offset)

    def index(self, values: Any, dtype: torch.dtype = torch.int64, *, step: int = 1, device: str | None = None) -> torch.Tensor:
        """Return an index tensor with these values, every ``step``-th place of its memory."""
        content = torch.tensor(values, dtype=dtype)
        index = self.tensor(dtype, (*content.shape, step), device=device)[..., 0]
        index.copy_(content)
        return index

    def holding(self, tensor: torch.Tensor) -> int | None:
        """Return which arena a tensor lies in, or None."""
        return next((i for i, arena in enumerate(self.arenas) if arena.holds(tensor)), None)

    def real(self, drawing: Drawing, *views: View) -> tuple[torch.Tensor, ...]:
        """Return tensors that the kit has drawn, each where it was drawn, in arenas of this memory."""
        first = len(self.arenas)
        for arena in drawing.arenas:
            self._seed += 1
            self.arenas.append(Arena(filled({**arena, "seed": self._seed}, torch.device(self.device)), MARGIN))
        places = [(self.arenas[first + view.arena], view) for view in views]
        return tuple(arena.cut(getattr(torch, v.dtype), v.shape, v.strides, arena.at + v.offset) for arena, v in places)

    def copy(self) -> Copy:
        """Return a copy of all bytes, in host memory."""
        return Copy(self, [Arena(arena.bytes.cpu().clone(), arena.at) for arena in self.arenas])


@attrs.frozen(eq=False)
class Copy:
    """All bytes of a memory at one time, to run the reference on, and to compare with."""

    memory: Memory
    arenas: list[Arena]

    def twin(self, value: Any) -> Any:
        """Return the same view of the copy; what lies in no arena as it is, in host memory."""
        if not isinstance(value, torch.Tensor):
            return value
        place = self.memory.holding(value)
        if place is None:
            return value.cpu()
        at = value.data_ptr() - self.memory.arenas[place].bytes.data_ptr() if value.numel() else 0
        return self.arenas[place].cut(value.dtype, value.shape, value.stride(), at)

    def restore(self) -> None:
        """Write the copied bytes back."""
        for arena, kept in zip(self.memory.arenas, self.arenas, strict=True):
            arena.bytes.copy_(kept.bytes)

    def assert_same(self, what: str) -> None:
        """Compare every byte of the memory with this copy."""
        for number, (arena, kept) in enumerate(zip(self.memory.arenas, self.arenas, strict=True)):
            wrong = (arena.bytes.cpu() != kept.bytes).nonzero().flatten()
            if len(wrong):
                first, last, size = int(wrong[0]) - arena.at, int(wrong[-1]) - arena.at, len(kept.bytes) - 2 * MARGIN
                raise AssertionError(f"{what}: {len(wrong)} bytes differ in arena {number} of {size}: from byte {first} to {last}")
