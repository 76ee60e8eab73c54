"""One op's prepared plans, one table per thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["DescriptorTable"]


class DescriptorTable(threading.local):
    """The calling thread's plans by key: ``table.plans`` is a dictionary of its own in each thread.

    A descriptor belongs to the thread that prepared it, so that no lock stands in the way of a call. Keys are exact tuples
    of what is static, compared for equality.

    Args:
        destroyer: called with a plan that is dropped, in the thread that owns it.
    """

    def __init__(self, destroyer: Callable[[Any], None]) -> None:
        self.plans: dict[Any, Any] = {}
        self._destroyer = destroyer
        self._epoch = 0

    def put(self, key: Any, plan: Any, epoch: int) -> None:
        """Keep a plan under its key, dropping all of an earlier epoch: their keys are never looked up again."""
        if epoch != self._epoch:
            self.clear()
            self._epoch = epoch
        self.plans[key] = plan

    def clear(self) -> None:
        """Drop and destroy the calling thread's plans."""
        plans = list(self.plans.values())
        self.plans.clear()
        for plan in plans:
            self._destroyer(plan)
