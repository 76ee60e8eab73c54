"""Swaps with arguments that nobody should pass, and with forms of pairs that anybody may: nothing else is written, and errors say why."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

import kvdock
from kvdock.cache.swapping import Swapper, host_cache
from support_caches import CPU, SPECS, random_bits

pytestmark = pytest.mark.backend

SPEC = SPECS["uniform"]


def make(blocks: int = 6, seed: int = 0, **options: Any) -> kvdock.PagedKVCache:
    cache = kvdock.create_cache(SPEC, kvdock.PagedKVCacheConfig(num_blocks=blocks, block_size=4, **options), CPU)
    for pool in cache._store.pools:
        pool.memory.view(torch.uint8).copy_(random_bits(pool.memory.view(torch.uint8).shape, torch.uint8, seed))
    return cache


def image(cache: kvdock.PagedKVCache) -> list[torch.Tensor]:
    """All bytes of a cache's memory, with those between its blocks."""
    return [pool.memory.view(torch.uint8).clone() for pool in cache._store.pools]


def unchanged(cache: kvdock.PagedKVCache, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(pool.memory.view(torch.uint8), old) for pool, old in zip(cache._store.pools, before, strict=True))


FORMS: dict[str, Any] = {
    "rows from the end": np.array([[2, 3], [0, 1]])[::-1],
    "columns from the end": np.array([[1, 0], [3, 2]])[:, ::-1],
    "columns of a wider array": np.array([[0, 9, 1], [2, 9, 3]], np.int32)[:, ::2],
    "Fortran's order": np.asfortranarray([[0, 1], [2, 3]]),
    "bytes that cannot be written": np.frombuffer(np.array([[0, 1], [2, 3]]).tobytes(), np.int64).reshape(2, 2),
    "numpy's own integers": [(np.int32(0), np.uint8(1)), (np.int64(2), 3)],
    "tensors of one number": [(torch.tensor(0), torch.tensor(1)), (2, 3)],
    "int32 rows of a wider tensor": torch.tensor([[0, 1, 9], [2, 3, 9]], dtype=torch.int32)[:, :2],
    "the least integer as padding": [(0, 1), (-(2**63), 4), (2, 3), (4, -(2**63))],
    "lists in a tuple": ([0, 1], [2, 3]),
}


@pytest.mark.parametrize("pairs", FORMS.values(), ids=FORMS)
def test_any_form_of_the_same_pairs_swaps_the_same(pairs: Any) -> None:
    src, dst, plain = make(seed=1), make(9, seed=2), make(9, seed=2)
    src.swap_blocks(dst, pairs)
    for layer in range(src.num_layers):
        for ours, theirs in zip(src.buffers(layer).values(), plain.buffers(layer).values(), strict=True):
            theirs[1], theirs[3] = ours[0], ours[2]
    assert unchanged(dst, image(plain))


LISTED = "expected [N, 2] integers (src, dst), got {}. Fix: pass a list of pairs, or an integer array or tensor of shape [N, 2]"
SHAPED = "expected shape [N, 2], got shape {}. Fix: check the order of dimensions and of arguments"
TYPED = "expected one of torch.int32, torch.int64, got torch.{}. Fix: block_pairs.to(torch.int64), if that keeps its meaning"
WRONG: list[tuple[Any, type[Exception], str]] = [
    (np.array([[0, 1]], np.uint64), kvdock.ArgumentTypeError, TYPED.format("uint64")),
    (np.array([[True, False]]), kvdock.ArgumentTypeError, LISTED.format("array([[ True, False]])")),
    ([(0.0, 1.0)], kvdock.ArgumentTypeError, LISTED.format("[(0.0, 1.0)]")),
    (torch.tensor([[0, 1]], dtype=torch.int8), kvdock.ArgumentTypeError, TYPED.format("int8")),
    (np.array([[0, 1]], ">i4"), kvdock.ArgumentValueError, LISTED.format("array([[0, 1]], dtype='>i4')")),
    ([(0, 1), (2,)], kvdock.ArgumentValueError, LISTED.format("[(0, 1), (2,)]")),
    ([(0, 2**70)], kvdock.ArgumentTypeError, LISTED.format("[(0, 1180591620717411303424)]")),
    ({0: 1}, kvdock.ArgumentTypeError, LISTED.format("{0: 1}")),
    (None, kvdock.ArgumentTypeError, LISTED.format("None")),
    ([(0, 1, 2)], kvdock.ArgumentValueError, SHAPED.format("[1, 3]")),
    (torch.tensor(3), kvdock.ArgumentValueError, SHAPED.format("[]")),
    (torch.zeros(1, 2, 1, dtype=torch.int64), kvdock.ArgumentValueError, SHAPED.format("[1, 2, 1]")),
    (
        torch.tensor([[0, 1], [2, 3]]).T,
        kvdock.ArgumentValueError,
        "expected an innermost stride of 1, got strides [1, 2] for shape [2, 2]. Fix: block_pairs.contiguous()",
    ),
    (
        torch.zeros(1, 2, dtype=torch.int64).to_sparse(),
        kvdock.ArgumentTypeError,
        "expected a dense tensor with strides, got torch.sparse_coo. Fix: block_pairs.to_dense()",
    ),
    (
        torch.zeros(1, 2, dtype=torch.int64, device="meta"),
        kvdock.ArgumentValueError,
        'expected a tensor on cpu, where src_cache is, got a tensor on meta. Fix: block_pairs.to("cpu")',
    ),
]


@pytest.mark.parametrize(("pairs", "error", "text"), WRONG, ids=range(len(WRONG)))
def test_what_is_no_pairs_is_refused_with_every_byte_as_it_was(pairs: Any, error: type[Exception], text: str) -> None:
    src, dst = make(), make(9, seed=2)
    before = image(dst)
    for swap in (src.swap_blocks, lambda *args: Swapper().swap(src, *args)):
        with pytest.raises(error) as caught:
            swap(dst, pairs)
        assert str(caught.value) == f"swap_blocks_: block_pairs: {text}"
    assert unchanged(dst, before)


@pytest.mark.parametrize("is_known", [False, True], ids=["a first swap", "a later one"])
@pytest.mark.parametrize("group", [False, True, 0.0, [], {}, "0", None, np.int64(0), torch.tensor(0)], ids=repr)
def test_a_group_is_an_int_for_every_swap(group: Any, is_known: bool) -> None:
    """Numbers that are equal to 0 were taken for it behind a first swap; what cannot be hashed was no error of kvdock's."""
    src, dst = make(), make(seed=3)
    if is_known:
        src.swap_blocks(dst, [(0, 1)])
    before = image(dst)
    with pytest.raises(kvdock.ArgumentTypeError) as caught:
        src.swap_blocks(dst, [(2, 3)], group=group)
    assert str(caught.value) == f"PagedKVCache.swap_blocks: group: expected an int of at least 0, got {group!r}"
    assert unchanged(dst, before)


@pytest.mark.parametrize(
    ("group", "error"), [(-1, kvdock.ArgumentValueError), (1, kvdock.IndexRangeError), (2**70, kvdock.IndexRangeError)]
)
def test_a_group_that_is_not_there_leaves_no_route_behind(group: int, error: type[Exception]) -> None:
    src, dst = make(), make(seed=3)
    for _ in range(2):
        with pytest.raises(error, match=r"PagedKVCache\.swap_blocks: group: expected "):
            Swapper().swap(src, dst, [(0, 1)], group=group)
    assert not src._routes._known.get(dst)


@pytest.mark.parametrize("to", [1, 64, 4096])
@pytest.mark.parametrize("layout", kvdock.KVCacheLayout)
def test_bytes_between_aligned_blocks_stay(layout: kvdock.KVCacheLayout, to: int) -> None:
    """The source has other gaps, or none."""
    src, dst = make(seed=4), make(9, seed=5, layout=layout, alignment=to)
    twin = make(9, seed=5, layout=layout, alignment=to)
    src.swap_blocks(dst, [(5, 8), (0, 0), (-1, 4)])
    for layer in range(src.num_layers):
        for ours, theirs in zip(src.buffers(layer).values(), twin.buffers(layer).values(), strict=True):
            theirs[8], theirs[0] = ours[5], ours[0]
    assert unchanged(dst, image(twin)), "blocks, and canaries between them"


# Host caches


@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 257])
def test_a_host_cache_of_any_size_takes_its_last_block(blocks: int) -> None:
    src = make(seed=6)
    host = host_cache(src, num_blocks=blocks)
    src.swap_blocks(host, [(5, blocks - 1)])
    for layer in range(src.num_layers):
        for name, ours in src.buffers(layer).items():
            theirs = host.buffers(layer)[name]
            assert torch.equal(theirs[-1].view(torch.int32), ours[5].view(torch.int32))
            assert not theirs[:-1].any()
    with pytest.raises(kvdock.IndexRangeError, match=rf"block_pairs\[0, 1\]: expected a block id below {blocks}, .*got {blocks}\."):
        src.swap_blocks(host, [(5, blocks)])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, kvdock.ArgumentValueError, "expected max_kv_memory_bytes or num_blocks, got neither. Fix: say how large the pool may be"),
        ({"num_blocks": 0}, kvdock.ArgumentValueError, "num_blocks: expected at least 1, got 0"),
        ({"num_blocks": 2.5}, kvdock.ArgumentTypeError, "num_blocks: expected an int of at least 1, got 2.5"),
        ({"max_kv_memory_bytes": 0}, kvdock.ArgumentValueError, "max_kv_memory_bytes: expected at least 1, got 0"),
    ],
)
def test_sizes_that_are_none(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        host_cache(make(), **options)
    assert str(caught.value) == f"PagedKVCacheConfig: {text}"


@pytest.mark.parametrize("cache", [None, 3, "static"])
def test_only_a_cache_in_blocks_has_a_host_cache(cache: Any) -> None:
    if cache == "static":
        cache = kvdock.create_cache(SPEC, kvdock.StaticKVCacheConfig(max_batch_size=1), CPU)
    with pytest.raises(kvdock.ArgumentTypeError) as caught:
        host_cache(cache, num_blocks=2)
    assert str(caught.value) == f"host_cache: cache: expected a cache in blocks, got {cache!r:.80}. Fix: pass the cache on the device"


EXITS = """
import torch, kvdock
from kvdock.cache import pinned
from kvdock.cache.swapping import host_cache
pinned.CHUNK = 4096
spec = kvdock.KVSpec.uniform(num_layers=2, num_kv_heads=2, head_dim=8, max_positions=64, dtype=torch.float32)
cache = kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(num_blocks=6, block_size=4), kvdock.RankInfo("cpu"))
hosts = [host_cache(cache, num_blocks=9) for _ in range(40)]
"""


@pytest.mark.slow
def test_a_process_may_exit_while_pages_are_being_locked() -> None:
    """Python ends daemon threads where they are: inside torch's code that aborted the process."""
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


# Tickets


def test_a_ticket_may_be_waited_for_twice_from_another_thread_and_behind_its_caches() -> None:
    src, dst = make(seed=7), make(seed=8)
    ticket = Swapper().swap(src, dst, [(0, 1)])
    assert torch.equal(dst.k_cache(0)[1], src.k_cache(0)[0])
    del src, dst
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            for call in (ticket.wait, ticket.synchronize) * 2:
                assert call() is None
            assert ticket.ready()
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(10)
    assert errors == []
