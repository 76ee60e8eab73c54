"""Prompts computed in one set of processes and gone on with in another, that shares the heads otherwise: the tokens of one process."""

from __future__ import annotations

import pytest

from support_two_sides import RIGHT, play


@pytest.mark.slow
@pytest.mark.parametrize(("prefills", "decodes"), [(1, 2), (2, 1), (2, 4)])
def test_two_sides_generate_what_one_process_does(prefills: int, decodes: int) -> None:
    """With 4 ranks for 2 heads each head is there twice, and comes from one owner."""
    codes, said = play(prefills, decodes, "whole")
    assert codes == [0] * (prefills + decodes)
    for out in said[:prefills]:
        assert out == "prefill\n"
    for out in said[prefills:]:
        assert RIGHT in out
        assert [line for line in out.splitlines() if ": " in line] == [f"decode r{number}: None" for number in range(3)]


@pytest.mark.slow
def test_a_prefill_process_that_dies() -> None:
    """What it had not sent is computed where it is needed: no token is wrong, and nobody waits for ever."""
    codes, said = play(1, 2, "prefill dies")
    assert codes == [9, 0, 0]
    for out in said[1:]:
        assert "decode r0: None" in out
        (second,) = (line for line in out.splitlines() if line.startswith("decode r1: "))
        assert "peer 'p0'" in second, "which transfer failed, or which connection is broken"
        assert RIGHT in out


@pytest.mark.slow
def test_a_decode_process_that_dies() -> None:
    codes, said = play(2, 1, "decode dies")
    assert codes == [0, 0, 9]
    for out in said[:2]:
        assert "blocks of 'r1' to peer 'd0': expected all of them, got its process is gone" in out
