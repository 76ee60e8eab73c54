"""What a manager does with blocks is good on every rank that shares the tokens: prefixes, forks, copies, cuts; and in other dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvdock
from kvdock.distributed import ContextShare
from support_shares import DIM, HEADS, Shared


def copied(ranks: Shared, pairs: Any) -> None:
    """Copy blocks in every pool: a manager's ids are those of each."""
    for pool in (ranks.whole, *ranks.parts):
        kvdock.ops.copy_blocks_(pool[0], pool[1], torch.as_tensor(pairs))


def grown(ranks: Shared, sequences: list[Any], count: int) -> None:
    """Give each sequence more tokens, behind copies of what is shared."""
    slots = np.empty(len(sequences) * count, dtype=np.int64)
    copied(ranks, ranks.manager.extend(sequences, count, slots=slots))
    ranks.write(torch.from_numpy(slots))
    ids = torch.randint(0, 10**6, (len(sequences), count), generator=ranks.random)
    ranks.manager.commit(sequences, ids, computed=[seq.num_tokens for seq in sequences])


@pytest.mark.parametrize("size", [2, 3])
def test_a_prefix_that_is_cached_is_cached_on_every_rank(size: int) -> None:
    ranks = Shared(size, 2)
    prompt = torch.arange(5 * size * 2 + 1)
    first = ranks.manager.begin(prompt)
    ranks.write(torch.from_numpy(first.slot_mapping(0, prompt.numel())))
    ranks.manager.commit(first, [], computed=prompt.numel())
    ranks.manager.finish(first)
    again = ranks.manager.begin(torch.cat([prompt, prompt]))
    assert again.cached_len == 5 * size * 2
    ranks.write(torch.from_numpy(again.slot_mapping(again.cached_len, 2 * prompt.numel())))
    table, lens = ranks.tables([again])
    ranks.compare(ranks.draw(1, HEADS, DIM), table, lens)
    count = int(lens[0]) - again.cached_len
    ranks.compare(ranks.draw(count, HEADS, DIM), table, lens, cu_query_lens=torch.tensor([0, count]))


@pytest.mark.parametrize("size", [2, 4])
def test_forks_write_into_copies_on_every_rank(size: int) -> None:
    ranks = Shared(size, 4)
    (seq,) = ranks.begin(4 * size + 3)
    ranks.manager.commit(seq, [], computed=seq.num_tokens)
    sequences = [seq, ranks.manager.fork(seq), ranks.manager.fork(seq)]
    for count in (1, 2, 5 * size):
        grown(ranks, sequences, count)
        table, lens = ranks.tables(sequences)
        ranks.compare(ranks.draw(3, 2 * HEADS, DIM), table, lens)
    assert len({int(table[row, 1]) for row in range(3)}) == 3, "each has its own second block"
    ranks.manager.check_integrity()


def test_drafts_that_are_cut_leave_nothing_behind() -> None:
    ranks = Shared(2, 4)
    (seq,) = ranks.begin(10)
    ranks.manager.commit(seq, [], computed=10)
    for accepted in (11, 13, 16):
        copied(ranks, ranks.manager.extend([seq], 7))
        ranks.write(torch.from_numpy(seq.slot_mapping(seq.num_known, seq.num_tokens)))
        ranks.manager.truncate(seq, accepted)
        ranks.manager.commit(seq, range(accepted - seq.num_known), computed=accepted)
        table, lens = ranks.tables([seq])
        assert lens.tolist() == [accepted]
        ranks.compare(ranks.draw(1, HEADS, DIM), table, lens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_dtypes(dtype: torch.dtype, index: torch.dtype) -> None:
    ranks = Shared(2, 4, dtype=dtype)
    sequences = ranks.begin(5, 18, 30)
    table, lens = ranks.tables(sequences)
    q = ranks.draw(3, 2 * HEADS, DIM)
    expected = kvdock.ops.paged_attention(q, ranks.whole[0], ranks.whole[1], table, lens)
    parts = [share.attend(q, *pool, table, lens.to(index)) for share, pool in zip(ranks.shares, ranks.parts, strict=True)]
    out, lse = kvdock.ops.merge_attention(parts)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out, expected, rtol=bound, atol=bound)


def test_other_memory_orders_and_unlike_values() -> None:
    """Views of an HND pool, and values of fewer elements than keys."""
    share = [ContextShare(2, index) for index in range(2)]
    k, v = torch.randn(13, 1, 8, dtype=torch.float64), torch.randn(13, 1, 4, dtype=torch.float64)
    slots, table, lens = torch.arange(13) + 8, torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([13])
    q, parts = torch.randn(4, 3, 8, dtype=torch.float64), []
    cu = torch.tensor([0, 4])
    for each in share:
        pools = [torch.full((4, 1, 4, width), torch.nan, dtype=torch.float64).transpose(1, 2) for width in (8, 4)]
        kvdock.ops.paged_caching_(*pools, k, v, each.slots(slots, 4))
        parts.append(each.attend(q, *pools, table, lens, cu_query_lens=cu, scale=0.3))
    scores = 0.3 * torch.einsum("qhd,td->qht", q, k[:, 0])
    behind = torch.arange(13)[None] > torch.arange(9, 13)[:, None]
    expected = torch.einsum("qht,td->qhd", scores.masked_fill(behind[:, None], -torch.inf).softmax(-1), v[:, 0])
    torch.testing.assert_close(kvdock.ops.merge_attention(parts)[0], expected, rtol=1e-5, atol=1e-6)
