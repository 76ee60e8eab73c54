"""`static_update_`: what the kit cannot see: whole texts, integers of other classes, rows shared among threads, bound caches."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch

import kvdock
from opskit import TARGETS, Memory, Target, check


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

    def caches(self, memory: Memory) -> list[torch.Tensor]:
        """Return the two caches, ``[B, H, S, D]``."""
        shapes = ((self.rows, self.hk, self.length, self.dk), (self.rows, self.hv, self.length, self.dv))
        return [memory.tensor(self.dtype, shape) for shape in shapes]

    def tokens(self, memory: Memory, rows: int, new: int) -> list[torch.Tensor]:
        """Return ``k`` and ``v``, ``[B, H, s, D]``."""
        shapes = ((rows, self.hk, new, self.dk), (rows, self.hv, new, self.dv))
        return [memory.tensor(self.dtype, shape) for shape in shapes]


G = Static()
threads = pytest.mark.parametrize("target", TARGETS, indirect=True)


def placed(memory: Memory, lengths: Any, dtype: torch.dtype = torch.int64) -> Any:
    """Put lengths into memory where they come as a tensor."""
    return memory.index(lengths.tolist(), dtype) if isinstance(lengths, torch.Tensor) else lengths


def test_more_new_positions_than_there_are(target: Target, memory: Memory) -> None:
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


@threads
def test_rows_shared_among_threads(target: Target, memory: Memory) -> None:
    g = Static(rows=8, length=64, hk=8, dk=64, hv=8, dv=64)
    caches = g.caches(memory)
    for lengths in (5, torch.tensor([9]), torch.arange(8)):
        check(target, memory, "static_update_", *caches, *g.tokens(memory, 8, 40), placed(memory, lengths))


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
