"""Where one rank is, and which heads it holds."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

import kvdock


def test_a_device_may_be_written_as_text() -> None:
    assert kvdock.RankInfo("cpu") == kvdock.RankInfo(torch.device("cpu"), tp_size=1, tp_rank=0)
    assert kvdock.RankInfo("meta").device == torch.device("meta")
    assert len({kvdock.RankInfo("cpu"), kvdock.RankInfo(torch.device("cpu"))}) == 1


@pytest.mark.parametrize("name", ["no such device", "", "cpu:x", "cpu:-1", "CPU"])
def test_a_device_that_torch_does_not_know(name: str) -> None:
    with pytest.raises(kvdock.ArgumentValueError, match=r"RankInfo: device: expected a device that torch knows.*Fix: ") as caught:
        kvdock.RankInfo(name)
    assert repr(name) in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("device", [None, 1.0, True, b"cpu", ["cpu"]], ids=repr)
def test_a_device_of_another_type(device: Any) -> None:
    with pytest.raises(kvdock.ArgumentTypeError, match=r"RankInfo: device: expected a torch\.device or a string"):
        kvdock.RankInfo(device)


@pytest.mark.parametrize(
    ("size", "rank", "error", "text"),
    [
        (0, 0, kvdock.ArgumentValueError, "tp_size: expected at least 1, got 0"),
        (-2, 0, kvdock.ArgumentValueError, "tp_size: expected at least 1, got -2"),
        (2, 2, kvdock.ArgumentValueError, "tp_rank: expected 0 <= tp_rank < tp_size = 2, got 2. Fix: count ranks from 0"),
        (2, -1, kvdock.ArgumentValueError, "tp_rank: .*got -1"),
        (2.0, 0, kvdock.ArgumentTypeError, "tp_size: expected an int, got 2.0"),
        (True, 0, kvdock.ArgumentTypeError, "tp_size: expected an int, got True"),
        (2, "1", kvdock.ArgumentTypeError, "tp_rank: expected an int, got '1'"),
        (2, False, kvdock.ArgumentTypeError, "tp_rank: expected an int, got False"),
        (2, None, kvdock.ArgumentTypeError, "tp_rank: expected an int, got None"),
    ],
)
def test_wrong_numbers(size: Any, rank: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        kvdock.RankInfo("cpu", size, rank)


def test_it_is_frozen() -> None:
    rank = kvdock.RankInfo("cpu", 2, 1)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        rank.tp_rank = 0  # type: ignore[misc]
    with pytest.raises(kvdock.ArgumentValueError, match="tp_rank"):
        attrs.evolve(rank, tp_size=1)


@pytest.mark.parametrize(
    ("heads", "size", "held"),
    [
        (8, 1, [range(8)]),
        (8, 2, [range(4), range(4, 8)]),
        (6, 3, [range(2), range(2, 4), range(4, 6)]),
        (3, 3, [range(1), range(1, 2), range(2, 3)]),
        (2, 4, [range(1), range(1), range(1, 2), range(1, 2)]),  # replicated: neighbours hold the same head
        (1, 3, [range(1), range(1), range(1)]),
    ],
)
def test_heads_are_split_or_replicated(heads: int, size: int, held: list[range]) -> None:
    assert [kvdock.RankInfo("cpu", size, rank).head_range(heads) for rank in range(size)] == held


@pytest.mark.parametrize(("heads", "size"), [(32, 5), (5, 32), (2, 3), (3, 2), (8, 12), (12, 8), (7, 8)])
def test_heads_that_do_not_divide_name_both(heads: int, size: int) -> None:
    # Elsewhere this made zero heads (FastDeploy#3717).
    for rank in range(size):
        with pytest.raises(kvdock.ArgumentValueError, match=f"num_k_heads = {heads} on tp_size = {size} ranks.*Fix: .*divides {heads}"):
            kvdock.RankInfo("cpu", size, rank).head_range(heads, "num_k_heads")


@pytest.mark.parametrize(
    ("heads", "error"), [(0, kvdock.ArgumentValueError), (-8, kvdock.ArgumentValueError), (8.0, kvdock.ArgumentTypeError)]
)
def test_no_heads_are_no_answer(heads: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="heads: expected"):
        kvdock.RankInfo("cpu", 2, 0).head_range(heads)
