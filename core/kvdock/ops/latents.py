"""Ops on latents by kernels for keys and values, portable or any backend's.

A row of a latent pool holds a latent and, behind it, the rotary part. So the pool is two caches of one head, views of one memory that
share no byte: the latents are the keys, the rotary parts the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from kvdock.interface import Descriptor, Kernel, Request, TensorMeta
from kvdock.ops.geometry import alignment_of, normalised

__all__ = ["LatentDescriptor", "LatentKernel"]

_PAIRS = {"kv_cache": ("k_cache", "v_cache"), "scale": ("k_scale", "v_scale")}
"""What becomes two arguments of the kernel for keys and values, in the place of one."""

_ROWS = {"kv_c": "k", "k_pe": "v", "kv_c_out": "k_out", "k_pe_out": "v_out"}
"""What becomes rows of one head."""


class LatentDescriptor(Descriptor):
    """Hands both parts of a pool to a descriptor for keys and values.

    Args:
        pair: that descriptor.
        names: names of the op's arguments, in order.
        rank: elements of a latent.
        offset: bytes from a latent to its rotary part.
    """

    def __init__(self, pair: Descriptor, names: Sequence[str], rank: int, offset: int) -> None:
        self._pair, self._rank, self._offset = pair, rank, offset
        self._others = [(name in _ROWS, 2 if name in _PAIRS else 1) for name in names[1:]]
        self.uses_autograd, self.notes_capture = pair.uses_autograd, pair.notes_capture
        self.workspace_bytes = pair.workspace_bytes

    @property
    def pinned(self) -> bool:  # type: ignore[override] # what holds something is the other descriptor, and core only reads it
        """Whether the other descriptor must stay."""
        return self._pair.pinned

    def __call__(self, *args: Any) -> None:
        """Run the op."""
        self._pair(*self._halves(args))
        self.workspace_bytes = self._pair.workspace_bytes

    def _halves(self, args: tuple[Any, ...]) -> Iterator[Any]:
        """Yield the arguments of the other descriptor: of the pool both parts, and rows with a head."""
        kv_cache, *others = args
        yield kv_cache[..., : self._rank]
        yield kv_cache[..., self._rank :]
        for value, (is_rows, times) in zip(others, self._others, strict=True):
            yield from (value.unsqueeze(-2) if is_rows else value,) * times

    def fix(self, *args: Any) -> Callable[..., None] | None:
        """Return what the other descriptor returns, given the address of the pool in place of two."""
        launch, offset = self._pair.fix(*self._halves(args)), self._offset
        return None if launch is None else lambda at, *rest: launch(at, at + offset, *rest)

    def destroy(self) -> None:
        """Destroy the other descriptor."""
        self._pair.destroy()


class LatentKernel(Kernel):
    """Serves `mla_caching_` by a kernel for `paged_caching_`, or `mla_gather` by one for `gather_paged`.

    Args:
        pair: that kernel. It is asked, and prepares, as for pools of one head that are parts of a larger tensor; the name of the
            op in its requests is the latent one's, so that errors name what was called.
    """

    def __init__(self, pair: Kernel) -> None:
        self._pair = pair

    def supports(self, request: Request) -> Sequence[str]:
        """Return the reasons of the other kernel."""
        return self._pair.supports(_as_pair(request))

    def prepare(self, request: Request) -> Descriptor:
        """Prepare the other kernel's descriptor."""
        rank = _rank(request)
        offset = rank * request.tensor("kv_cache").dtype.itemsize
        return LatentDescriptor(self._pair.prepare(_as_pair(request)), tuple(request.args), rank, offset)


def _rank(request: Request) -> int:
    return next(int(meta.shape[-1] or 0) for name, meta in request.args.items() if name.startswith("kv_c") and name != "kv_cache")


def _as_pair(request: Request) -> Request:
    """Return a request of an op on latents as one of keys and values."""
    rank, args = _rank(request), dict[str, Any]()
    for name, meta in request.args.items():
        if name == "kv_cache":
            args |= zip(_PAIRS[name], (_part(meta, 0, rank), _part(meta, rank, int(meta.shape[-1] or 0))), strict=True)
        elif name in _PAIRS:
            args |= dict.fromkeys(_PAIRS[name], meta)
        elif name in _ROWS:
            args[_ROWS[name]] = attrs.evolve(meta, shape=(*meta.shape[:-1], 1, meta.shape[-1]))
        else:
            args[name] = meta
    return attrs.evolve(request, args=args)


def _part(pool: TensorMeta, begin: int, end: int) -> TensorMeta:
    """Return the elements of each row of a pool from ``begin`` to ``end``."""
    shape = (*(int(size or 0) for size in pool.shape[:-1]), end - begin)
    strides = normalised(shape, (*(pool.strides or ())[:-1], 1))
    return TensorMeta(pool.dtype, shape, strides, alignment_of([pool.alignment, begin * pool.dtype.itemsize]))
