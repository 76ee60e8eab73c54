"""Copying blocks in every layer of a paged cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvdock
from support_caches import CPU, LAYOUT_NAMES, LAYOUTS, SPECS, contents, counting_runtime, same, tokens

BLOCKS, BLOCK = 6, 4

PAIRS: dict[str, Any] = {
    "list": [(0, 3), (1, 5)],
    "tuples": ((0, 3), (1, 5)),
    "int64": torch.tensor([[0, 3], [1, 5]]),
    "int32": torch.tensor([[0, 3], [1, 5]], dtype=torch.int32),
    "numpy": np.array([[0, 3], [1, 5]]),
    "one source, two destinations": [(2, 0), (2, 1)],
    "padding": [(-1, 2), (4, -1), (0, 5)],
    "only padding": torch.tensor([[-1, -1]]),
    "none": [],
    "an empty tensor": torch.zeros((0, 2), dtype=torch.int64),
}


def filled(name: str, ops: kvdock.OpDispatcher, layout: tuple[kvdock.KVCacheLayout, kvdock.HeadLayout] = LAYOUTS[0]) -> kvdock.PagedKVCache:
    config = kvdock.PagedKVCacheConfig(num_blocks=BLOCKS, block_size=BLOCK, layout=layout[0], head_layout=layout[1])
    cache = kvdock.create_cache(SPECS[name], config, CPU, ops=ops)
    whole = torch.arange(BLOCKS * BLOCK)
    for layer in range(cache.num_layers):
        cache.update(layer, *tokens(SPECS[name], layer, whole.shape, seed=layer), whole)
    return cache


def copied(pool: torch.Tensor, pairs: Any) -> torch.Tensor:
    """Copy block by block, from what was there before."""
    after = pool.clone()
    for src, dst in np.asarray(pairs).reshape(-1, 2).tolist():
        if src >= 0 and dst >= 0:
            after[dst] = pool[src]
    return after


@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
@pytest.mark.parametrize("name", SPECS)
def test_copies_in_every_layer_keys_and_values(
    name: str, layout: tuple[kvdock.KVCacheLayout, kvdock.HeadLayout], ops: kvdock.OpDispatcher
) -> None:
    cache = filled(name, ops, layout)
    for pairs in PAIRS.values():
        expected = [(copied(k, pairs), copied(v, pairs)) for k, v in contents(cache)]
        cache.copy_blocks(pairs)
        assert same(contents(cache), expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
@pytest.mark.parametrize(("name", "launches"), [("uniform", 1), ("values differ from keys", 1), ("layers differ", 3)])
def test_one_launch_for_each_group_of_equal_layers(
    name: str, launches: int, layout: tuple[kvdock.KVCacheLayout, kvdock.HeadLayout]
) -> None:
    runtime, calls = counting_runtime("counting")
    cache = filled(name, runtime.dispatcher, layout)
    calls.clear()
    cache.copy_blocks([(0, 1), (2, 3), (4, 5)])
    assert dict(calls) == {("counting", "copy_blocks_"): launches}
    assert launches < cache.num_layers


@pytest.mark.parametrize(
    ("pairs", "error", "text"),
    [
        ([(0, BLOCKS)], kvdock.IndexRangeError, r"block_pairs\[0, 1\].*below 6.*got 6"),
        ([(0, 1), (2**40, 2)], kvdock.IndexRangeError, r"block_pairs\[1, 0\]"),
        ([(0, 1), (2, 1)], kvdock.ArgumentValueError, "destination 1 twice"),
        ([(0, 1), (1, 2)], kvdock.ArgumentValueError, "destination 1 also as a source|destination 2"),
        ([(3, 3)], kvdock.ArgumentValueError, "also as a source"),
        ([(0, 1, 2)], kvdock.ArgumentValueError, r"block_pairs: expected shape"),
        ([0, 1], kvdock.ArgumentValueError, r"block_pairs: expected shape"),
        ([(0.5, 1)], kvdock.ArgumentTypeError, r"block_pairs: expected \[N, 2\] integers"),
        ([(0, 1), (2,)], kvdock.ArgumentValueError, r"block_pairs: expected \[N, 2\] integers"),
        ("01", kvdock.ArgumentTypeError, r"block_pairs: expected \[N, 2\] integers"),
        (None, kvdock.ArgumentTypeError, r"block_pairs: expected \[N, 2\] integers"),
    ],
)
def test_wrong_pairs_are_named_and_nothing_is_copied_in_any_layer(
    pairs: Any, error: type[Exception], text: str, ops: kvdock.OpDispatcher
) -> None:
    cache = filled("layers differ", ops)
    before = contents(cache)
    with pytest.raises(error, match=text) as caught:
        cache.copy_blocks(pairs)
    assert isinstance(caught.value, kvdock.KVDockError)
    assert same(contents(cache), before)


def test_pairs_are_not_changed(ops: kvdock.OpDispatcher) -> None:
    cache = filled("uniform", ops)
    as_list, as_array, as_tensor = [(0, 1)], np.array([[0, 1]]), torch.tensor([[0, 1]])
    as_array.setflags(write=False)  # torch warns of such arrays when it shares their memory
    for pairs in (as_list, as_array, as_tensor):
        cache.copy_blocks(pairs)
    assert as_list == [(0, 1)]
    assert as_array.tolist() == as_tensor.tolist() == [[0, 1]]
