"""kvdock: one KV-cache layer for LLM engines on any accelerator, and one contract for hardware vendors to plug into.

Above it sits an engine, below it kernels that plugins bring. Importing it touches no device and loads no plugin; backends
are found at the first use. Names are imported when they are first asked for (PEP 562): beside `import torch`, importing all of
kvdock would cost another tenth of a second, twice that with the garbage collection that it sets off.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdock import ops
    from kvdock.cache.factory import create_cache
    from kvdock.cache.interface import Cache, CacheConfig
    from kvdock.cache.paged import PagedKVCache, PagedKVCacheConfig
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
        IndexRangeError,
        IntegrityError,
        KVDockError,
        KVDockWarning,
        NoBackendError,
        OutOfBlocksError,
        PluginError,
        StaleHandleError,
        UnsupportedError,
        WrongThreadError,
    )
    from kvdock.interface import (
        HOST_INT,
        KVDOCK_API,
        Backend,
        Capabilities,
        Descriptor,
        Kernel,
        Priority,
        Probe,
        ProbeState,
        Request,
        TensorMeta,
    )
    from kvdock.layout import HeadLayout, KVCacheLayout
    from kvdock.ops.dispatcher import OpDispatcher
    from kvdock.ops.modes import debug, use_backend
    from kvdock.plugins.hookspecs import hookimpl
    from kvdock.prefix.factory import create_prefix_cache
    from kvdock.prefix.interface import PrefixCache
    from kvdock.rank import RankInfo
    from kvdock.runtime import Runtime
    from kvdock.scheduler.cache_manager import CacheManager
    from kvdock.spec import COPY_DTYPES, QUANTISED_DTYPES, KVSpec, LayerSpec, MLALayerSpec

__all__ = [
    "COPY_DTYPES",
    "HOST_INT",
    "KVDOCK_API",
    "QUANTISED_DTYPES",
    "AmbiguousBackendError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "Backend",
    "BackendError",
    "BackendUnavailableError",
    "Cache",
    "CacheConfig",
    "CacheManager",
    "Capabilities",
    "CapacityError",
    "Descriptor",
    "DroppedCacheError",
    "HeadLayout",
    "IndexRangeError",
    "IntegrityError",
    "KVCacheLayout",
    "KVDockError",
    "KVDockWarning",
    "KVSpec",
    "Kernel",
    "LRUDescriptorCache",
    "LayerSpec",
    "MLALayerSpec",
    "NoBackendError",
    "OpDispatcher",
    "OutOfBlocksError",
    "PagedKVCache",
    "PagedKVCacheConfig",
    "PluginError",
    "PrefixCache",
    "Priority",
    "Probe",
    "ProbeState",
    "RankInfo",
    "Request",
    "Runtime",
    "ShardedKVCache",
    "StaleHandleError",
    "StaticKVCache",
    "StaticKVCacheConfig",
    "TensorMeta",
    "UnsupportedError",
    "WrongThreadError",
    "create_cache",
    "create_prefix_cache",
    "debug",
    "hookimpl",
    "ops",
    "use_backend",
]

__version__ = "0.1.0"

_HOMES = {
    "kvdock.cache.factory": "create_cache",
    "kvdock.cache.interface": "Cache CacheConfig",
    "kvdock.cache.paged": "PagedKVCache PagedKVCacheConfig",
    "kvdock.cache.sharded": "ShardedKVCache",
    "kvdock.cache.static": "StaticKVCache StaticKVCacheConfig",
    "kvdock.descriptors.lru": "LRUDescriptorCache",
    "kvdock.errors": (
        "AmbiguousBackendError ArgumentTypeError ArgumentValueError BackendError BackendUnavailableError CapacityError "
        "DroppedCacheError IndexRangeError IntegrityError KVDockError KVDockWarning NoBackendError OutOfBlocksError "
        "PluginError StaleHandleError UnsupportedError WrongThreadError"
    ),
    "kvdock.interface": ("HOST_INT KVDOCK_API Backend Capabilities Descriptor Kernel Priority Probe ProbeState Request TensorMeta"),
    "kvdock.layout": "HeadLayout KVCacheLayout",
    "kvdock.ops.dispatcher": "OpDispatcher",
    "kvdock.ops.modes": "debug use_backend",
    "kvdock.plugins.hookspecs": "hookimpl",
    "kvdock.prefix.factory": "create_prefix_cache",
    "kvdock.prefix.interface": "PrefixCache",
    "kvdock.rank": "RankInfo",
    "kvdock.runtime": "Runtime",
    "kvdock.scheduler.cache_manager": "CacheManager",
    "kvdock.spec": "COPY_DTYPES QUANTISED_DTYPES KVSpec LayerSpec MLALayerSpec",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}


if not TYPE_CHECKING:  # a type checker would take any name for granted

    def __getattr__(name: str) -> Any:
        """Import a public name, or a module of kvdock, at its first use."""
        if name in _HOME:
            value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
            return value
        try:
            return importlib.import_module(f"kvdock.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"kvdock.{name}":
                raise
            raise AttributeError(f"module 'kvdock' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
