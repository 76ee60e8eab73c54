"""What is known of cached blocks: their tokens, from when they are published to when they are given up."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdock.errors import IntegrityError
from kvdock.scheduler.published import Published
from opskit import PROPERTY

SIZE = 2


def blocks(*ids: int) -> Any:
    return np.array(ids, dtype=np.int32)


def ids_of(*tokens: int) -> Any:
    return np.array(tokens, dtype=np.int32)


def told(found: list[Any]) -> list[tuple[Any, list[int], list[int], int]]:
    """Return what was given up in a form that can be compared."""
    return [(each.namespace, each.ids.tolist(), each.blocks.tolist(), each.priority) for each in found]


def chain() -> Published:
    """Return a prefix of four blocks, and one of two that branches off behind the second."""
    published = Published(20, SIZE)
    published.add(("a",), None, ids_of(1, 2, 3, 4, 5, 6, 7, 8), blocks(10, 11, 12, 13), 0)
    published.add(("a",), 11, ids_of(50, 60, 70, 80), blocks(4, 5), 3)
    return published


def test_what_is_given_up_is_told_with_all_tokens_before_it() -> None:
    published = chain()
    assert told(published.give_up(blocks(13))) == [(("a",), [1, 2, 3, 4, 5, 6, 7, 8], [13], 0)]
    assert told(published.give_up(blocks(4, 5))) == [(("a",), [1, 2, 3, 4, 50, 60, 70, 80], [4, 5], 3)]
    assert told(published.give_up(blocks(10, 11, 12))) == [(("a",), [1, 2, 3, 4, 5, 6], [10, 11, 12], 0)]
    published.check_integrity(blocks())


def test_what_grows_at_its_end_is_one_run() -> None:
    published = Published(20, SIZE)
    for at in range(5):
        published.add((), at - 1 if at else None, ids_of(at, at), blocks(at), 0)
    assert len(published._runs) == 1
    assert told(published.give_up(blocks(2, 3, 4))) == [((), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4], [2, 3, 4], 0)]
    published.add((), 1, ids_of(9, 9), blocks(7), 0)
    assert len(published._runs) == 1, "it goes on where it was cut"
    assert told(published.give_up(blocks(0, 1, 7))) == [((), [0, 0, 1, 1, 9, 9], [0, 1, 7], 0)]


def test_a_run_that_goes_on_where_another_was_left_is_one_part_with_it() -> None:
    published = chain()
    published.forget(blocks(12, 13))
    found = published.give_up(blocks(10, 11, 4, 5))
    assert told(found) == [(("a",), [1, 2, 3, 4, 50, 60, 70, 80], [10, 11, 4, 5], 3)]


def test_a_run_that_branched_off_before_is_a_part_of_its_own() -> None:
    """Block 5 is the fourth of its prefix, and follows the third of another only by number."""
    published = chain()
    found = published.give_up(blocks(12, 13, 5))
    assert told(found) == [
        (("a",), [1, 2, 3, 4, 5, 6, 7, 8], [12, 13], 0),
        (("a",), [1, 2, 3, 4, 50, 60, 70, 80], [5], 3),
    ]


@pytest.mark.parametrize("turned", [False, True])
def test_any_order_will_do(turned: bool) -> None:
    published = Published(100, SIZE)
    published.add((), None, np.arange(80), np.arange(40, dtype=np.int32), 0)
    gone = np.arange(20, 40, dtype=np.int32)
    (part,) = published.give_up(gone[::-1] if turned else gone)
    assert (part.blocks.tolist(), part.ids.tolist()) == (gone.tolist(), list(range(80)))


def test_all_is_read_before_any_is_cut() -> None:
    published = chain()
    found = published.give_up(blocks(10, 11, 12, 13, 4, 5))
    assert [each.ids.tolist()[-2:] for each in found] == [[7, 8], [70, 80]]
    assert found[1].ids.tolist()[:4] == [1, 2, 3, 4]


def test_tokens_before_what_is_gone_stay_known() -> None:
    """A prefix cache may evict what is before a run only with the run; what is noted of it must last as long."""
    published = chain()
    published.forget(blocks(12, 13))
    assert told(published.give_up(blocks(5)))[0][1] == [1, 2, 3, 4, 50, 60, 70, 80]


def test_ids_of_64_bits_are_kept() -> None:
    published = Published(4, SIZE)
    published.add((), None, ids_of(1, 2), blocks(0), 0)
    published.add((), 0, np.array([2**40, -1]), blocks(1), 0)
    assert published.give_up(blocks(0, 1))[0].ids.tolist() == [1, 2, 2**40, -1]


def test_the_highest_priority_counts() -> None:
    published = chain()
    published.raise_priority(blocks(10, 11), 7)
    published.raise_priority(blocks(4), 1)
    assert [each.priority for each in published.give_up(blocks(13, 4, 5))] == [0, 3]
    assert published.give_up(blocks(10, 11, 12))[0].priority == 7


def test_what_is_not_known_is_nothing() -> None:
    published = chain()
    published.forget(blocks(0, 1))
    published.forget(blocks())
    published.forget(blocks(4, 5, 13))
    published.forget(blocks(4, 5, 13))
    published.check_integrity(blocks(10, 11, 12))
    published.clear()
    published.check_integrity(blocks())


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda p: p._run.__setitem__(4, -1), "the blocks that are cached"),
        (lambda p: setattr(p._runs[1], "left", 7), "runs with blocks, as many as are counted"),
        (lambda p: p._place.__setitem__(5, 9), "ids of each block"),
        (lambda p: setattr(p._runs[0].ids, "size", 2), "ids of each block"),
    ],
)
def test_what_is_wrong_is_said(spoil: Any, text: str) -> None:
    published = chain()
    published.check_integrity(blocks(4, 5, 10, 11, 12, 13))
    spoil(published)
    with pytest.raises(IntegrityError, match=text):
        published.check_integrity(blocks(4, 5, 10, 11, 12, 13))


@settings(PROPERTY, max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_against_a_model_of_prefixes(seed: int) -> None:
    rng, published = random.Random(seed), Published(64, SIZE)  # noqa: S311 - nothing secret
    known: dict[int, list[int]] = {}  # by block: all tokens up to its end
    before: dict[int, int | None] = {}
    for _ in range(60):
        free = [each for each in range(64) if each not in known]
        if rng.random() < 0.6 and len(free) > 4:
            above = rng.choice([None, *known])
            new = rng.sample(free, rng.randint(1, 4))
            tokens = [rng.randrange(1000) for _ in range(SIZE * len(new))]
            published.add((), above, np.array(tokens), np.array(new, dtype=np.int32), 0)
            for at, block in enumerate(new):
                before[block] = above
                known[block] = [*(known[above] if above is not None else []), *tokens[at * SIZE : (at + 1) * SIZE]]
                above = block
        elif known:
            gone = {rng.choice(list(known))}
            while more := {block for block, parent in before.items() if parent in gone} - gone:
                gone |= more
            order = rng.sample(sorted(gone), len(gone))
            parts = published.give_up(np.array(order, dtype=np.int32))
            assert sorted(block for part in parts for block in part.blocks.tolist()) == sorted(gone)
            for part in parts:
                for at, block in enumerate(part.blocks.tolist()):
                    stop = part.ids.size - SIZE * (part.blocks.size - 1 - at)
                    assert part.ids.tolist()[:stop] == known[block]
            for block in gone:
                del known[block], before[block]
        published.check_integrity(np.array(sorted(known), dtype=np.int32))
