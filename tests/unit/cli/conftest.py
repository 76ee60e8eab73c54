from __future__ import annotations

from collections.abc import Iterator

import pytest

import kvdock
from kvdock import runtime
from kvdock.ops.catalog import CATALOG
from kvdock.plugins.registry import Registry
from opskit import active
from support_plugins import QUIET, CallKernel, InProcessBackend, plugin


@pytest.fixture
def acme_runtime() -> Iterator[runtime.Runtime]:
    """Make the process's runtime one with a ready backend for the CPU, one that is not here, and one that is broken."""
    registry = Registry(QUIET, ops=[*CATALOG, "own_op"])
    kernels = {"copy_blocks_": CallKernel(lambda *args: None), "own_op": CallKernel(lambda *args: None)}
    ready = InProcessBackend("acme", claims=("cpu",), devices=("cpu",), kernels=kernels)
    broken = InProcessBackend("broken", device_type="other", probe=kvdock.plugin.Probe.unusable("driver 3 is too old"))
    registry.register(plugin(ready), "acme-plugin")
    registry.register(plugin(InProcessBackend("absent", probe=kvdock.plugin.Probe.absent("no card")), broken), "others")
    with active(runtime.Runtime(registry)) as mine:
        yield mine
