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
@pytest.mark.parametrize(
    ("prefills", "decodes", "scene", "hits"),
    [(1, 2, "windows", (32, 16, 32)), (2, 1, "windows in larger blocks", (0, 0, 32))],
)
def test_what_came_of_windows_is_found_where_it_is_there(prefills: int, decodes: int, scene: str, hits: tuple[int, ...]) -> None:
    """Where the owner's blocks begin behind those of the asker, the text is right all the same."""
    codes, said = play(prefills, decodes, scene)
    assert codes == [0] * (prefills + decodes)
    for out in said[prefills:]:
        assert "decode 72 tokens are right" in out
        found = [line.removeprefix("decode ") for line in out.splitlines() if line.startswith("decode r")]
        lengths = zip(hits, (41, 25, 34), strict=True)
        assert found == [
            line for number, (hit, of) in enumerate(lengths) for line in (f"r{number}: None", f"r{number}: {hit} of {of} cached")
        ]


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
