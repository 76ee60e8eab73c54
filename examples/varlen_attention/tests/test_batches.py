"""What torch's kernels are handed, against loops over the sequences. Runs without a GPU."""

import random
from typing import Any

import pytest
import torch

from kvdock_varlen.batches import Batch

ROWS, BLOCKS, BLOCK, WIDTH = 5, 50, 4, 6


def draw(seed: int, *, many: bool) -> dict[str, Any]:
    """Return arguments of a call in which one sequence may have a bad number; where no query looks, the table has ids of no pool."""
    choose = random.Random(seed)
    lens = [choose.choice([0, 1, BLOCK, BLOCK * WIDTH, choose.randint(1, BLOCK * WIDTH)]) for _ in range(ROWS)]
    counts = [choose.randint(0, length or 3) if many else 1 for length in lens]
    window = choose.choice([None, 1, 3, 9])
    table = torch.tensor([[choose.choice([-1, BLOCKS, 1 << 30]) for _ in range(WIDTH)] for _ in range(ROWS)], dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        first = 0 if window is None else max(0, length - count - window + 1)
        for column in range(first // BLOCK, -(-length // BLOCK)):
            table[row, column] = choose.randrange(BLOCKS)
    return {
        "q": torch.zeros(sum(counts) + choose.choice([0, 3]) * many, 1, 8),
        "k_cache": torch.zeros(BLOCKS, BLOCK, 1, 8),
        "block_table": table,
        "seq_lens": torch.tensor(lens, dtype=choose.choice([torch.int32, torch.int64])),
        "cu_query_lens": torch.tensor([0, *counts]).cumsum(0) if many else None,
        "max_query_len": max(counts),
        "window": window,
    }


@pytest.mark.parametrize("many", [False, True], ids=["one query each", "many queries"])
@pytest.mark.parametrize("seed", range(20))
def test_good_numbers_stay_as_they_are(seed: int, many: bool) -> None:
    args = draw(seed, many=many)
    found, table = Batch.of(args), args["block_table"]
    ends = range(ROWS + 1) if args["cu_query_lens"] is None else args["cu_query_lens"].tolist()
    assert (found.ends.tolist(), found.lens.tolist()) == (list(ends), args["seq_lens"].tolist())
    assert int(found.wrong) == 0
    is_block = (table >= 0) & (table < BLOCKS)
    assert torch.equal(found.table[is_block], table[is_block])
    assert bool((found.table[~is_block] == 0).all()), "what no query looks at is read by some kernels"
    owners = [row for row in range(ROWS) for _ in range(ends[row], ends[row + 1])]
    nothing = [int(args["seq_lens"][row]) == 0 for row in owners]
    assert found.sees_nothing.tolist() == nothing + [True] * (len(args["q"]) - ends[-1])
    assert {item.dtype for item in (found.ends, found.lens, found.table)} == {torch.int32}


WRONG = {
    "a length beyond the table": ("seq_lens", 1, BLOCK * WIDTH + 1),
    "a length below 0": ("seq_lens", 1, -1),
    "fewer tokens than queries": ("seq_lens", 1, 2),
    "a block behind the pool": ("block_table", (1, 2), BLOCKS),
    "a block before it": ("block_table", (1, 0), -1),
    "more queries than there may be": ("max_query_len", None, 2),
}


@pytest.mark.parametrize(("name", "place", "value"), WRONG.values(), ids=WRONG)
def test_a_sequence_with_a_bad_number_has_no_tokens_and_is_counted(name: str, place: Any, value: int) -> None:
    args: dict[str, Any] = {
        "q": torch.zeros(6, 1, 8),
        "k_cache": torch.zeros(BLOCKS, BLOCK, 1, 8),
        "block_table": torch.ones(3, WIDTH, dtype=torch.int32),
        "seq_lens": torch.tensor([7, 11, 5]),
        "cu_query_lens": torch.tensor([0, 1, 4, 6]),
        "max_query_len": 3,
        "window": None,
    }
    assert Batch.of(args).lens.tolist() == [7, 11, 5]
    if place is None:
        args[name] = value
    else:
        args[name][place] = value
    found = Batch.of(args)
    assert (found.lens.tolist(), int(found.wrong)) == ([7, 0, 5], 1)
    assert found.sees_nothing.tolist() == [False, True, True, True, False, False]
    assert bool(((found.table >= 0) & (found.table < BLOCKS)).all())


def test_sums_of_queries_that_make_no_sense_stay_within_them() -> None:
    args = draw(0, many=True) | {"cu_query_lens": torch.tensor([2, 3, 1, 1 << 40, 4, -5])}
    found = Batch.of(args)
    assert found.ends.tolist() == [2, 3, 3, *[len(args["q"])] * 3]
    assert found.sees_nothing[:2].tolist() == [True, True]
