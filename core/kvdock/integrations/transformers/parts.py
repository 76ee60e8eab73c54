"""What a graph has of a model, and whether it is still the same.

A graph repeats launches on memory that was there when it was recorded. What a part of the model does on the host beside that is left
out. So a model is recorded only if its parts are Transformers' and torch's own, which do nothing else, and a graph is used only as long
as these parts, their tensors and where those are have not changed.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

__all__ = ["Parts"]

_KNOWN = ("torch.nn.", "transformers.")
"""Modules whose classes keep nothing on the host that changes what a decode step launches."""


class Parts:
    """The parts of a model and their tensors, as they are now.

    Args:
        model: the model.

    Attributes:
        problem: why nothing may be recorded; "" if it may.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        parts = list(model.modules())
        everything = list(map(vars, parts))
        self._below, self._size = everything[1:], 0  # the model's own forward is replaced while a graph stands in for it
        self._hooks = [each[name] for each in everything for name in ("_forward_hooks", "_forward_pre_hooks")]
        self._held = [held for each in everything for name in ("_modules", "_parameters", "_buffers") if (held := each[name])]
        self._tensors = [value for value in self._values() if isinstance(value, torch.Tensor)]
        self._known, self._addresses = list(self._values()), self._where()  # objects, so that no id is another's by now
        self._ids = list(map(id, self._known))
        strange = next((type(part) for part in parts if not type(part).__module__.startswith(_KNOWN)), None)
        own = "a forward of its own" if "forward" in everything[0] else ""
        self.problem = own or (f"a {strange.__module__}.{strange.__qualname__} in it" if strange else self.changed())

    def moved(self) -> str:
        """Return "", or that weights are not where they were: a graph would read memory that is somebody else's by now."""
        return "weights that were moved since" if self._where() != self._addresses else ""

    def changed(self) -> str:
        """Return what else is not as it was, or "". It is asked at each step, and takes some 0.1 us for each part."""
        if any(self._hooks) and (hook := self._foreign_hook()):
            return f"a hook on a part of it: {hook}"
        if sum(map(len, self._below)) != self._size:  # an attribute came or went: only then is it worth a look at each part
            if any("forward" in each or each.get("_compiled_call_impl") is not None for each in self._below):
                return "a part that was compiled, or has a forward of its own"
            self._size = sum(map(len, self._below))
        return "parts or weights that came or went since" if list(map(id, self._values())) != self._ids else ""

    def _values(self) -> chain[Any]:
        return chain.from_iterable(map(dict.values, self._held))

    def _where(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._tensors))

    def _foreign_hook(self) -> str:
        """Return a hook that is none of Transformers', which keep outputs that are asked for; or ""."""
        hooks = (hook for each in self._hooks for hook in each.values())
        return next((str(hook) for hook in hooks if not getattr(hook, "__module__", "").startswith(_KNOWN)), "")
