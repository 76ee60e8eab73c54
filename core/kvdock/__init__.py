"""kvdock: one KV-cache layer for LLM engines on any accelerator, and one contract for hardware vendors to plug into.

Above it sits an engine, below it kernels that plugins bring. Importing it touches no device and loads no plugin; backends
are found at the first use.
"""

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
