"""Making a cache: the class follows from the configuration."""

from __future__ import annotations

from typing import overload

from kvdock.cache.interface import Cache, CacheConfig, OpSource
from kvdock.cache.paged import PagedKVCache
from kvdock.cache.paged_config import PagedKVCacheConfig
from kvdock.cache.static import StaticKVCache, StaticKVCacheConfig
from kvdock.errors import ArgumentTypeError
from kvdock.ops.dispatcher import active_dispatcher
from kvdock.rank import RankInfo
from kvdock.spec import KVSpec

__all__ = ["create_cache"]


@overload
def create_cache(spec: KVSpec, config: PagedKVCacheConfig, rank: RankInfo, *, ops: OpSource | None = None) -> PagedKVCache: ...
@overload
def create_cache(spec: KVSpec, config: StaticKVCacheConfig, rank: RankInfo, *, ops: OpSource | None = None) -> StaticKVCache: ...
@overload
def create_cache(spec: KVSpec, config: CacheConfig, rank: RankInfo, *, ops: OpSource | None = None) -> Cache: ...
def create_cache(spec: KVSpec, config: CacheConfig, rank: RankInfo, *, ops: OpSource | None = None) -> Cache:
    """Make the cache that a configuration describes, and allocate its memory.

    Args:
        spec: what the layers need.
        config: what the user chose. A configuration of your own makes its own cache (`CacheConfig.build`).
        rank: device, and which share of the heads.
        ops: where the cache's ops come from, an `OpDispatcher`; default is the process's runtime.

    Raises:
        ArgumentTypeError: an argument of the wrong type.
        ArgumentValueError: heads and ranks do not divide, or more bytes than an address space has.
        CapacityError: a memory budget that is too small, or a device with less memory.
        UnsupportedError: a layer or dtype that no cache holds yet.
        BackendError: no backend can be chosen for the device; lists who is registered and why each is not usable.
    """
    for name, value, kind in (("spec", spec, KVSpec), ("config", config, CacheConfig), ("rank", rank, RankInfo)):
        if not isinstance(value, kind):
            raise ArgumentTypeError(f"create_cache: {name}", expected=f"a {kind.__name__}", got=repr(value)[:80])
    return config.build(spec, rank, ops if ops is not None else active_dispatcher())
