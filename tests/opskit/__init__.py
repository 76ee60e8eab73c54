"""What the tests of ops share.

In the order of a test: `memory` (tensors cut out of bytes that are all compared afterwards), `layouts` (pools and sources in
the memory orders that engines use), `targets` (what an op may run on), `checks` (an op against the reference).
"""

from opskit.checks import PROPERTY, check, check_gather, noting, outcome_of
from opskit.kernels import CountingKernel, counting_runtime, runtime_of
from opskit.layouts import POOLS, SOURCES, Geometry
from opskit.memory import Memory, bits_of
from opskit.targets import DEVICE_KERNELS, SINGLE, TARGETS, Target, active, torch_threads

__all__ = [
    "DEVICE_KERNELS",
    "POOLS",
    "PROPERTY",
    "SINGLE",
    "SOURCES",
    "TARGETS",
    "CountingKernel",
    "Geometry",
    "Memory",
    "Target",
    "active",
    "bits_of",
    "check",
    "check_gather",
    "counting_runtime",
    "noting",
    "outcome_of",
    "runtime_of",
    "torch_threads",
]
