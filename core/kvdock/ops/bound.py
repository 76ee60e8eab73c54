"""An op bound to its pools, which is copied along with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any, NoReturn, Self

import torch

from kvdock.errors import UnsupportedError

__all__ = ["BoundOp"]


class BoundOp:
    """What `OpEntry.bind` knows of its pools: the ``self`` of the function that it returns.

    Copying that function copies right, and so does copying what keeps it: a deep copy is bound to the deep copies of the
    pools, with the same backend; a shallow one to the same pools. It cannot be pickled.

    Args:
        read: what reads the pools; see `kvdock.ops.signature.compile_binder`.
        function: the function of which this is the first argument, shared by everything that is bound to the op.
        pools: the op's static tensor arguments.
        named: backend to use for good, or None.
    """

    __slots__ = ("_function", "_named", "_pools", "_read", "fixed", "head")

    def __init__(
        self, read: Callable[..., tuple[Any, Any]], function: Callable[..., None], pools: tuple[torch.Tensor, ...], named: str | None
    ) -> None:
        self._read, self._function, self._pools, self._named = read, function, pools, named
        self.head, self.fixed = read(*pools, named)

    @property
    def call(self) -> Callable[..., None]:
        """The op as a function of its other arguments. Not kept here: in a cycle the pools would outlive their last user."""
        return MethodType(self._function, self)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(self._read, self._function, copy.deepcopy(self._pools, memo), self._named)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "pickling a bound op",
            expected="a copy in this process, by copy.deepcopy",
            got=f"pickle: it is bound to {len(self._pools)} pool(s) of this process",
            fix="bind one anew where it is to be used",
        )
