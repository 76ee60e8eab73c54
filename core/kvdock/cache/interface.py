"""What every cache and every configuration promises."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, Self, SupportsIndex, TypeVar

import torch

from kvdock.errors import ArgumentTypeError, IndexRangeError, UnsupportedError
from kvdock.ops.modes import MODE
from kvdock.ops.selection import Choice
from kvdock.rank import RankInfo
from kvdock.spec import KVSpec

__all__ = ["BindableOp", "Cache", "CacheConfig", "OpSource", "active_name", "check_layer", "require_backend"]

C = TypeVar("C")


class BindableOp(Protocol):
    """An op, as caches use it: bound to their memory once."""

    def bind(self, *pools: torch.Tensor, named: str | None = None) -> Callable[..., tuple[torch.Tensor, torch.Tensor] | None]:
        """Return the op as a function of its other arguments, in the schema's order.

        Copying the function must copy right: a deep copy is bound to the deep copies of the pools, see `Cache`.

        Args:
            pools: the op's static tensor arguments, in the schema's order. The result holds them.
            named: backend to use for good, or None for the usual choice at each call.

        Returns:
            A function that returns what the op returns. Where torch.compile traces an op that returns nothing, it returns the pools as
            the graph has them, for what reads them next.
        """
        ...


class OpSource(Protocol):
    """Where a cache gets its ops: all that it may ask of what it is handed. `kvdock.OpDispatcher` is one."""

    def op(self, name: str) -> BindableOp:
        """Return an op by its name, such as ``"paged_caching_"``.

        Raises:
            ArgumentValueError: there is no such op.
        """
        ...

    def choose(self, op: str, device: torch.device, named: str | None) -> Choice:
        """Return the backend that would serve an op on a device; ``named``, where it is not None, is the one asked for.

        Raises:
            BackendError: no backend can be chosen for the device.
        """
        ...


def active_name() -> str | None:
    """Return the backend that `use_backend` names right now: a cache made in its block keeps it for good."""
    mode = MODE.get()
    return None if mode is None else mode.named


class CacheConfig(ABC):
    """What the user chooses about a cache. A frozen value: threads may share it, and equal ones are interchangeable."""

    @abstractmethod
    def unique_copy(self) -> Self:
        """Return an equal configuration that is a distinct object. To change a field, use `attrs.evolve`."""

    @abstractmethod
    def build(self, spec: KVSpec, rank: RankInfo, ops: OpSource) -> Cache:
        """Make the cache that this configures; called by `create_cache`, which describes the arguments and errors.

        It may return a subclass of `Cache`, and takes its ops from ``ops`` alone.
        """


class Cache(ABC):
    """Keys and values of every layer that one rank runs, on one device.

    The memory is allocated, and zeroed, when the cache is made, and belongs to it until it is garbage: a masked read of a
    place that was never written yields zeros, never NaN. Keys and values lie in separate storages, but for
    latents, of which values are a part of keys, and for layers of several kinds, which share one memory. A cache in memory that
    an engine owns is the exception: see `kvdock.PagedKVCache.from_tensors`.

    Threads may share a cache as they may share torch tensors: calls that write different places may run at once, calls
    that write the same places need a lock of the caller's. Nothing here is differentiable; gradients are not recorded.

    ``copy.deepcopy`` returns a cache with memory of its own, on the same device, that holds the same, with the same strides
    and the backend that this one keeps; `copy.copy` returns one that shares the memory. A cache cannot be pickled: that
    raises `UnsupportedError`, and says what to do. A class that derives from this gets all three.
    """

    def __copy__(self) -> Self:
        return _remade(self, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        with torch.inference_mode(False):  # a copy made while inferring must be writable afterwards too, as the cache is
            return _remade(self, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UnsupportedError(
            f"pickling a {type(self).__name__}",
            expected="a copy in this process, by copy.deepcopy",
            got="pickle, which would write the whole memory once for each view of it",
            fix="pickle what it was made of (KVSpec, configuration, RankInfo), make a cache of that there, and copy_ keys and values "
            "into k_cache(i) and v_cache(i)",
        )

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Number of layers."""

    @abstractmethod
    def k_cache(self, layer: int) -> torch.Tensor:
        """Return the keys of a layer: a view of the cache's memory, always the same.

        Args:
            layer: 0 to ``num_layers - 1``.

        Raises:
            IndexRangeError: there is no such layer; negative numbers do not count from the end.
        """

    @abstractmethod
    def v_cache(self, layer: int) -> torch.Tensor:
        """Return the values of a layer. See `k_cache`."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the whole cache: all layers, keys and values."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device that holds it."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of its elements."""

    @abstractmethod
    def reset(self) -> None:
        """Zero the memory, as when the cache was made. Views handed out before remain valid."""


def _remade(cache: C, memo: dict[int, Any] | None) -> C:
    """Return a copy of a cache, shallow or deep, whatever its class keeps its attributes in."""
    parts: Any = object.__reduce_ex__(cache, 4)
    make, args, state, *_ = parts
    twin: C = make(*args)
    if memo is not None:
        memo[id(cache)] = twin
        state = copy.deepcopy(state, memo)
    if hasattr(twin, "__setstate__"):
        twin.__setstate__(state)
        return twin
    for part in state if isinstance(state, tuple) else (state,):
        for name, value in (part or {}).items():
            object.__setattr__(twin, name, value)
    return twin


def check_layer(owner: str, layer: object, num_layers: int) -> int:
    """Return a layer index in range.

    Raises:
        ArgumentTypeError: it is no int.
        IndexRangeError: it is out of range.
    """
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise ArgumentTypeError(f"{owner}: layer", expected=f"an int from 0 to {num_layers - 1}", got=repr(layer), fix="pass a plain int")
    if not 0 <= layer < num_layers:
        raise IndexRangeError(
            f"{owner}: layer", expected=f"0 to {num_layers - 1}", got=layer, fix="count layers from 0; this cache has as many as its KVSpec"
        )
    return layer


def require_backend(ops: OpSource, op: str, device: torch.device, named: str | None) -> Choice:
    """Return the backend that will serve a cache, so that a device nobody claims fails before memory is taken.

    Raises:
        BackendError: no backend can be chosen for the device.
    """
    return ops.choose(op, device, named)
