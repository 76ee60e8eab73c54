"""What finds a plan, and what does not: through real calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import kvdock
from kvdock import ArgumentValueError
from kvdock.descriptors.manager import DescriptorCacheManager
from kvdock.ops.dispatcher import OpDispatcher
from kvdock.ops.schema import Arg, OpSchema, Role
from kvdock.plugins.registry import Registry
from support_descriptors import DEVICES, Pool, WatchingBackend, dispatcher_of, on
from support_plugins import QUIET, InProcessBackend, plugin

FLIP = OpSchema(
    "flip",
    (
        Arg("out", Role.MUTATED, ("N D",), (torch.float32,)),
        Arg("x", Role.TENSOR, ("N D",), (torch.float32,)),
        Arg("axis", Role.STATIC),
    ),
)


class Flip(kvdock.plugin.Kernel):
    """Flips along an axis that is static."""

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        return ()

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        return Flipped(request.args["axis"])


class Flipped(kvdock.plugin.Descriptor):
    def __init__(self, axis: Any) -> None:
        self.axis = axis

    def __call__(self, out: torch.Tensor, x: torch.Tensor, axis: Any) -> None:
        assert (self.axis, type(self.axis)) == (axis, type(axis)), "a plan of another axis"
        out.copy_(x.flip(int(axis)))


def test_keys_of_one_hash_run_their_own_kernels() -> None:
    """hash(-1) is hash(-2), so that the keys of the two axes have one hash as well."""
    dispatcher = dispatcher_of(
        InProcessBackend("flipper", claims=("cpu",), devices=("cpu",), kernels={"flip": Flip()}), schemas={"flip": FLIP}
    )
    out, x = torch.zeros(3, 2), torch.arange(6.0).reshape(3, 2)
    call = dispatcher.op("flip").call
    for _ in range(2):
        for axis in (-1, -2, 1, 1.0, True, 0, False):
            call(out, x, axis)
            assert torch.equal(out, x.flip(int(axis)))
    keys = list(dispatcher.descriptors.cache("flip", None).entries)
    assert len(keys) == len(set(keys)) == 7
    assert len({hash(key) for key in keys}) < 7, "the test is of no use if they do not collide"


@pytest.mark.parametrize("device", ["cpu", *DEVICES])
def test_token_count_and_leading_strides_are_no_part_of_it(device: str) -> None:
    backend = WatchingBackend()
    dispatcher = dispatcher_of(backend)
    pool = Pool(device)
    for tokens in (1, 2, 3, 4, 1):
        assert pool.write(dispatcher, float(tokens), slot=0, tokens=tokens)
    wide = torch.randn(3, 2, 100)
    for width in (8, 16, 48):
        k, v = wide[:, :1, :4], wide[:, 1:, :4].as_strided((3, 1, 4), (width, 4, 1), 100)
        dispatcher.op("paged_caching_").call(*pool.caches, on(device, k), on(device, v), on(device, torch.arange(3)), None, None)
        assert torch.equal(pool.memory[1].view(6, 1, 4)[:3], v)
    assert len(backend.own["paged_caching_"].prepared) == 1
    (stats,) = dispatcher.descriptors.stats()["paged_caching_"].values()
    assert (stats.hits, stats.misses, stats.size) == (7, 1, 1)


@pytest.mark.parametrize("device", ["cpu", *DEVICES])
def test_each_alignment_class_has_its_own(device: str) -> None:
    backend = WatchingBackend()
    dispatcher = dispatcher_of(backend)
    pool, memory = Pool(device), torch.randn(100)
    start = -memory.data_ptr() // 4 % 4
    for _ in range(2):
        for offset in (0, 1, 2, 3, 4, 6):
            k = memory[start + offset : start + offset + 4].view(1, 1, 4)
            dispatcher.op("paged_caching_").call(
                *pool.caches, on(device, k), on(device, torch.zeros(1, 1, 4)), on(device, torch.tensor([1])), None, None
            )
            assert torch.equal(pool.memory[0][0, 1], k[0])
    classes = sorted({request.tensor("k").alignment for request in backend.own["paged_caching_"].prepared})
    assert (classes, len(backend.own["paged_caching_"].prepared)) == ([4, 8, 16], 3)


def test_the_device_is_in_it_and_each_has_a_cache() -> None:
    for order in (DEVICES, DEVICES[::-1]):
        backend = WatchingBackend()
        dispatcher = dispatcher_of(backend)
        pools = [Pool(device) for device in (*order, "cpu", *order, *order)]
        assert all(pool.write(dispatcher, 1.0 + number) for number, pool in enumerate(pools))
        assert [str(request.device) for request in backend.own["paged_caching_"].prepared] == [*order, "cpu"]
        stats = dispatcher.descriptors.stats()["paged_caching_"]
        assert {str(device): (counted.misses, counted.hits, counted.size) for device, counted in stats.items()} == {
            order[0]: (1, 2, 1),
            order[1]: (1, 2, 1),
            "None": (1, 0, 1),
        }
        assert backend.ledger.faults == []


def test_two_dispatchers_do_not_share_caches() -> None:
    """Their keys say nothing about whose kernels are meant."""
    manager = DescriptorCacheManager()
    registries = []
    for _ in range(2):
        registries.append(Registry(QUIET))
        registries[-1].register(plugin(WatchingBackend()), "made by a test")
    OpDispatcher(registries[0], descriptors=manager)
    with pytest.raises(ArgumentValueError, match=r"descriptor caches of .*: expected one owner"):
        OpDispatcher(registries[1], descriptors=manager)
