"""Runs as a stream and back, whole and in parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvdock.transfer import Runs, gather, scatter


def regions(seed: int, sizes: tuple[int, ...] = (300, 1024)) -> list[torch.Tensor]:
    """Return regions of random bytes, at addresses that are no multiples of anything."""
    random = np.random.default_rng(seed)
    return [torch.from_numpy(random.integers(0, 256, size + 3, dtype=np.uint8))[3:] for size in sizes]


def runs_of(seed: int, unit: int, count: int = 20) -> Runs:
    """Return runs that do not overlap, of multiples of a unit, in two regions."""
    random = np.random.default_rng(seed)
    region, begin, nbytes = [], [], []
    for number, size in enumerate((300, 1024)):
        cuts = np.unique(random.integers(0, size // unit, count)) * unit
        for start, stop in zip(cuts[:-1:2].tolist(), cuts[1::2].tolist(), strict=False):
            region.append(number)
            begin.append(start)
            nbytes.append(stop - start)
    order = random.permutation(len(region))
    return Runs(*(np.array(each, dtype=np.int64)[order] for each in (region, begin, nbytes)))


def slow(memory: list[torch.Tensor], runs: Runs) -> bytes:
    """Return the bytes of runs, one run after the other."""
    found = zip(runs.region.tolist(), runs.begin.tolist(), runs.nbytes.tolist(), strict=True)
    return b"".join(bytes(memory[region][begin : begin + nbytes].tolist()) for region, begin, nbytes in found)


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 20])
@pytest.mark.parametrize("seed", range(4))
def test_a_stream_has_the_bytes_in_order_and_brings_them_back(seed: int, unit: int) -> None:
    memory, runs = regions(seed), runs_of(seed, unit)
    stream = gather(memory, runs)
    assert bytes(stream.tolist()) == slow(memory, runs)
    other = regions(seed + 9)
    untouched = [region.clone() for region in other]
    scatter(other, runs, stream)
    assert slow(other, runs) == bytes(stream.tolist())
    for region, begin, nbytes in zip(runs.region.tolist(), runs.begin.tolist(), runs.nbytes.tolist(), strict=True):
        untouched[region][begin : begin + nbytes] = other[region][begin : begin + nbytes]
    assert all(torch.equal(left, right) for left, right in zip(other, untouched, strict=True)), "nothing else is written"


@pytest.mark.parametrize("part", [1, 7, 64, 5000])
def test_parts_are_the_whole(part: int) -> None:
    memory, runs = regions(1), runs_of(1, 4)
    total = int(runs.nbytes.sum())
    parts = [gather(memory, runs.part(start, min(start + part, total))) for start in range(0, total, part)]
    assert all(len(each) == part for each in parts[:-1])
    assert bytes(torch.cat(parts).tolist()) == slow(memory, runs)


def test_few_long_runs_are_copied_as_they_are() -> None:
    memory = [torch.arange(100_000, dtype=torch.int32).view(torch.uint8)]
    runs = Runs(np.array([0, 0]), np.array([3, 200_000]), np.array([150_001, 99_999]))
    stream = gather(memory, runs)
    assert torch.equal(stream, torch.cat([memory[0][3:150_004], memory[0][200_000:299_999]]))
    other = [torch.zeros_like(memory[0])]
    scatter(other, runs, stream)
    assert torch.equal(other[0][3:150_004], memory[0][3:150_004])
    assert int(other[0].count_nonzero()) == int(stream.count_nonzero())
