"""The prefix cache under test, reached as any user reaches it: by name."""

from __future__ import annotations

import kvdock
from kvdock.prefix import PrefixCache

__all__ = ["PrefixTarget"]


class PrefixTarget:
    """A prefix cache by name.

    Args:
        name: what `kvdock.create_prefix_cache` takes.
        setup: ``"module:function"`` that makes it known in a fresh interpreter, if no entry point does.

    Raises:
        ArgumentValueError: nobody brings it, or several plugins do.
        PluginError: a plugin's class made something else.
    """

    fault: str | None = None
    """Name of the fault that a fresh interpreter seeds too; nobody but a seeded fault says so."""

    def __init__(self, name: str, setup: str | None = None) -> None:
        self.name, self.setup = name, setup
        self.kind = type(self.make(16))

    def make(self, block_size: int) -> PrefixCache:
        """Make a cache of this kind."""
        return kvdock.create_prefix_cache(self.name, block_size=block_size)

    def spoilt(self) -> str:
        """Return why this process is of no more use: it always is, since a prefix cache has no device."""
        return ""

    @property
    def policy(self) -> str | None:
        """Name of the order of eviction that it declares: its attribute ``policy``, or that one's ``name``; None if it has none."""
        declared = getattr(self.make(16), "policy", None)
        name = getattr(declared, "name", declared)
        return name if isinstance(name, str) else None
