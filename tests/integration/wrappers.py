"""Models in other models, whose `generate` runs what is inside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch


class Wrapper(torch.nn.Module):
    """A model in another, as PEFT makes it: `generate` and `forward` are those of what is inside.

    ``adapter_names`` never reaches the model: they are given to single layers, by hooks that stay for one call.

    Args:
        inside: the model.
    """

    def __init__(self, inside: torch.nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inside"), name)

    def forward(self, *args: Any, adapter_names: list[str] | None = None, **kwargs: Any) -> Any:
        """Run what is inside."""
        with self.adapters(adapter_names):
            return self.inside(*args, **kwargs)

    def generate(self, *args: Any, adapter_names: list[str] | None = None, **kwargs: Any) -> Any:
        """Generate with what is inside."""
        with self.adapters(adapter_names):
            return self.inside.generate(*args, **kwargs)

    @contextlib.contextmanager
    def adapters(self, names: list[str] | None) -> Iterator[None]:
        """Let an adapter double what a layer gets."""
        hook = partial(lambda module, args, names: tuple(2 * arg for arg in args), names=names)
        handle = self.inside.model.layers[0].mlp.register_forward_pre_hook(hook) if names else None
        try:
            yield
        finally:
            if handle:
                handle.remove()
