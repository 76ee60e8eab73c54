"""Which blocks are saved, and how they hang together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock.errors import FileContentError
from kvdock.files.description import check_fits
from kvdock.files.forest import Forest, needed_blocks
from kvdock.files.gather import gathered
from kvdock.files.holder import Holder
from kvdock.layers import KeepAll, KeepChunk, KeepWindow
from kvdock.layers.groups import LayerGroup
from kvdock.prefix import StoredPrefix, block_names
from support_files import compute, pool

RULES = [KeepAll(), KeepWindow(1), KeepWindow(9), KeepWindow(6, sinks=3), KeepChunk(16), KeepChunk(5)]


def group(rule: Any, block_size: int) -> LayerGroup:
    return LayerGroup((), (), rule, block_size)


@given(rule=st.sampled_from(RULES), size=st.integers(1, 8), count=st.integers(1, 60))
def test_needed_blocks_are_those_of_what_the_next_token_reads(rule: Any, size: int, count: int) -> None:
    wanted = sorted({position // size for span in rule.spans(count) for position in span})
    assert needed_blocks(group(rule, size), count).tolist() == wanted


def prefix(*ids: int, namespace: tuple[Any, ...] = ()) -> StoredPrefix:
    return StoredPrefix(np.array(ids, dtype=np.int64), namespace)


def test_prefixes_share_what_they_begin_with_within_a_namespace() -> None:
    cache, manager = pool(block_size=2)
    texts = [((1, 2, 3, 4), ()), ((1, 2, 5, 6), ()), ((1, 2), ()), ((1, 2, 3, 4), ("a",)), ((1, 2, 3, 4, 9), ())]
    for ids, namespace in texts:
        compute(cache, manager, list(ids), namespace)
    found = gathered(Holder("test", manager, cache, None), [prefix(*ids, namespace=namespace) for ids, namespace in texts])
    forest = found.forest
    assert forest.tokens.tolist() == [[1, 2], [3, 4], [5, 6], [1, 2], [3, 4]]
    assert forest.parents.tolist() == [-1, 0, 0, -2, 3]
    assert forest.ends.tolist() == [1, 2, 0, 4], "each once"
    assert forest.namespaces == ((), ("a",))
    assert [forest.path(end).tolist() for end in forest.ends] == [[0, 1], [0, 2], [0], [3, 4]]
    assert [forest.namespace(forest.path(end)) for end in forest.ends] == [(), (), (), ("a",)]
    names = [bytes(name) for name in forest.names]
    assert names[:2] == block_names([1, 2, 3, 4], 2)
    assert names[3:] == block_names([1, 2, 3, 4], 2, ("a",))
    assert (found.sources[0] >= 0).all()
    assert found.sources[0][:2, 0].tolist() == manager.prefix.match_prefix([1, 2, 3, 4], record=False).blocks.tolist()


def test_what_is_not_cached_is_left_out() -> None:
    cache, manager = pool(block_size=2)
    compute(cache, manager, [1, 2, 3, 4])
    found = gathered(Holder("test", manager, cache, None), [prefix(7, 8), prefix(1, 2, 9, 9), prefix(1, 2, 3, 4, namespace=("a",))]).forest
    assert (found.tokens.tolist(), found.ends.tolist(), found.namespaces) == ([[1, 2]], [0], ((),))
    none = gathered(Holder("test", manager, cache, None), [prefix(7, 8)]).forest
    assert (len(none), none.names.shape, none.ends.size) == (0, (0, 32), 0)


def test_of_windows_only_what_is_needed_has_a_source() -> None:
    cache, manager = pool("windows", num_blocks=256)
    ids = list(range(160))
    compute(cache, manager, ids)
    found = gathered(Holder("test", manager, cache, None), [prefix(*ids)])
    length = found.forest.tokens.size
    for number, (of, sources) in enumerate(zip(cache.groups, found.sources, strict=True)):
        places = np.flatnonzero(sources.reshape(-1) >= 0)
        assert places.tolist() == needed_blocks(of, length).tolist()
        rows = found.forest.rows()[number].reshape(-1)[places]
        assert rows.tolist() == list(range(places.size)), "one behind the other in the file"
    found.forest.check_kept("f", found.forest.path(int(found.forest.ends[0])), cache.groups)
    with pytest.raises(FileContentError, match="kept: all that the next token reads"):
        found.forest.check_kept("f", found.forest.path(int(found.forest.ends[0]))[:-1], cache.groups)


def test_a_forest_comes_back_from_its_arrays() -> None:
    cache, manager = pool(block_size=2)
    compute(cache, manager, [1, 2, 3, 4])
    forest = gathered(Holder("test", manager, cache, None), [prefix(1, 2, 3, 4)]).forest
    back = Forest.read("f", forest.arrays(), forest.namespaces, cache.groups)
    for name, array in forest.arrays().items():
        assert (back.arrays()[name] == array).all(), name
    twice = {name: np.concatenate([array, array]) for name, array in forest.arrays().items()}
    with pytest.raises(FileContentError, match=r"ends: each once.*contradicts itself"):
        Forest.read("f", twice, forest.namespaces, cache.groups)
    twice["ends"] = forest.arrays()["ends"]
    with pytest.raises(FileContentError, match=r"names: each block once.*contradicts itself"):
        Forest.read("f", twice | {"parents": np.array([-1, 0, -1, 2])}, forest.namespaces, cache.groups)


@pytest.mark.parametrize(
    ("wanted", "found", "said"),
    [
        (1, 2, "expected 1, got 2"),
        (1, True, "expected 1, got True"),
        (1, 1.0, r"expected 1, got 1\.0"),
        ("a", None, "expected 'a', got None"),
        ([1, [2, 3]], [1, [2, 4]], "expected 3, got 4"),
        ([1, 2], [1], r"expected \[1, 2\], got \[1\]"),
        ([{"a": 1, "b": 2}], [{"a": 1, "b": 3}], "expected 2, got 3"),
        ([{"a": 1}], [{"a": 1, "b": 3}], "expected nothing more, got more"),
        ([{"a": 1}], [{}], "expected 1, got None"),
    ],
)
def test_what_differs_is_named(wanted: Any, found: Any, said: str) -> None:
    check_fits("f", {"model": wanted}, {"model": wanted})
    with pytest.raises(FileContentError, match=f"f: model: {said}. Fix: load it for the model"):
        check_fits("f", {"model": found}, {"model": wanted})
