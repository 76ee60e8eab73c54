"""The door for plugins: everything that the author of a backend or of a prefix cache imports, and nothing that an engine needs.

What is listed here follows the version of the contract, `KVDOCK_API`. Everything else in kvdock may change with any release.
A backend has

* the interface: `Backend`, `Kernel`, `Descriptor`, and what they are handed and return: `Request`, `TensorMeta`, `Probe`,
  `Capabilities`, `Priority`, and where it has streams beside the current ones `Stream` and `Mark`;
* the hooks, which `hookimpl` marks, and `KVDOCK_API`, which its module repeats;
* checks of index values that lie in host memory: `slots_in_range`, `check_lengths`, `live_pairs` and their like;
* bits: `as_bits`, `bits_dtype`, `common_alignment`; `quantised_reasons` refuses what is no copy of bits; a `SkipCounter` counts the
  writes that a device skips;
* `swap_staged`, which swaps blocks with host memory that a device cannot reach by itself;
* `LatentKernel`, which makes a kernel for latents of one for keys and values;
* ops of a plugin's own: an `Op` has an `OpSchema` of `Arg`, and `call_op` calls it;
* prefix caches: `PrefixCache`, what its methods return, policies, and the checks of arguments that kvdock's own use;
* transports: `kvdock.transfer` has their contract, `Transport`;
* errors: all of `kvdock.errors` that a plugin raises.

Importing it imports no plugin and no compiler. A base for devices that a kernel compiler serves belongs to the library with its
kernels: a distribution of kvdock's own has one, which the page on writing a backend names.
"""

from kvdock.bits import SkipCounter, as_bits, bits_dtype, common_alignment, quantised_reasons
from kvdock.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    BackendError,
    CapacityError,
    IndexRangeError,
    IntegrityError,
    KVDockError,
    KVDockWarning,
    PluginError,
    StaleHandleError,
    TransferError,
    UnsupportedError,
    WrongThreadError,
)
from kvdock.interface import (
    HOST,
    HOST_INT,
    KVDOCK_API,
    Backend,
    Capabilities,
    Descriptor,
    Kernel,
    Mark,
    Priority,
    Probe,
    ProbeState,
    Request,
    Stream,
    TensorMeta,
)
from kvdock.ops.attention import check_paged_attention
from kvdock.ops.catalog import Op
from kvdock.ops.dispatcher import call_op
from kvdock.ops.index_values import check_lengths, check_pairs, check_slots, equal_slots, live_pairs, pairs_on_device, slots_in_range
from kvdock.ops.latents import LatentKernel
from kvdock.ops.portable.rows import write_rows
from kvdock.ops.portable.swap_blocks import swap_staged
from kvdock.ops.schema import Arg, OpSchema, Relation, Role
from kvdock.plugins.hookspecs import hookimpl
from kvdock.prefix.events import Cleared, EventStream, Removed, Stored
from kvdock.prefix.eviction import EvictionPolicy, Usage, policy_of
from kvdock.prefix.inputs import as_blocks, as_integers, check_block_size, check_distinct, check_priority, count_of, namespace_key
from kvdock.prefix.interface import InsertResult, PartialMatch, PrefixCache, PrefixHandle, PrefixMatch, SizeInfo, other_namespace
from kvdock.prefix.ownership import OneThread
from kvdock.prefix.stats import PrefixStats
from kvdock.spec import COPY_DTYPES, QUANTISED_DTYPES

__all__ = [
    "COPY_DTYPES",
    "HOST",
    "HOST_INT",
    "KVDOCK_API",
    "QUANTISED_DTYPES",
    "Arg",
    "ArgumentTypeError",
    "ArgumentValueError",
    "Backend",
    "BackendError",
    "Capabilities",
    "CapacityError",
    "Cleared",
    "Descriptor",
    "EventStream",
    "EvictionPolicy",
    "IndexRangeError",
    "InsertResult",
    "IntegrityError",
    "KVDockError",
    "KVDockWarning",
    "Kernel",
    "LatentKernel",
    "Mark",
    "OneThread",
    "Op",
    "OpSchema",
    "PartialMatch",
    "PluginError",
    "PrefixCache",
    "PrefixHandle",
    "PrefixMatch",
    "PrefixStats",
    "Priority",
    "Probe",
    "ProbeState",
    "Relation",
    "Removed",
    "Request",
    "Role",
    "SizeInfo",
    "SkipCounter",
    "StaleHandleError",
    "Stored",
    "Stream",
    "TensorMeta",
    "TransferError",
    "UnsupportedError",
    "Usage",
    "WrongThreadError",
    "as_bits",
    "as_blocks",
    "as_integers",
    "bits_dtype",
    "call_op",
    "check_block_size",
    "check_distinct",
    "check_lengths",
    "check_paged_attention",
    "check_pairs",
    "check_priority",
    "check_slots",
    "common_alignment",
    "count_of",
    "equal_slots",
    "hookimpl",
    "live_pairs",
    "namespace_key",
    "other_namespace",
    "pairs_on_device",
    "policy_of",
    "quantised_reasons",
    "slots_in_range",
    "swap_staged",
    "write_rows",
]
