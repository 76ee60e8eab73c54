"""What FlashInfer is given to plan on, against loops over the sequences. Runs without FlashInfer, and without a GPU."""

import random
from typing import Any

import pytest
import torch

from kvdock_flashinfer.batches import Batch

BLOCKS, BLOCK, WIDTH = 50, 4, 6


def draw(seed: int, *, many: bool) -> dict[str, Any]:
    """Return arguments of a call; where no query looks, the table has ids that are in no pool."""
    choose = random.Random(seed)
    lens = [choose.choice([0, 1, BLOCK, BLOCK + 1, BLOCK * WIDTH, choose.randint(1, BLOCK * WIDTH)]) for _ in range(4)]
    counts = [choose.randint(0, length or 3) if many else 1 for length in lens]
    lens[-1], counts[-1] = max(1, lens[-1]), 1  # there is a query at least
    window = choose.choice([None, 1, 3, 9])
    table = torch.full((4, WIDTH), 1 << 30, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        first = 0 if window is None else max(0, length - count - window + 1)
        for column in range(first // BLOCK, -(-length // BLOCK)):
            table[row, column] = choose.randrange(BLOCKS)
    ends = torch.tensor([0, *counts]).cumsum(0)
    return {
        "q": torch.zeros(sum(counts) + choose.choice([0, 3]) * many, 1, 8),
        "k_cache": torch.zeros(BLOCKS, BLOCK, 1, 8),
        "block_table": table,
        "seq_lens": torch.tensor(lens),
        "cu_query_lens": ends if many else None,
        "max_query_len": max(counts),
        "starts": None,
        "window": window,
    }


@pytest.mark.parametrize("many", [False, True], ids=["one query each", "many queries"])
@pytest.mark.parametrize("seed", range(20))
def test_blocks_lie_one_sequence_behind_the_other(seed: int, many: bool) -> None:
    args = draw(seed, many=many)
    found = Batch.read(args)
    assert found is not None
    ends = range(5) if args["cu_query_lens"] is None else args["cu_query_lens"].tolist()
    assert found.query_ends.tolist() == list(ends)
    blocks: list[int] = []
    unseeing: list[int] = []
    block_ends, last, tokens = [0], [], 0
    for row, length in enumerate(args["seq_lens"].tolist()):
        count = ends[row + 1] - ends[row]
        first = 0 if args["window"] is None else max(0, length - count - args["window"] + 1) // BLOCK
        blocks += args["block_table"][row, first : -(-length // BLOCK)].tolist() if length else [0]
        unseeing += [] if length else range(ends[row], ends[row + 1])
        block_ends.append(len(blocks))
        last.append((length - 1) % BLOCK + 1 if length else 1)
        tokens += length - first * BLOCK if length else 1
    assert (found.blocks.tolist(), found.block_ends.tolist(), found.last.tolist()) == (blocks, block_ends, last)
    unseeing += range(ends[-1], len(args["q"]))
    assert (found.unseeing.tolist(), found.tokens) == (unseeing, tokens)
    assert {item.dtype for item in (found.query_ends, found.block_ends, found.blocks, found.last)} == {torch.int32}


@pytest.mark.parametrize(
    "wrong",
    [
        {"seq_lens": torch.tensor([1, 2, BLOCK * WIDTH + 1, 3])},
        {"seq_lens": torch.tensor([1, 2, -1, 3])},
        {"block_table": torch.full((4, WIDTH), BLOCKS, dtype=torch.int32)},
        {"block_table": torch.full((4, WIDTH), -1, dtype=torch.int32)},
    ],
    ids=["a length beyond the table", "a length below 0", "blocks behind the pool", "blocks before it"],
)
def test_what_is_out_of_range_is_not_planned(wrong: dict[str, torch.Tensor]) -> None:
    good = {"block_table": torch.zeros(4, WIDTH, dtype=torch.int32), "seq_lens": torch.tensor([1, 2, 5, 3]), "window": None}
    args = draw(0, many=False) | good
    assert Batch.read(args) is not None
    assert Batch.read(args | wrong) is None


@pytest.mark.parametrize("sums", [[0, 0, 0, 0, 0], [0, 1, 2, 3, 9], [1, 2, 3, 4, 4], [0, 3, 2, 4, 4], [0, 3, 4, 4, 4]])
def test_sums_of_queries_that_make_no_sense_are_not_planned(sums: list[int]) -> None:
    good = {"block_table": torch.zeros(4, WIDTH, dtype=torch.int32), "seq_lens": torch.tensor([5, 5, 5, 5]), "window": None}
    args = draw(0, many=True) | good | {"q": torch.zeros(4, 1, 8), "max_query_len": 2}
    assert Batch.read(args | {"cu_query_lens": torch.tensor([0, 1, 2, 3, 4])}) is not None
    assert Batch.read(args | {"cu_query_lens": torch.tensor(sums)}) is None
