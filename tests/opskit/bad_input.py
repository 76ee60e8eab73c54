"""Tables of bad input: how good arguments are spoilt, and the whole text of the error."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest
import torch

import kvdock
from opskit.memory import Memory
from opskit.targets import Target

__all__ = ["Args", "Bad", "check_refused", "inside"]

Args = dict[str, Any]


@attrs.frozen
class Bad:
    """One bad input.

    Args:
        text: the error's text, without the op. ``{device}`` stands for the target's, a star for what changes (addresses).
        change: spoils good arguments, which are attributes: ``lambda a: {"k": a.k.float()}``.
        error: class of the error.
    """

    text: str
    change: Callable[[Any], Args]
    error: type[kvdock.KVDockError] = kvdock.ArgumentValueError


class _Attributes:
    """Arguments as attributes, for short lambdas."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self.__dict__.update(args)


def inside(cache: torch.Tensor, like: torch.Tensor, start: int) -> torch.Tensor:
    """Return a dense tensor shaped like another whose first element is element ``start``, counted from a cache's first."""
    strides = torch.empty(like.shape, device="meta").stride()
    return cache.as_strided(like.shape, strides, cache.storage_offset() + start)


def check_refused(target: Target, op: str, good: Callable[[Memory], Args], bad: Bad) -> None:
    """Call an op with a bad input, before and after a good call has left a plan.

    Each time it must raise the whole text, and not change one byte. Then the good call must work again.
    """
    memory = Memory(target.device)
    args = good(memory)
    wrong = args | bad.change(_Attributes(args))
    pattern = ".*".join(re.escape(part) for part in f"{op}: {bad.text}".replace("{device}", target.device_name).split("*"))
    before = memory.copy()
    for _ in range(2):
        with pytest.raises(bad.error) as caught:
            getattr(kvdock.ops, op)(**wrong)
        assert re.fullmatch(pattern, str(caught.value), re.DOTALL), str(caught.value)
        before.assert_same(f"{op} raised")
        getattr(kvdock.ops, op)(**args)
        before.restore()
