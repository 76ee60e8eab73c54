"""kvdock: one KV-cache layer for LLM engines on any accelerator, and one contract for hardware vendors to plug into.

Above it sits an engine, below it kernels that plugins bring. Importing it touches no device and loads no plugin; backends
are found at the first use. What an engine needs is here; what a plugin needs is in `kvdock.plugin`. Names are imported when
they are first asked for (PEP 562): beside `import torch`, importing all of kvdock would cost another tenth of a second, twice
that with the garbage collection that it sets off.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdock import ops, plugin
    from kvdock.cache.factory import create_cache
    from kvdock.cache.interface import Cache, CacheConfig
    from kvdock.cache.mla import MLAKVCache
    from kvdock.cache.paged import PagedKVCache
    from kvdock.cache.paged_config import PagedKVCacheConfig
    from kvdock.cache.plan import plan_blocks
    from kvdock.cache.sharded import ShardedKVCache
    from kvdock.cache.static import StaticKVCache, StaticKVCacheConfig
    from kvdock.descriptors.lru import LRUDescriptorCache
    from kvdock.errors import (
        AmbiguousBackendError,
        ArgumentTypeError,
        ArgumentValueError,
        BackendError,
        BackendUnavailableError,
        CapacityError,
        DroppedCacheError,
        FileAccessError,
        FileContentError,
        IndexRangeError,
        IntegrityError,
        KVDockError,
        KVDockWarning,
        NoBackendError,
        OutOfBlocksError,
        StaleHandleError,
        TransferError,
        UnsupportedError,
        WrongThreadError,
    )
    from kvdock.layout import HeadLayout, KVCacheLayout
    from kvdock.ops.dispatcher import OpDispatcher
    from kvdock.ops.modes import debug, use_backend
    from kvdock.prefix.factory import create_prefix_cache
    from kvdock.rank import RankInfo
    from kvdock.runtime import Runtime
    from kvdock.scheduler.cache_manager import CacheManager
    from kvdock.spec import KVSpec, LayerSpec, MLALayerSpec
    from kvdock.tiers.host import HostTier

__all__ = [
    "AmbiguousBackendError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "BackendError",
    "BackendUnavailableError",
    "Cache",
    "CacheConfig",
    "CacheManager",
    "CapacityError",
    "DroppedCacheError",
    "FileAccessError",
    "FileContentError",
    "HeadLayout",
    "HostTier",
    "IndexRangeError",
    "IntegrityError",
    "KVCacheLayout",
    "KVDockError",
    "KVDockWarning",
    "KVSpec",
    "LRUDescriptorCache",
    "LayerSpec",
    "MLAKVCache",
    "MLALayerSpec",
    "NoBackendError",
    "OpDispatcher",
    "OutOfBlocksError",
    "PagedKVCache",
    "PagedKVCacheConfig",
    "RankInfo",
    "Runtime",
    "ShardedKVCache",
    "StaleHandleError",
    "StaticKVCache",
    "StaticKVCacheConfig",
    "TransferError",
    "UnsupportedError",
    "WrongThreadError",
    "create_cache",
    "create_prefix_cache",
    "debug",
    "ops",
    "plan_blocks",
    "plugin",
    "use_backend",
]

__version__ = "0.1.0"

_HOMES = {
    "kvdock.cache.factory": "create_cache",
    "kvdock.cache.interface": "Cache CacheConfig",
    "kvdock.cache.mla": "MLAKVCache",
    "kvdock.cache.paged": "PagedKVCache",
    "kvdock.cache.paged_config": "PagedKVCacheConfig",
    "kvdock.cache.plan": "plan_blocks",
    "kvdock.cache.sharded": "ShardedKVCache",
    "kvdock.cache.static": "StaticKVCache StaticKVCacheConfig",
    "kvdock.descriptors.lru": "LRUDescriptorCache",
    "kvdock.errors": (
        "AmbiguousBackendError ArgumentTypeError ArgumentValueError BackendError BackendUnavailableError CapacityError "
        "DroppedCacheError FileAccessError FileContentError IndexRangeError IntegrityError KVDockError KVDockWarning NoBackendError "
        "OutOfBlocksError StaleHandleError TransferError UnsupportedError WrongThreadError"
    ),
    "kvdock.layout": "HeadLayout KVCacheLayout",
    "kvdock.ops.dispatcher": "OpDispatcher",
    "kvdock.ops.modes": "debug use_backend",
    "kvdock.prefix.factory": "create_prefix_cache",
    "kvdock.rank": "RankInfo",
    "kvdock.runtime": "Runtime",
    "kvdock.scheduler.cache_manager": "CacheManager",
    "kvdock.spec": "KVSpec LayerSpec MLALayerSpec",
    "kvdock.tiers.host": "HostTier",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

_OLD = {
    "kvdock.plugin": (
        "COPY_DTYPES HOST_INT KVDOCK_API QUANTISED_DTYPES Backend Capabilities Descriptor Kernel PluginError PrefixCache Priority "
        "Probe ProbeState Request TensorMeta hookimpl"
    ),
}
"""Names that have moved, by their new place. Until 0.2 they are found here too, with a warning."""
_MOVED = {name: module for module, names in _OLD.items() for name in names.split()}


if not TYPE_CHECKING:  # a type checker would take any name for granted

    def __getattr__(name: str) -> Any:
        """Import a public name, or a module of kvdock, at its first use."""
        if name in _HOME:
            value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
            return value
        if name in _MOVED:
            place = _MOVED[name]
            text = f"kvdock.{name} has moved to {place}.{name}, and leaves its old place with kvdock 0.2"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return getattr(importlib.import_module(place), name)
        try:
            return importlib.import_module(f"kvdock.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"kvdock.{name}":
                raise
            raise AttributeError(f"module 'kvdock' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
