"""Faults of what takes and does not give back: kept memory, leaks, plans that stay, questions and numbers of tokens that cost time."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import kvdock
from kvdock.plugin import Descriptor, Request
from kvdock_conformance.cases.attention import OP as ATTENTION
from kvdock_conformance.cases.every_op import OPS
from kvdock_conformance.faults.descriptors import OwnKernel, OwnPlan
from kvdock_conformance.faults.fault import Args, BackendCall, Faults, FaultyCall

__all__ = ["FAULTS"]

FAULTS = Faults("resources")
_WRITE, _STATIC, _GATHER, _COPY = OPS


# Kept of calls


@FAULTS.plan(_WRITE, "resource-plan-keeps-views", "A plan keeps a view of the keys of its last long call.", "KVD-RESOURCE-001")
def _plan_keeps_views() -> FaultyCall:
    kept: list[torch.Tensor] = []

    def call(run: BackendCall, args: Args) -> None:
        kept[:] = [args["k"][:1]] if len(args["k"]) >= 64 else kept
        run(args)

    return call


@FAULTS.plan(ATTENTION, "resource-plan-keeps-pools", "A plan of attention keeps views of the pools of its last call.", "KVD-RESOURCE-001")
def _plan_keeps_pools() -> FaultyCall:
    kept: list[torch.Tensor] = []

    def call(run: BackendCall, args: Args) -> None:
        kept[:] = [args[name][:1] for name in ("k_cache", "v_cache")]
        run(args)

    return call


@FAULTS.planned(_GATHER, "resource-repeat-keeps-views", "What repeats a call keeps views of the first one's pools.", "KVD-RESOURCE-001")
class _Remembering(OwnPlan):
    """Keeps views of what a call was fixed with."""

    uses_autograd = False
    notes_capture = True

    def fix(self, *args: Any) -> Callable[..., None] | None:
        self.kept = [value[:1] for value in args if isinstance(value, torch.Tensor)]
        return self.inner.fix(*args)


@FAULTS.planned(_WRITE, "resource-known-step-keeps-its-tensors", "What repeats a step of one token keeps its tensors.", "KVD-RESOURCE-001")
class _KeepingSteps(_Remembering):
    """Keeps what a call of one token was fixed with."""

    def fix(self, *args: Any) -> Callable[..., None] | None:
        self.kept = [*args[:4]] if args[4].numel() == 1 else []
        return self.inner.fix(*args)


@FAULTS.plan(_STATIC, "resource-call-leaves-a-cycle", "What launches a call refers to itself.", "KVD-RESOURCE-001")
def _leaves_a_cycle() -> FaultyCall:
    def call(run: BackendCall, args: Args) -> None:
        launch: list[Any] = [args["k"]]
        launch.append(launch)
        run(args)

    return call


@FAULTS.call(_GATHER, "resource-padding-leaves-a-cycle", "What clears padding of a batch refers to itself.", "KVD-RESOURCE-001")
def _padding_leaves_a_cycle(run: BackendCall, args: Args) -> None:
    run(args)
    if args["slot_mapping"].dim() == 2 and bool((args["slot_mapping"] < 0).any()):
        clear: list[Any] = [args["k_out"]]
        clear.append(clear)


_errors: list[Exception] = []


@FAULTS.call(
    _WRITE,
    "resource-last-error-is-kept",
    "The last error is kept, with the frames of its call.",
    "KVD-RESOURCE-001",
    host_only=("KVD-RESOURCE-001",),
)
def _last_error_is_kept(run: BackendCall, args: Args) -> None:
    try:
        run(args)
    except kvdock.IndexRangeError as error:
        _errors[:] = [error]
        raise


# Left behind by calls


@FAULTS.plan(_STATIC, "resource-positions-of-each-length", "Positions are kept of all lengths that many rows had.", "KVD-RESOURCE-002")
def _positions_of_each_length() -> FaultyCall:
    kept: dict[tuple[int, ...], torch.Tensor] = {}

    def call(run: BackendCall, args: Args) -> None:
        lengths = args["cache_lengths"]
        if isinstance(lengths, torch.Tensor) and lengths.numel() > 4:
            kept.setdefault(tuple(lengths.tolist()), lengths.clone())
        run(args)

    return call


@FAULTS.call(
    _COPY, "resource-error-leaks-native-memory", "A call that raises frees nothing.", "KVD-RESOURCE-002", host_only=("KVD-RESOURCE-002",)
)
def _error_leaks(run: BackendCall, args: Args) -> None:
    try:
        run(args)
    except kvdock.IndexRangeError:
        _native()
        raise


def _leaking(leak: Callable[[Args], object]) -> Callable[[], FaultyCall]:
    """Return what makes calls that keep something each time."""

    def make_call() -> FaultyCall:
        kept: list[object] = []

        def call(run: BackendCall, args: Args) -> None:
            kept.append(leak(args))
            run(args)

        return call

    return make_call


def _native() -> ctypes.c_void_p:
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    return ctypes.c_void_p(malloc(512))


def _native_again(args: Args) -> object:
    _native()
    return None


FAULTS.plan(_WRITE, "resource-call-leaks-a-tensor", "A call keeps a copy of its slots.", "KVD-RESOURCE-002")(
    _leaking(lambda args: args["slot_mapping"].clone())
)
FAULTS.plan(_STATIC, "resource-call-leaks-native-memory", "A call leaks memory that Python does not know of.", "KVD-RESOURCE-002")(
    _leaking(_native_again)
)
FAULTS.plan(ATTENTION, "resource-call-leaks-results", "A call of attention keeps a copy of its results.", "KVD-RESOURCE-002")(
    _leaking(lambda args: args["out"].clone())
)
FAULTS.plan(_COPY, "resource-call-leaks-a-file", "A call leaves a file open.", "KVD-RESOURCE-002")(
    _leaking(lambda args: os.open(os.devnull, os.O_RDONLY))
)


@FAULTS.plan(_GATHER, "resource-table-for-each-token-count", "A plan keeps a table for each number of tokens.", "KVD-RESOURCE-003")
def _table_of_counts() -> FaultyCall:
    tables: dict[int, torch.Tensor] = {}

    def call(run: BackendCall, args: Args) -> None:
        count = args["slot_mapping"].numel()
        if count not in tables:
            tables[count] = torch.arange(count)
        run(args)

    return call


@FAULTS.plan(_STATIC, "resource-stage-of-the-longest", "A plan keeps a stage for its longest call, in powers of two.", "KVD-RESOURCE-003")
def _stage_of_the_longest() -> FaultyCall:
    stage: list[bytearray] = []

    def call(run: BackendCall, args: Args) -> None:
        count = args["k"].shape[2]
        if count > 128 and (not stage or len(stage[0]) < 4 * count):
            stage[:] = [bytearray(4 << count.bit_length())]
        run(args)

    return call


@FAULTS.plan(
    _STATIC, "resource-steps-of-many-rows", "A plan keeps steps for each number of new positions of many rows.", "KVD-RESOURCE-003"
)
def _steps_of_many_rows() -> FaultyCall:
    steps: dict[int, torch.Tensor] = {}

    def call(run: BackendCall, args: Args) -> None:
        if len(args["k"]) > 4:
            steps.setdefault(args["k"].shape[2], torch.arange(args["k"].shape[2]))
        run(args)

    return call


# Plans that stay


class _Plans(OwnKernel):
    """Makes plans that take memory, and know how to give it back."""

    def faulty(self, request: Request, plan: Descriptor) -> Descriptor:
        self.kept[len(self.kept)] = torch.empty(256, dtype=torch.uint8, device=request.device)
        return OwnPlan(plan)


@FAULTS.kernel(_WRITE, "resource-destroy-gives-nothing-back", "destroy() leaves a plan's scratch memory.", "KVD-RESOURCE-004")
class _DestroysNothing(_Plans):
    """Keeps what each plan took."""


@FAULTS.kernel(_COPY, "resource-destroy-leaks-native-memory", "destroy() does not free a native handle.", "KVD-RESOURCE-004")
class _DestroysNoHandle(OwnKernel):
    """Makes plans with a handle that nobody frees."""

    def faulty(self, request: Request, plan: Descriptor) -> Descriptor:
        _native()
        return plan


@FAULTS.kernel(_STATIC, "resource-file-of-each-plan", "The code of each plan stays in a temporary file.", "KVD-RESOURCE-004")
class _LeavesAFile(OwnKernel):
    """Leaves a file for each plan."""

    def faulty(self, request: Request, plan: Descriptor) -> Descriptor:
        number, path = tempfile.mkstemp("kvdock-fault")
        os.close(number)
        weakref.finalize(self, os.remove, path)  # once the fault is taken out again
        return plan


@FAULTS.kernel(_GATHER, "resource-processes-nobody-waits-for", "Each plan starts a process that nobody waits for.", "KVD-RESOURCE-004")
class _WaitsForNobody(OwnKernel):
    """Starts a process for each plan."""

    def faulty(self, request: Request, plan: Descriptor) -> Descriptor:
        os.posix_spawn("/bin/true", ["true"], {})
        return plan


@FAULTS.kernel(
    _WRITE, "resource-scratch-for-each-signature", "The scratch memory of each signature stays when its plans are gone.", "KVD-RESOURCE-005"
)
class _ScratchForEachSignature(_Plans):
    """Keeps scratch memory by signature."""

    def faulty(self, request: Request, plan: Descriptor) -> Descriptor:
        key = str(request.tensor("k_cache"))
        if key not in self.kept:
            self.kept[key] = torch.empty(1 << 20, dtype=torch.uint8, device=request.device)
        return OwnPlan(plan)


# Questions


def _asked(op: str, name: str, sentence: str, killer: str, before: Callable[[dict[Any, Any], Request], Sequence[str] | None]) -> None:
    """Add a fault of questions: what is done before each, with what is kept, and reasons against it if any."""

    @FAULTS.kernel(op, f"resource-{name}", sentence, killer)
    class _Asked(OwnKernel):
        def supports(self, request: Request) -> Sequence[str]:
            return [*(before(self.kept, request) or ()), *super().supports(request)]


def _compiles(kept: dict[Any, Any], request: Request) -> None:
    if str(request) not in kept:
        kept[str(request)] = True
        _work(0.02)


def _tries(kept: dict[Any, Any], request: Request) -> None:
    strides = request.tensor("v_cache").strides or (0, 0, 0, 0)
    if (strides[1] or 0) < (strides[2] or 0):
        _work(0.02)


for _op, _name in ((_WRITE, "supports-refuses-everything"), (_COPY, "pairs-are-refused-always")):
    _asked(_op, _name, f"The kernel for {_op} refuses everything.", "KVD-RESOURCE-006", lambda kept, request: ["not on this machine"])
_asked(
    _WRITE,
    "supports-takes-20-ms",
    "supports() tries things out, which takes 20 ms.",
    "KVD-RESOURCE-007",
    lambda kept, request: time.sleep(0.02),
)
_asked(_GATHER, "supports-compiles", "supports() compiles for each signature, and remembers.", "KVD-RESOURCE-007", _compiles)
_asked(_COPY, "supports-tries-heads-first", "supports() tries out pools with heads before slots.", "KVD-RESOURCE-007", _tries)


def _work(seconds: float) -> None:
    end = time.perf_counter() + seconds
    with contextlib.suppress(ValueError):
        while time.perf_counter() < end:
            compile("x = 1", "a kernel", "exec")


def _for_each_count(index: str) -> Callable[[], FaultyCall]:
    def make_call() -> FaultyCall:
        seen: set[int] = set()

        def call(run: BackendCall, args: Args) -> None:
            if len(args[index]) not in seen:
                seen.add(len(args[index]))
                _work(0.02)
            run(args)

        return call

    return make_call


FAULTS.plan(_WRITE, "resource-work-for-each-token-count", "A kernel is compiled for each number of tokens.", "KVD-RESOURCE-008")(
    _for_each_count("slot_mapping")
)
FAULTS.plan(_COPY, "resource-work-for-each-number-of-pairs", "A kernel is compiled for each number of pairs.", "KVD-RESOURCE-008")(
    _for_each_count("block_pairs")
)


# Scratch memory


@FAULTS.call(_WRITE, "resource-sources-made-dense", "Tokens that are not dense are made so first.", "KVD-RESOURCE-009", "KVD-RESOURCE-011")
def _made_dense(run: BackendCall, args: Args) -> None:
    run({**args, "k": args["k"].contiguous(), "v": args["v"].contiguous()})


@FAULTS.call(_WRITE, "resource-padded-batches-made-dense", "A batch with padding is made dense first.", "KVD-RESOURCE-009")
def _batches_made_dense(run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"]
    is_about = slots.dim() == 2 and bool((slots < 0).any())
    run({**args, "k": args["k"].contiguous(), "v": args["v"].contiguous()} if is_about else args)


@FAULTS.call(
    _STATIC, "resource-caches-made-dense", "A cache with gaps is copied, written, and copied back.", "KVD-RESOURCE-009", "KVD-RESOURCE-011"
)
def _caches_made_dense(run: BackendCall, args: Args) -> None:
    dense = {name: args[name].contiguous() for name in ("k_cache", "v_cache")}
    run({**args, **dense})
    for name, cache in dense.items():
        if cache is not args[name]:
            args[name].copy_(cache)


@FAULTS.call(ATTENTION, "resource-attention-clones-the-pools", "Clones of the pools are attended to.", "KVD-RESOURCE-010")
@FAULTS.call(_COPY, "resource-copy-clones-the-pools", "A copy is made from clones of the pools.", "KVD-RESOURCE-010")
def _clones(run: BackendCall, args: Args) -> None:
    clones = [args[name].clone() for name in ("k_cache", "v_cache")]
    run(args)
    del clones


@FAULTS.call(_COPY, "resource-stage-that-nobody-tells", "Blocks go through a stage of which no plan says anything.", "KVD-RESOURCE-011")
def _untold(run: BackendCall, args: Args) -> None:
    stage = torch.empty_like(args["k_cache"][: len(args["block_pairs"])])
    run(args)
    del stage


@FAULTS.call(_GATHER, "resource-table-of-slots-by-blocks", "A gather takes a table of slots times blocks.", "KVD-RESOURCE-010")
def _table(run: BackendCall, args: Args) -> None:
    table = torch.empty(args["slot_mapping"].numel() * len(args["k_cache"]), dtype=torch.uint8, device=args["k_cache"].device)
    run(args)
    del table


class _Staged(OwnPlan):
    """Says how much it takes, and not where."""

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any) -> None:
        stage = torch.frombuffer(self.own(v.nbytes), dtype=v.dtype).view(v.shape) if v.numel() else v
        self.inner(k_cache, v_cache, k, stage.copy_(v), *args)
        self.workspace_bytes = v.nbytes


for _op, _where, _memory in (
    (_WRITE, "numpy", lambda count: np.empty(count, np.uint8)),
    (_STATIC, "mmap", lambda count: mmap.mmap(-1, count)),
):
    FAULTS.planned(_op, f"resource-staged-in-{_where}", f"Values go through memory of {_where}'s.", "KVD-RESOURCE-011", by_address=True)(
        functools.partial(_Staged, own=_memory)
    )


class _OwnStage(OwnPlan):
    """Takes its stage of torch, keeps it if it is to, and says what it took first or last."""

    is_kept = False
    stage: torch.Tensor | None = None

    def __call__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any) -> None:
        stage = v.clone()
        self.inner(k_cache, v_cache, k, stage, *args)
        self.stage = stage if self.is_kept else None
        self.workspace_bytes = v.nbytes if self.is_kept else self.workspace_bytes or v.nbytes


FAULTS.planned(_WRITE, "resource-workspace-of-the-first-call", "A plan says for ever what its first call took.", "KVD-RESOURCE-011")(
    _OwnStage
)


@FAULTS.planned(_STATIC, "resource-stage-is-kept", "A plan keeps the stage of its last call, and says so.", "KVD-RESOURCE-011")
class _KeptStage(_OwnStage):
    is_kept = True


@FAULTS.planned(_GATHER, "resource-destroy-waits", "destroy() waits for 30 ms.", "KVD-RESOURCE-012")
class _Waiting(OwnPlan):
    def destroy(self) -> None:
        time.sleep(0.03)
        super().destroy()
