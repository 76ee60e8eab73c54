"""Where the caches of these tests get their ops: from the CPU backend, and from the portable kernels."""

from __future__ import annotations

import functools

import pytest

import kvdock
from support_caches import RUNTIMES, runtime_for

_runtime = functools.lru_cache(runtime_for)


@pytest.fixture(params=RUNTIMES)
def ops(request: pytest.FixtureRequest) -> kvdock.OpDispatcher:
    """The ops of a runtime."""
    return _runtime(request.param).dispatcher
