"""Functions that `torch.compile` is to call as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["untraced"]


def untraced(function: Callable[..., Any]) -> Any:
    """Let Dynamo call a function instead of tracing it, as `torch.compiler.disable` does.

    That one takes most of a microsecond of each call, several on slow hosts, also where nothing is compiled; and a layer makes two.
    """
    disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]  # torch does not annotate it

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        # Dynamo finds True here while it traces.
        return disabled(*args, **kwargs) if torch.compiler.is_dynamo_compiling() else function(*args, **kwargs)

    return called
