"""`static_update_` under the interpreter: lengths, sizes, memory orders and addresses."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import pytest
import torch

from opskit import Memory, Target, check, noting


@attrs.frozen
class Static:
    """Sizes of a static cache."""

    rows: int = 4
    length: int = 10
    hk: int = 2
    dk: int = 8
    hv: int = 2
    dv: int = 8
    dtype: torch.dtype = torch.bfloat16

    def caches(self, memory: Memory, **layout: Any) -> list[torch.Tensor]:
        return [memory.tensor(self.dtype, (self.rows, h, self.length, d), **layout) for h, d in ((self.hk, self.dk), (self.hv, self.dv))]

    def tokens(self, memory: Memory, rows: int, new: int, **layout: Any) -> list[torch.Tensor]:
        return [memory.tensor(self.dtype, (rows, h, new, d), **layout) for h, d in ((self.hk, self.dk), (self.hv, self.dv))]


G = Static()
LENGTHS: dict[str, Any] = {
    "int": 4,
    "int, full": 7,
    "int, beyond": 8,
    "int, negative": -1,
    "int, largest": 2**63 - 1,
    "[]": torch.tensor(5),
    "[], beyond": torch.tensor(8),
    "[1]": torch.tensor([7]),
    "[1], negative": torch.tensor([-1]),
    "[B]": torch.tensor([0, 7, 3, 1]),
    "[B], some beyond": torch.tensor([8, 2, -1, 10]),
    "[B], extremes": torch.tensor([2**63 - 1, -(2**63), 2**63 - 3, 2]),
    "[B], 2**31": torch.tensor([2**31 - 1, 2**31, 2**32, 2**40]),
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_lengths(target: Target, lengths: Any) -> None:
    narrow = not isinstance(lengths, torch.Tensor) or (int(lengths.abs().max()) < 2**31 and int(lengths.min()) > -(2**31))
    for dtype, step in itertools.product([torch.int32, torch.int64] if narrow else [torch.int64], (1, 3)):
        with noting(dtype=dtype, step=step) as memory:
            placed = memory.index(lengths.tolist(), dtype, step=step) if isinstance(lengths, torch.Tensor) else lengths
            check(target, memory, "static_update_", *G.caches(memory), *G.tokens(memory, 4, 3), placed)


@pytest.mark.parametrize(("rows", "new"), [(1, 1), (2, 10), (3, 5), (4, 1), (4, 11), (0, 3), (4, 0)])
def test_batches(target: Target, rows: int, new: int) -> None:
    for lengths in (torch.tensor(0), torch.tensor([0]), torch.arange(rows)):
        with noting(lengths=lengths) as memory:
            placed = memory.index(lengths.tolist())
            check(target, memory, "static_update_", *G.caches(memory), *G.tokens(memory, rows, new), placed)


SIZES = {
    "Hk 4, Hv 1": Static(hk=4, hv=1),
    "Dk 192, Dv 128": Static(dk=192, dv=128),
    "3 x 64": Static(hk=3, dk=64, hv=3, dv=64),
    "3 x 5 and 2 x 46": Static(hk=3, dk=5, hv=2, dv=46),
    "dim 1": Static(dk=1, dv=1),
    "dim 80": Static(dk=80, dv=80),
    "one of each": Static(1, 1, 1, 1, 1, 1),
    "float64": Static(dtype=torch.float64, dk=3, dv=5),
    "more than a chunk": Static(rows=2, length=3, hk=65, dk=130, hv=3, dv=1367),
}


@pytest.mark.parametrize("g", SIZES.values(), ids=SIZES)
def test_sizes(target: Target, memory: Memory, g: Static) -> None:
    caches, new = g.caches(memory), min(2, g.length)
    for lengths in (0, memory.index([g.length - new]), memory.index([row % (g.length - new + 1) for row in range(g.rows)])):
        check(target, memory, "static_update_", *caches, *g.tokens(memory, g.rows, new), lengths)


LAYOUTS: dict[str, dict[str, Any]] = {
    "[B, H, S, D]": {},
    "[B, S, H, D]": {"order": (0, 2, 1, 3)},
    "[H, B, S, D]": {"order": (1, 0, 2, 3)},
    "odd steps": {"gaps": (0, 1, 3, 5)},
    "at 2 bytes": {"offset": 2},
    "at 4 bytes": {"offset": 4},
    "at 8 bytes": {"offset": 8},
}


@pytest.mark.parametrize("cache", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(target: Target, cache: dict[str, Any]) -> None:
    for tokens in LAYOUTS.values():
        with noting(tokens=tokens) as memory:
            caches = G.caches(memory, **cache)
            for lengths in (4, memory.index([0, 7, 3, 8])):
                check(target, memory, "static_update_", *caches, *G.tokens(memory, 4, 3, **tokens), lengths)
