"""One call of each op on a device, in plain tensors: what is read may be changed before it, and what must come of it is known.

All take slots from 0 to 31. Negative ones are padding, but in `Update`, where nothing is: there they are out of range.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

import kvdock
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.target import Target

__all__ = ["CALLS", "CopyCall", "DeviceCall", "ReadCall", "UpdateCall", "WriteCall"]


class DeviceCall(ABC):
    """A call.

    Args:
        device: where it is made.
        slots: slots of the tokens, or what they come to in this op.
        heads: heads of the pool: another number is another plan.
    """

    sources: tuple[torch.Tensor, ...]
    """What is read, of keys and of values."""

    written: tuple[torch.Tensor, ...]
    """What is written, of keys and of values; zeros before the call."""

    names: Sequence[str] = "kv"
    """What to call what is written."""

    index: torch.Tensor
    """The tensor that holds slots, lengths, or pairs."""

    def __init__(self, device: torch.device, slots: Sequence[int], heads: int = 2) -> None:
        self.slots = list(slots)
        self._numbers = torch.Generator().manual_seed(heads)  # not torch's own, whose state is the process's
        self.make(device, heads)
        self.index = self.indices().to(device)

    @abstractmethod
    def make(self, device: torch.device, heads: int) -> None:
        """Make sources and what is written."""

    def values(self, shape: Sequence[int]) -> torch.Tensor:
        """Return other random values at each time, in host memory, the same in each run."""
        return torch.randn(shape, generator=self._numbers)

    @abstractmethod
    def run(self) -> None:
        """Make the call."""

    def expected(self, source: torch.Tensor) -> torch.Tensor:
        """Return what must have been written, from what was read, both in host memory."""
        raise NotImplementedError

    def indices(self) -> torch.Tensor:
        """Return the index argument for the slots, in host memory."""
        return torch.tensor(self.slots)

    def skips(self) -> int:
        """Return how many writes must be counted as skipped for the slots."""
        return sum(slot >= 32 for slot in self.slots)

    def tolerance(self, got: torch.Tensor) -> float:
        """Return how far what was written may be off."""
        return 0.0

    def call(self, target: Target) -> None:
        """Make the call by the backend."""
        with kvdock.use_backend(target.name):
            self.run()

    def take(self, slots: Sequence[int]) -> None:
        """Go on with other slots, at the same address, and with nothing written."""
        self.slots = list(slots)
        self.index.copy_(self.indices())
        for rows in self.written:
            rows.zero_()

    def refill(self) -> None:
        """Change what is read."""
        for rows in self.sources:
            rows.copy_(self.values(rows.shape))

    def right(self) -> list[torch.Tensor]:
        """Return what must be written by what the sources hold now."""
        return [self.expected(rows.cpu()) for rows in self.sources]

    def check(self, what: str, right: Sequence[torch.Tensor] | None = None) -> None:
        """Compare what was written with what must be.

        Args:
            what: what was done, for the error.
            right: what must be written; None for what the sources say now.

        Raises:
            NonconformanceError: a place differs.
        """
        for name, got, expected in zip(self.names, self.written, self.right() if right is None else right, strict=True):
            by = self.tolerance(got)
            wrong = (~torch.isclose(got.cpu(), expected, rtol=by, atol=by)).flatten(1).any(1).nonzero().flatten().tolist()
            if wrong:
                raise NonconformanceError(f"{what}: places of {name} that differ", expected="none", got=wrong)


class WriteCall(DeviceCall):
    """A write of rows into a pool."""

    def make(self, device: torch.device, heads: int) -> None:
        """Make pools and tokens."""
        self.k_cache, self.v_cache = (torch.zeros(8, 4, heads, 16, device=device) for _ in range(2))
        self.k, self.v = (self.values((len(self.slots), heads, 16)).to(device) for _ in range(2))
        self.sources, self.written = (self.k, self.v), (self.k_cache.flatten(0, 1), self.v_cache.flatten(0, 1))

    def run(self) -> None:
        """Write."""
        kvdock.ops.paged_caching_(self.k_cache, self.v_cache, self.k, self.v, self.index)

    def expected(self, source: torch.Tensor) -> torch.Tensor:
        """Return the pool, slot by slot."""
        pool = torch.zeros(32, *source.shape[1:])
        for row, slot in zip(source, self.slots, strict=True):
            if 0 <= slot < 32:
                pool[slot] = row
        return pool


class ReadCall(DeviceCall):
    """A read of rows from a pool."""

    def make(self, device: torch.device, heads: int) -> None:
        """Make pools and outputs."""
        self.k_cache, self.v_cache = (self.values((8, 4, heads, 16)).to(device) for _ in range(2))
        self.sources = (self.k_cache, self.v_cache)
        self.written = tuple(torch.zeros(len(self.slots), heads, 16, device=device) for _ in range(2))

    def run(self) -> None:
        """Read."""
        kvdock.ops.gather_paged(self.k_cache, self.v_cache, self.index, out=(self.written[0], self.written[1]))

    def expected(self, source: torch.Tensor) -> torch.Tensor:
        """Return the rows; what no slot of the pool stands for is zeros."""
        rows = source.flatten(0, 1)
        return torch.stack([rows[slot] if 0 <= slot < 32 else torch.zeros_like(rows[0]) for slot in self.slots])

    def skips(self) -> int:
        """Return 0: reads are not counted."""
        return 0


class UpdateCall(DeviceCall):
    """A write of one new position into each row of a static cache; the slots are the rows' lengths."""

    def make(self, device: torch.device, heads: int) -> None:
        """Make caches and new positions."""
        self.k_cache, self.v_cache = (torch.zeros(len(self.slots), heads, 32, 16, device=device) for _ in range(2))
        self.sources = tuple(self.values((len(self.slots), heads, 1, 16)).to(device) for _ in range(2))
        self.written = (self.k_cache, self.v_cache)

    def run(self) -> None:
        """Write."""
        kvdock.ops.static_update_(self.k_cache, self.v_cache, self.sources[0], self.sources[1], self.index)

    def expected(self, source: torch.Tensor) -> torch.Tensor:
        """Return the cache."""
        rows, heads, _, dim = source.shape
        cache = torch.zeros(rows, heads, 32, dim)
        for row, length in enumerate(self.slots):
            if 0 <= length < 32:
                cache[row, :, length] = source[row, :, 0]
        return cache

    def skips(self) -> int:
        """Return how many rows are out of range, of one position each."""
        return sum(not 0 <= length < 32 for length in self.slots)


class CopyCall(DeviceCall):
    """A copy of the first four blocks of a pool, in turns, to others; a slot is a block behind those."""

    def make(self, device: torch.device, heads: int) -> None:
        """Make pools."""
        self.k_cache, self.v_cache = (torch.zeros(36, 4, heads, 16, device=device) for _ in range(2))
        self.sources, self.written = (self.k_cache[:4], self.v_cache[:4]), (self.k_cache[4:], self.v_cache[4:])
        self.refill()

    def indices(self) -> torch.Tensor:
        """Return the pairs."""
        return torch.tensor([(number % 4, 4 + slot if slot >= 0 else -1) for number, slot in enumerate(self.slots)])

    def run(self) -> None:
        """Copy."""
        kvdock.ops.copy_blocks_(self.k_cache, self.v_cache, self.index)

    def expected(self, source: torch.Tensor) -> torch.Tensor:
        """Return the blocks behind the first four."""
        blocks = torch.zeros(32, *source.shape[1:])
        for number, slot in enumerate(self.slots):
            if 0 <= slot < 32:
                blocks[slot] = source[number % 4]
        return blocks


CALLS: Mapping[str, type[DeviceCall]] = {
    "paged_caching_": WriteCall,
    "static_update_": UpdateCall,
    "gather_paged": ReadCall,
    "copy_blocks_": CopyCall,
}
"""By op that moves bytes."""
