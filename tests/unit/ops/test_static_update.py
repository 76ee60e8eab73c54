"""`static_update_`: where each row's new positions go, and which rows are refused."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import numpy as np
import pytest
import torch

import kvdock
from opskit import Memory, Target, check, noting

INT32, INT64 = torch.int32, torch.int64


@attrs.frozen
class Static:
    """Sizes of a static cache."""

    rows: int = 6
    length: int = 10
    hk: int = 2
    dk: int = 8
    hv: int = 2
    dv: int = 8
    dtype: torch.dtype = torch.bfloat16

    def caches(self, memory: Memory, layout: str = "[B, H, S, D]") -> list[torch.Tensor]:
        """Return the two caches in one of `CACHES`."""
        shapes = ((self.rows, self.hk, self.length, self.dk), (self.rows, self.hv, self.length, self.dv))
        return [memory.tensor(self.dtype, shape, **CACHES[layout]) for shape in shapes]

    def tokens(self, memory: Memory, rows: int, new: int, layout: str = "[B, H, s, D]") -> list[torch.Tensor]:
        """Return ``k`` and ``v`` in one of `TOKENS`."""
        shapes = ((rows, self.hk, new, self.dk), (rows, self.hv, new, self.dv))
        return [memory.tensor(self.dtype, shape, **TOKENS[layout]) for shape in shapes]


CACHES: dict[str, dict[str, Any]] = {
    "[B, H, S, D]": {},
    "[B, S, H, D]": {"order": (0, 2, 1, 3)},
    "[H, B, S, D]": {"order": (1, 0, 2, 3)},
    "[S, B, H, D]": {"order": (2, 0, 1, 3)},
    "padded rows": {"gaps": (0, 24, 0, 0)},
    "padded positions": {"gaps": (0, 0, 0, 8)},
    "odd steps": {"gaps": (0, 1, 3, 5)},
    "odd address": {"offset": 2},
    "even address in an odd storage": {"offset": 2, "shift": 62},
}
TOKENS: dict[str, dict[str, Any]] = {
    "[B, H, s, D]": {},
    "[B, s, H, D]": {"order": (0, 2, 1, 3)},
    "odd steps": {"gaps": (0, 0, 3, 1)},
    "odd address": {"offset": 2},
}
G = Static()

LENGTHS = {  # of a cache of 10, for 3 new positions
    "zero": 0,
    "some": 4,
    "exactly full": 7,
    "[] zero": torch.tensor(0),
    "[] exactly full": torch.tensor(7),
    "[1]": torch.tensor([5]),
    "[B]": torch.tensor([0, 7, 3, 1, 6, 2]),
    "[B] all alike": torch.tensor([4] * 6),
}
BEYOND = {"one past full": 8, "at the end": 10, "beyond the end": 11, "-1": -1, "2**31 - 1": 2**31 - 1, "-2**31": -(2**31)}
HUGE = {"2**62": 2**62, "2**63 - 1": 2**63 - 1, "2**63 - 3": 2**63 - 3, "-2**63": -(2**63)}


def placed(memory: Memory, lengths: Any, dtype: torch.dtype = INT64) -> Any:
    """Put lengths into memory where they come as a tensor."""
    return memory.index(lengths.tolist(), dtype) if isinstance(lengths, torch.Tensor) else lengths


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("dtype", [INT32, INT64], ids=str)
def test_lengths(target: Target, memory: Memory, lengths: Any, dtype: torch.dtype) -> None:
    assert check(target, memory, "static_update_", *G.caches(memory), *G.tokens(memory, 6, 3), placed(memory, lengths, dtype)) == []


@pytest.mark.parametrize("new", [1, 2, 10])
def test_new_positions(target: Target, memory: Memory, new: int) -> None:
    caches = G.caches(memory)
    for lengths in (0, 10 - new, torch.tensor(10 - new), torch.tensor([0]), torch.tensor([min(i, 10 - new) for i in range(6)])):
        check(target, memory, "static_update_", *caches, *G.tokens(memory, 6, new), placed(memory, lengths))


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 6])
def test_a_smaller_batch_than_allocated(target: Target, memory: Memory, rows: int) -> None:
    """The first rows are written, the others are not."""
    caches, tokens = G.caches(memory), G.tokens(memory, rows, 3)
    for lengths in (2, torch.tensor(3), torch.tensor([1]), torch.arange(rows)):
        check(target, memory, "static_update_", *caches, *tokens, placed(memory, lengths))


@pytest.mark.parametrize(("rows", "new"), [(0, 3), (6, 0), (0, 0)])
@pytest.mark.parametrize("lengths", [0, 10, torch.tensor(4), torch.tensor([4])], ids=["0", "full", "[]", "[1]"])
def test_nothing_new_changes_nothing(target: Target, memory: Memory, rows: int, new: int, lengths: Any) -> None:
    check(target, memory, "static_update_", *G.caches(memory), *G.tokens(memory, rows, new), placed(memory, lengths))


def test_no_rows_with_a_length_for_each(target: Target, memory: Memory) -> None:
    check(target, memory, "static_update_", *G.caches(memory), *G.tokens(memory, 0, 3), memory.index([0])[:0])


@pytest.mark.parametrize("bad", (BEYOND | HUGE).values(), ids=BEYOND | HUGE)
def test_a_length_that_does_not_fit(target: Target, bad: int) -> None:
    """On the host it raises and changes nothing. On a device the row is skipped whole, and its positions are counted."""
    kinds: list[Any] = [bad, torch.tensor(bad), torch.tensor([bad])]
    kinds += [torch.tensor([bad if row == at else row for row in range(6)]) for at in (0, 3, 5)]
    for kind, dtype in itertools.product(kinds, [INT64] if bad in HUGE.values() else [INT32, INT64]):
        with noting(kind=kind, dtype=dtype, device=target.device) as memory:
            skipped = check(target, memory, "static_update_", *G.caches(memory), *G.tokens(memory, 6, 3), placed(memory, kind, dtype))
            assert len(skipped) in (3, 18)


def test_all_rows_beyond_and_more_new_positions_than_there_are(target: Target, memory: Memory) -> None:
    caches, tokens = G.caches(memory), G.tokens(memory, 6, 11)
    for lengths in (0, torch.tensor(0), torch.tensor([0, 1, 2, 3, 4, -5])):
        assert len(check(target, memory, "static_update_", *caches, *tokens, placed(memory, lengths))) == 66


def test_the_message_names_row_room_and_fix(target: Target, memory: Memory) -> None:
    caches, tokens = G.caches(memory), G.tokens(memory, 6, 3)
    with pytest.raises(kvdock.IndexRangeError) as caught:
        kvdock.ops.static_update_(*caches, *tokens, 8)
    assert str(caught.value) == (
        "static_update_: cache_lengths: expected between 0 and 7: 3 new positions must fit into 10, got 8. "
        "Fix: make the cache longer (max_cache_len), or pass fewer new positions"
    )
    lengths = memory.index([0, 1, 2, 8, 9, 0])
    if target.host_reads(lengths):
        with pytest.raises(kvdock.IndexRangeError, match=r"static_update_: cache_lengths\[3\]: .* got 8\. Fix: "):
            kvdock.ops.static_update_(*caches, *tokens, lengths)


@pytest.mark.parametrize("cache", CACHES)
def test_layouts(target: Target, cache: str) -> None:
    for layout, lengths in itertools.product(TOKENS, (0, 7, torch.tensor([4]), torch.tensor([5, 0, 7]), torch.arange(6))):
        with noting(tokens=layout, lengths=lengths, device=target.device) as memory:
            rows = len(lengths) if isinstance(lengths, torch.Tensor) and len(lengths) > 1 else 6
            caches = G.caches(memory, cache)
            check(target, memory, "static_update_", *caches, *G.tokens(memory, rows, 3, layout), placed(memory, lengths))
            check(target, memory, "static_update_", *caches, *G.tokens(memory, rows, 1, layout), placed(memory, lengths))


SIZES = {
    "Hk 4, Hv 1": Static(hk=4, hv=1),
    "Dk 192, Dv 128": Static(dk=192, dv=128),
    "3 x 5 and 2 x 46": Static(hk=3, dk=5, hv=2, dv=46),
    "dim 1": Static(dk=1, dv=1),
    "one head": Static(hk=1, hv=1),
    "one row": Static(rows=1),
    "one position": Static(length=1),
    "one element": Static(1, 1, 1, 1, 1, 1),
    "float64": Static(dtype=torch.float64, dk=3, dv=5),
}


@pytest.mark.parametrize("g", SIZES.values(), ids=SIZES)
def test_sizes(target: Target, memory: Memory, g: Static) -> None:
    caches, new = g.caches(memory), min(3, g.length)
    for lengths in (0, torch.tensor([g.length - new]), torch.arange(g.rows) % (g.length - new + 1)):
        check(target, memory, "static_update_", *caches, *g.tokens(memory, g.rows, new), placed(memory, lengths))


def test_rows_shared_among_threads(target: Target, memory: Memory) -> None:
    g = Static(rows=8, length=64, hk=8, dk=64, hv=8, dv=64)
    caches = g.caches(memory)
    for lengths in (5, torch.tensor([9]), torch.arange(8)):
        check(target, memory, "static_update_", *caches, *g.tokens(memory, 8, 40), placed(memory, lengths))


def test_strided_and_expanded_lengths(target: Target, memory: Memory) -> None:
    caches, tokens = G.caches(memory), G.tokens(memory, 6, 3)
    check(target, memory, "static_update_", *caches, *tokens, memory.index([3, 1, 4, 1, 5, 2], step=3))
    check(target, memory, "static_update_", *caches, *tokens, memory.index([3]).expand(6))


@pytest.mark.parametrize("length", [np.int64(4), np.int32(4), np.uint8(4)], ids=lambda length: type(length).__name__)
def test_integers_of_numpy_are_ints(target: Target, memory: Memory, length: Any) -> None:
    caches, tokens = G.caches(memory), G.tokens(memory, 6, 3)
    before = memory.copy()
    kvdock.ops.static_update_(*caches, *tokens, 4)
    after = memory.copy()
    before.restore()
    kvdock.ops.static_update_(*caches, *tokens, length)
    after.assert_same("static_update_")


def test_an_int_of_a_class_of_its_own(target: Target, memory: Memory) -> None:
    class Length(int):
        pass

    check(target, memory, "static_update_", *G.caches(memory), *G.tokens(memory, 6, 3), Length(5))


def test_torchs_default_device_does_not_matter(target: Target, memory: Memory) -> None:
    """Indices made on the default device would address nothing, or another device's memory."""
    caches, tokens = G.caches(memory), G.tokens(memory, 6, 3)
    for lengths in (4, torch.tensor([3]), torch.tensor([5, 0, 7, 1, 2, 6])):
        placed_lengths = placed(memory, lengths)
        with torch.device("meta"):
            kvdock.ops.static_update_(*caches, *tokens, placed_lengths)
        after = memory.copy()
        check(target, memory, "static_update_", *caches, *tokens, placed_lengths)
        after.assert_same("a second time")


def test_an_op_that_knows_its_caches_does_the_same(target: Target, memory: Memory) -> None:
    caches, tokens = G.caches(memory), G.tokens(memory, 6, 3)
    named = "portable" if target.name == "portable" else None
    update = target.runtime.dispatcher.op("static_update_").bind(*caches, named=named)
    for lengths in (0, 4, torch.tensor(7), torch.tensor([3]), torch.tensor([5, 0, 7, 1, 2, 6])):
        where, before = placed(memory, lengths), memory.copy()
        update(*tokens, where)
        after = memory.copy()
        before.restore()
        check(target, memory, "static_update_", *caches, *tokens, where)
        after.assert_same("bound and direct")
    with pytest.raises(kvdock.IndexRangeError, match=r"static_update_: cache_lengths: .* got 8"):
        update(*tokens, 8)
