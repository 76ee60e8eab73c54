from __future__ import annotations

import pytest

from kvdock.cli.sizes import show_size, sizes
from kvdock.errors import ArgumentValueError


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3000000", 3_000_000),
        ("3M", 3_000_000),
        ("10e6", 10_000_000),
        ("1E+6", 1_000_000),
        ("512k", 512_000),
        ("1.5M", 1_500_000),
        ("2G", 2 * 10**9),
        ("0.001k", 1),
        ("1.1e1", 11),
    ],
)
def test_one_number(text: str, number: int) -> None:
    assert sizes("--pool", [text]) == [number]


def test_several_in_their_order_each_once() -> None:
    assert sizes("--pool", ["3M, 1M", "3000k", "5"]) == [3_000_000, 1_000_000, 5]


@pytest.mark.parametrize(
    "text", ["", "M", "-3", "0", "1.5", "3m", "3MB", "0x10", "1e-6", "nan", "inf", "1,", "1e99999999999", "٣", "1.2345k"]
)
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(ArgumentValueError) as caught:
        sizes("--pool", [text])
    assert str(caught.value).startswith("--pool: expected a whole number of tokens such as 3000000, 3M, 512k or 10e6, got ")


@pytest.mark.parametrize(("number", "text"), [(3_000_000, "3M"), (10**10, "10G"), (512_000, "512k"), (499_984, "499,984"), (992, "992")])
def test_a_number_is_shown_short_where_that_is_exact(number: int, text: str) -> None:
    assert show_size(number) == text
    if "," not in text:
        assert sizes("--pool", [text]) == [number]
