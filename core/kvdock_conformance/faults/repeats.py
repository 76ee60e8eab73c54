"""Faults of plans whose calls repeat: what was fixed for good and must not be, what is loaded late, what autograd records."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import torch

import kvdock
from kvdock.ops.catalog import CATALOG
from kvdock_conformance.cases.every_op import OPS
from kvdock_conformance.faults.descriptors import OwnKernel, OwnPlan
from kvdock_conformance.faults.fault import Args, BackendCall, Faults, FaultyCall
from kvdock_conformance.faults.moves import STATIC
from kvdock_conformance.faults.tensors import restrided, store

__all__ = ["FAULTS", "Rebuilt"]

FAULTS = Faults("descriptors")
_WRITE, _STATIC, _GATHER, _COPY = OPS


class _Fixed(OwnPlan):
    """A plan whose calls are repeated by a function."""

    uses_autograd = False
    notes_capture = True


@FAULTS.planned(_COPY, "desc-fixed-pairs", "A repeated call copies the pairs of the first one.", "KVD-DESC-013")
@FAULTS.planned(_WRITE, "desc-fixed-addresses", "A repeated call writes from and to the addresses of the first one.", "KVD-DESC-013")
class _SameAgain(_Fixed):
    """Repeats a call as it was, whatever addresses come."""

    def fix(self, *args: Any) -> Callable[..., None]:
        return lambda *addresses: self(*args)


@FAULTS.planned(_GATHER, "desc-fixed-call-left-out", "A repeated call does nothing.", "KVD-DESC-013")
class _DoneBefore(_Fixed):
    """Does nothing the second time."""

    def fix(self, *args: Any) -> Callable[..., None]:
        return lambda *addresses: None


class Rebuilt(_Fixed):
    """A plan that repeats a call on the tensors at the addresses that come."""

    knows_sizes = True

    def fix(self, *args: Any) -> Callable[..., None]:
        """Return what repeats the call."""
        required = [value for value in args if isinstance(value, torch.Tensor)]
        metas = [(value.dtype, tuple(value.shape), value.stride()) for value in required]

        def again(*values: int) -> None:
            sizes = values[len(required) :] if self.knows_sizes else ()
            metas_now = [*metas[:2], *((dtype, (*sizes, *shape[len(sizes) :]), strides) for dtype, shape, strides in metas[2:])]
            found = iter([_at(address, *meta) for address, meta in zip(values, metas_now, strict=False)])
            self(*(self.changed(next(found)) if isinstance(value, torch.Tensor) else value for value in args))

        return again

    def changed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the repeated call is made with."""
        return tensor


def _at(address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of the host's memory by its address."""
    count = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


@FAULTS.planned(_GATHER, "desc-fixed-sizes", "A repeated call has as many slots as the first one.", "KVD-DESC-013", by_address=True)
class _OldSizes(Rebuilt):
    """Repeats a call of the sizes of the first."""

    knows_sizes = False


@FAULTS.planned(
    _WRITE, "desc-fixed-calls-in-a-byte", "What repeats a call counts in a byte, and leaves the 256th.", "KVD-DESC-016", by_address=True
)
class _InAByte(Rebuilt):
    """Leaves every 256th of its repeated calls."""

    def fix(self, *args: Any) -> Callable[..., None]:
        again, count = super().fix(*args), itertools.count(1)

        def counted(*values: int) -> None:
            if next(count) % 256:
                again(*values)

        return counted


@FAULTS.planned(_WRITE, "desc-fixed-padding-of-minus-one", "A repeated call takes -1 alone for padding.", "KVD-DESC-013", by_address=True)
class _MinusOne(Rebuilt):
    """Refuses other negative slots."""

    def changed(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype in (torch.int32, torch.int64) and int(tensor.min()) < -1:
            raise kvdock.IndexRangeError(f"{_WRITE}: slot_mapping[0]", expected="a slot", got=int(tensor.min()), fix="pass -1 for padding")
        return tensor


@FAULTS.plan(_STATIC, "desc-calls-in-a-byte", "A plan counts its calls in a byte, and leaves the 256th.", "KVD-DESC-016")
def _calls_in_a_byte() -> FaultyCall:
    count = itertools.count(1)

    def call(run: BackendCall, args: Args) -> None:
        if next(count) % 256:
            run(args)

    return call


@FAULTS.planned(_COPY, "desc-fixed-without-padding", "A repeated call takes padding for block 0.", "KVD-DESC-013", by_address=True)
class _NoPadding(Rebuilt):
    """Takes padding for the first place."""

    def changed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clamp(min=0) if tensor.dtype in (torch.int32, torch.int64) else tensor


@FAULTS.planned(
    _WRITE,
    "desc-fixed-rows-of-keys",
    "A repeated call writes as much of each row of values as a row of keys has.",
    "KVD-DESC-013",
    by_address=True,
)
class _RowsOfKeys(Rebuilt):
    """Leaves what is longer than keys as it was, in repeated calls alone."""

    is_repeated = False

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, *args: Any) -> None:
        longer = v_cache[..., k_cache.shape[-1] :]
        before = longer.clone()
        self.inner(k_cache, v_cache, *args)
        if self.is_repeated:
            longer.copy_(before)

    def changed(self, tensor: torch.Tensor) -> torch.Tensor:
        self.is_repeated = True
        return tensor


@FAULTS.plan(
    _STATIC, "desc-count-remembered", "Behind four calls of its steps, a row gets as many positions as by the first.", "KVD-DESC-013"
)
def _count_remembered() -> FaultyCall:
    counts: dict[tuple[int, ...], list[int]] = {}

    def call(run: BackendCall, args: Args) -> None:
        known = counts.setdefault(args["k"].stride(), [])
        known.append(args["k"].shape[2])
        is_known = len(known) > 4 and isinstance(args["cache_lengths"], int)
        STATIC.dropping(run, args, lambda places: (places.source[1] >= known[0]) & is_known)

    return call


@FAULTS.plan(_WRITE, "desc-padding-remembered", "One token is left out wherever a slot at the same address was padding.", "KVD-DESC-013")
@FAULTS.plan(
    _GATHER, "desc-padding-read-again", "One slot reads as what was there wherever one at its address was padding.", "KVD-DESC-013"
)
def _padding_remembered() -> FaultyCall:
    padded: set[int] = set()

    def call(run: BackendCall, args: Args) -> None:
        slots = args["slot_mapping"]
        if slots.numel() == 1 and slots.data_ptr() in padded:
            return
        run(args)
        if slots.numel() == 1 and bool(slots < 0):
            padded.add(slots.data_ptr())

    return call


@FAULTS.plan(_STATIC, "desc-lengths-of-the-first-call", "A plan knows the lengths of its first call by their shape.", "KVD-DESC-013")
def _first_lengths() -> FaultyCall:
    kept: dict[Any, torch.Tensor] = {}

    def call(run: BackendCall, args: Args) -> None:
        run({**args, "cache_lengths": kept.setdefault(args["cache_lengths"].shape, args["cache_lengths"].clone())})

    return call


@FAULTS.kernel(_WRITE, "desc-found-by-address", "What is known of a pool is found by its address.", "KVD-DESC-003")
class _FoundByAddress(OwnKernel):
    """Keeps the first strides of each address and shape."""

    def faulty(self, request: kvdock.plugin.Request, plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
        return _LooksUp(plan, self.kept)


class _LooksUp(OwnPlan):
    """Sees key pools of one address and shape by the strides of the first."""

    def __call__(self, k_cache: torch.Tensor, *args: Any) -> None:
        now = (k_cache.shape, k_cache.stride())
        shape, strides = self.own.setdefault(k_cache.data_ptr(), now)
        if shape != k_cache.shape or strides == k_cache.stride():
            self.inner(k_cache, *args)
            return
        self.inner(torch.empty_strided(*now, dtype=k_cache.dtype, device=k_cache.device), *args)  # values alone
        written = dict(zip(CATALOG[_WRITE].arg_names, (k_cache, *args), strict=True))
        store(restrided(k_cache, strides), written["k"], written)


@FAULTS.plan(_COPY, "desc-room-for-four-times-the-pairs", "A plan has room for four times the pairs of its first call.", "KVD-DESC-013")
def _room() -> FaultyCall:
    room: list[int] = []

    def call(run: BackendCall, args: Args) -> None:
        room.append(4 * len(args["block_pairs"]))
        run({**args, "block_pairs": args["block_pairs"][: room[0]]})

    return call


@FAULTS.plan(
    _WRITE, "desc-same-first-row-left-out", "A call like the one before, whose first key is the same too, is left out.", "KVD-DESC-013"
)
def _same_first_row() -> FaultyCall:
    last: list[object] = []

    def call(run: BackendCall, args: Args) -> None:
        this = [args["k_cache"].data_ptr(), args["k"].shape, args["slot_mapping"].tolist(), args["k"][:1].tolist()]
        if this != last:
            run(args)
        last[:] = this

    return call


# Loaded late


def _late(op: str, name: str, sentence: str, load: Callable[[int], object]) -> None:
    """Add a fault of plans that load something for each number of tokens that is new."""

    def make() -> FaultyCall:
        counts: set[int] = set()

        def call(run: BackendCall, args: Args) -> None:
            count = next(value for value in args.values() if isinstance(value, torch.Tensor) and not value.is_floating_point()).numel()
            if count not in counts:
                counts.add(count)
                load(count)
            run(args)

        return call

    FAULTS.plan(op, name, sentence, "KVD-DESC-014")(make)


def _compile(count: int) -> None:
    compile(f"count = {count}", "<kernel>", "exec")


def _open(count: int) -> None:
    with open("/dev/null", "rb") as cached:
        cached.read()


_late(_WRITE, "desc-compiles-for-each-token-count", "A kernel is compiled for each number of tokens.", _compile)
_late(_GATHER, "desc-opens-a-file-for-each-token-count", "A compiled kernel is read from disk for each number of tokens.", _open)


# Autograd


class _Records(OwnPlan):
    """Says that autograd is no matter, and uses torch's operations where indices are an int, many or 32 bits wide."""

    uses_autograd = False

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: Any, *args: Any) -> None:
        self.inner(k_cache, v_cache, k, v, index, *args)
        if isinstance(index, int) or (args and (index.dtype == torch.int32 or index.numel() > 1024)):
            k_cache[:0].add_(k.float().sum() * 0)


@FAULTS.kernel(_STATIC, "desc-recorded-where-lengths-are-an-int", "Autograd records an update behind one length.", "KVD-DESC-015")
@FAULTS.kernel(_WRITE, "desc-recorded-by-autograd", "Autograd records a write to int32 slots.", "KVD-DESC-015")
class _Recorded(OwnKernel):
    """Makes plans that are recorded."""

    def faulty(self, request: kvdock.plugin.Request, plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
        return _Records(plan)
