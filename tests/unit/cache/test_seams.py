"""What a cache asks of the ops it is handed: what `OpSource` says, and nothing else."""

from __future__ import annotations

import copy
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvdock
from kvdock.cache.interface import BindableOp, OpSource, require_backend
from kvdock.ops.selection import Choice
from support_caches import CPU, SPECS, counting_runtime


class Bare:
    """An `OpSource` with no member but those of the protocol, over a dispatcher."""

    def __init__(self, dispatcher: kvdock.OpDispatcher) -> None:
        self._dispatcher = dispatcher

    def op(self, name: str) -> BindableOp:
        return BareOp(self._dispatcher.op(name))

    def choose(self, op: str, device: torch.device, named: str | None) -> Choice:
        return self._dispatcher.choose(op, device, named)


class BareOp:
    """A `BindableOp` with no other member."""

    def __init__(self, op: BindableOp) -> None:
        self._op = op

    def bind(self, *pools: torch.Tensor, named: str | None = None) -> Callable[..., None]:
        return self._op.bind(*pools, named=named)


def members(protocol: type) -> set[str]:
    """Return the public names that a protocol, or a class like it, has."""
    return {name for name in vars(protocol) if not name.startswith("_")}


def test_the_bare_ones_have_what_the_protocols_say() -> None:
    assert members(Bare) == members(OpSource) == {"op", "choose"}
    assert members(BareOp) == members(BindableOp) == {"bind"}


def test_a_paged_cache_needs_no_more() -> None:
    runtime, calls = counting_runtime("mine")
    cache = kvdock.create_cache(SPECS["uniform"], kvdock.PagedKVCacheConfig(num_blocks=4, block_size=2), CPU, ops=Bare(runtime.dispatcher))
    new, slots = torch.randn(3, 2, 8), torch.tensor([5, 0, 1])
    for one in (cache, copy.deepcopy(cache)):
        one.update(1, new, -new, slots)
        one.copy_blocks([(0, 3)])
        k, v = one.gather(1, torch.tensor([6, 7, 5]))
        assert torch.equal(k, new[[1, 2, 0]])
        assert torch.equal(v, -new[[1, 2, 0]])
    assert calls == {("mine", op): 2 for op in ("paged_caching_", "copy_blocks_", "gather_paged")}


def test_static_and_sharded_caches_need_no_more() -> None:
    runtime, calls = counting_runtime("mine")
    spec, ops, new = SPECS["uniform"], Bare(runtime.dispatcher), torch.randn(1, 2, 3, 8)
    static = kvdock.create_cache(spec, kvdock.StaticKVCacheConfig(), CPU, ops=ops)
    assert torch.equal(static.update(0, new, -new, 0)[1], -new)
    sharded = kvdock.ShardedKVCache.create(spec, 8, ["cpu", "cpu"], ops=ops)
    assert torch.equal(sharded.update(1, 2, new[:, 1:], -new[:, 1:], 0)[0], new[:, 1:])
    assert calls == {("mine", "static_update_"): 2}


SIGNATURES = {
    "CacheConfig.build": kvdock.CacheConfig.build,
    "PagedKVCacheConfig.build": kvdock.PagedKVCacheConfig.build,
    "StaticKVCacheConfig.build": kvdock.StaticKVCacheConfig.build,
    "PagedKVCache": kvdock.PagedKVCache.__init__,
    "StaticKVCache": kvdock.StaticKVCache.__init__,
    "ShardedKVCache.create": kvdock.ShardedKVCache.create,
    "create_cache": kvdock.create_cache,
    "require_backend": require_backend,
    "OpSource.op": OpSource.op,
    "OpSource.choose": OpSource.choose,
    "BindableOp.bind": BindableOp.bind,
}


def mentions_any(hint: Any) -> bool:
    """Whether a type is Any, or has it in it."""
    parts = typing.get_args(hint)
    return hint is Any or any(mentions_any(part) for part in parts if part is not Ellipsis)


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_seam_is_typed(name: str) -> None:
    hints = typing.get_type_hints(SIGNATURES[name])
    assert "return" in hints
    assert not [argument for argument, hint in hints.items() if mentions_any(hint)]
    assert hints.get("ops", OpSource) in (OpSource, OpSource | None)
