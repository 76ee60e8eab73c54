"""An op bound to its pools, which is copied along with them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, NoReturn, Self

import torch

from kvdock.errors import UnsupportedError
from kvdock.ops.geometry import extent
from kvdock.ops.signatures import Recent
from kvdock.ops.tracing import as_constant

__all__ = ["BoundOp"]


class BoundOp:
    """What `OpEntry.bind` knows of its pools: the first argument of ``bound_call`` in `kvdock.ops.calls`.

    It is kept here, and not by cells of a closure, which nobody could copy. Copying the function that `OpEntry.bind` returns copies
    right, and so does copying what keeps it: a deep copy is bound to the deep copies of the pools, with the same backend; a shallow
    one to the same pools. It cannot be pickled.

    Args:
        function: the function of which this is the first argument, shared by everything that is bound to the op.
        pools: the op's static tensor arguments.
        own_name: backend to use for good, or None.
        written: places of those that the op writes.
    """

    __slots__ = ("__weakref__", "_function", "_pools", "_views", "_written", "fixed", "own_name", "recent", "roots")

    def __init__(self, function: Callable[..., Any], pools: tuple[torch.Tensor, ...], own_name: str | None, written: Sequence[int]) -> None:
        self._function, self._pools, self.own_name, self._written = function, pools, own_name, written
        self.recent = Recent(own_name, is_bound=True)
        ranges = [(pool.data_ptr(), pool.data_ptr() + extent(pool)) for pool in pools]
        targets = [ranges[place] for place in written]
        low, high = (min(at for at, _ in targets), max(end for _, end in targets)) if targets else (0, 0)
        pairs = [_root_of(pool) for pool in pools]
        self.roots, self._views = tuple(root for root, _ in pairs), tuple(view for _, view in pairs)
        self.fixed = (*pools, *(address for each in ranges for address in each), low, high)

    @property
    def bound_call(self) -> Callable[..., Any]:
        """The op as a function of its other arguments. Not kept here: in a cycle the pools would outlive their last user.

        It has the name of that function, since `copy.copy` looks a method up by the name of its function.
        """
        return MethodType(self._function, self)

    def traced_pools(self) -> tuple[torch.Tensor, ...]:
        """Return the pools as torch.compile is to see them: views of the tensors whose memory they are.

        A graph that is given several tensors of one memory copies between them, or cannot be replayed; so it is given that memory, once.
        What reads a pool after a traced write must read this view.
        """
        self.keep_in_place()
        pairs = zip(self.roots, self._views, strict=True)
        return tuple([root if view is None else root.as_strided(*view) for root, view in pairs])

    @as_constant
    def keep_in_place(self) -> bool:
        """Tell torch.compile, while it traces, that the pools stay where and as they are.

        It replays no graph that writes other tensors, and takes sizes that are equal by chance for one size.
        """
        for tensor in self.roots:
            torch._dynamo.mark_static_address(tensor)
            known: Any = tensor  # what torch._dynamo.mark_static sets, which does something else while one traces
            known._dynamo_static_indices, known._has_dynamo_dim_marking = {*range(tensor.dim())}, True
        return True

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(self._function, copy.deepcopy(self._pools, memo), self.own_name, self._written)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "pickling a bound op",
            expected="a copy in this process, by copy.deepcopy",
            got=f"pickle: it is bound to {len(self._pools)} pool(s) of this process",
            fix="bind one anew where it is to be used",
        )


_View = tuple[tuple[int, ...], tuple[int, ...], int]


def _root_of(pool: torch.Tensor) -> tuple[torch.Tensor, _View | None]:
    """Return the tensor that a pool is a view of, and which view; the pool itself where it is none, or one of another kind."""
    root = pool._base
    if root is None or root.requires_grad or root.dtype != pool.dtype or root.is_neg() != pool.is_neg() or root.is_conj() != pool.is_conj():
        return pool, None
    return root, (tuple(pool.shape), pool.stride(), int(pool.storage_offset()))
