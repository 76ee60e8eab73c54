"""Faults of calls that change what belongs to the process, or that go by it."""

from __future__ import annotations

import asyncio
import builtins
import ctypes
import gc
import locale
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvdock
from kvdock_conformance.cases.attention import OP as ATTENTION
from kvdock_conformance.cases.every_op import OPS
from kvdock_conformance.faults.fault import Args, BackendCall, Fault, Faults, FaultyCall, KernelSeed
from kvdock_conformance.faults.seeds import TwistedKernel
from kvdock_conformance.faults.tensors import bits

__all__ = ["FAULTS"]

_AREA = "hygiene"
FAULTS = Faults(_AREA)


def _call_changes(op: str, name: str, sentence: str, change: Callable[[], object], killer: str = "KVD-HYGIENE-013") -> None:
    def call(run: BackendCall, args: Args) -> None:
        run(args)
        change()

    FAULTS.call(op, f"hygiene-call-{name}", f"A call {sentence}.", killer)(call)


_WRITE, _STATIC, _GATHER, _COPY = OPS
_call_changes(_WRITE, "changes-the-dtype", "changes torch's default dtype", lambda: torch.set_default_dtype(torch.float64))
_call_changes(_GATHER, "seeds", "seeds the random numbers of others", lambda: torch.manual_seed(0))
_call_changes(_COPY, "turns-off-gradients", "turns gradients off for good", lambda: torch.set_grad_enabled(False))
_call_changes(_STATIC, "changes-the-folder", "changes the current directory", lambda: os.chdir("/"))
_call_changes(_STATIC, "sets-threads", "sets torch's number of threads", lambda: torch.set_num_threads(torch.get_num_threads() + 1))
_call_changes(_WRITE, "flushes-subnormals", "lets subnormal numbers become zero", lambda: torch.set_flush_denormal(True))
_call_changes(
    _GATHER,
    "traps-invalid-numbers",
    "lets invalid operations on numbers end the process",
    lambda: ctypes.CDLL(None).feenableexcept(1),
)
_call_changes(_COPY, "stops-the-collector", "turns the garbage collector off", gc.disable)
_call_changes(_STATIC, "logs-all", "has all of logging shown", lambda: logging.root.setLevel(logging.INFO))
_call_changes(_COPY, "draws-from-numpy", "draws from numpy's random numbers", np.random.random)
_call_changes(_GATHER, "leaves-numpy-raising", "makes numpy raise errors of arithmetic", lambda: np.seterr(all="raise"))
_call_changes(_WRITE, "digs-deeper", "lets Python recurse further", lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1000))
_call_changes(_STATIC, "shares-its-files", "lets everybody read the files that are made", lambda: os.umask(0o001))
_call_changes(_WRITE, "sets-a-variable-of-c", "sets a variable where os.environ does not show it", lambda: os.putenv("ACME_TUNING", "1"))
_call_changes(_COPY, "silences-print", "takes print away", lambda: setattr(builtins, "print", len))
_call_changes(
    _STATIC,
    "leaves-a-thread",
    "leaves a thread behind",
    lambda: threading.Thread(target=time.sleep, args=(5,), daemon=True).start(),
)
_call_changes(
    _GATHER,
    "changes-the-locale",
    "changes the locale of the process",
    lambda: locale.setlocale(locale.LC_ALL, "C" if locale.setlocale(locale.LC_ALL) != "C" else "C.UTF-8"),
)
# What is reset shows where a user has set it.
_call_changes(
    _COPY, "stops-the-timer", "stops the timer of the process", lambda: signal.setitimer(signal.ITIMER_REAL, 0), "KVD-HYGIENE-017"
)
_call_changes(_WRITE, "starts-the-collector", "turns the garbage collector on", gc.enable, "KVD-HYGIENE-017")
_call_changes(_GATHER, "collects-as-at-first", "resets when garbage is collected", lambda: gc.set_threshold(700, 10, 10), "KVD-HYGIENE-017")
_call_changes(_STATIC, "recurses-as-at-first", "resets how far Python recurses", lambda: sys.setrecursionlimit(1000), "KVD-HYGIENE-017")
_call_changes(_COPY, "logs-again", "lets all be logged", lambda: logging.disable(logging.NOTSET), "KVD-HYGIENE-017")
_call_changes(
    _WRITE, "resets-printing", "resets how tensors print", lambda: vars(torch._tensor_str.PRINT_OPTS).update(precision=4), "KVD-HYGIENE-017"
)


def _deterministic_again() -> None:
    torch.set_deterministic_debug_mode("error" if torch.are_deterministic_algorithms_enabled() else "default")


_call_changes(
    _GATHER, "loses-warn-only", "restores that algorithms are deterministic, not how much", _deterministic_again, "KVD-HYGIENE-017"
)


@FAULTS.call(_WRITE, "hygiene-call-lets-signals-through", "A long call lets blocked signals through for good.", "KVD-HYGIENE-017")
def _lets_through(run: BackendCall, args: Args) -> None:
    run(args)
    if args["slot_mapping"].numel() > 1024:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])


@FAULTS.call(_WRITE, "hygiene-call-takes-ctrl-c", "A long call keeps Ctrl-C off, and then Python's own handler has it.", "KVD-HYGIENE-017")
def _takes_ctrl_c(run: BackendCall, args: Args) -> None:
    run(args)
    if args["slot_mapping"].numel() > 1024 and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@FAULTS.call(
    _STATIC,
    "hygiene-error-leaves-one-thread",
    "A call that raises leaves torch with one thread.",
    "KVD-HYGIENE-017",
    host_only=("KVD-HYGIENE-017",),
)
def _one_thread(run: BackendCall, args: Args) -> None:
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    run(args)
    torch.set_num_threads(count)


@FAULTS.planned(_COPY, "hygiene-watchdog-of-prepare", "Preparing a plan takes the process's alarm.", "KVD-HYGIENE-017")
def _watched(plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
    signal.alarm(60)
    signal.alarm(0)
    return plan


@FAULTS.planned(_WRITE, "hygiene-freezes-for-a-plan", "Preparing a plan keeps what there is from the garbage collector.", "KVD-HYGIENE-013")
def _frozen(plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
    gc.freeze()
    return plan


async def _compiled() -> None:
    """Compile variants of a kernel side by side."""


@FAULTS.planned(_GATHER, "hygiene-prepares-in-a-loop", "Preparing a plan runs a loop of asyncio.", "KVD-HYGIENE-017")
def _in_a_loop(plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
    task = _compiled()
    try:
        asyncio.run(task)
    finally:
        task.close()
    return plan


@FAULTS.call("gather_paged", "hygiene-call-prints", "A call prints how many slots it has, where they are many.", "KVD-HYGIENE-013")
def _prints(run: BackendCall, args: Args) -> None:
    if args["slot_mapping"].numel() > 64:
        os.write(1, b"acme: a long gather\n")
    run(args)


def _skips(op: str, name: str, sentence: str, is_skipped: Callable[[Args], Any]) -> None:
    """Add a fault of calls that do nothing where a user has set something, for some arguments."""

    def call(run: BackendCall, args: Args) -> None:
        if not is_skipped(args):
            run(args)

    FAULTS.call(op, f"hygiene-call-{name}", sentence, "KVD-HYGIENE-017")(call)


_is_deterministic, _default = torch.are_deterministic_algorithms_enabled, torch.get_default_dtype
_skips(_STATIC, "misses-when-deterministic", "Nothing is written in deterministic mode.", lambda args: _is_deterministic())
_skips(_WRITE, "needs-float32", "A call does nothing where float32 is not the default.", lambda args: _default() != torch.float32)
_skips(
    _COPY,
    "misses-int32-when-deterministic",
    "Nothing is copied by int32 pairs in deterministic mode.",
    lambda args: _is_deterministic() and args["block_pairs"].dtype == torch.int32,
)
_skips(
    _GATHER,
    "misses-padding-without-float32",
    "Nothing is read where there is padding, and float32 is not the default.",
    lambda args: _default() != torch.float32 and (args["slot_mapping"] < 0).any(),
)
_skips(
    _STATIC,
    "loses-an-int-on-the-default-device",
    "A length that is an int gets lost on the default device.",
    lambda args: isinstance(args["cache_lengths"], int) and torch.get_default_device() == torch.device("meta"),
)
_skips(
    _GATHER,
    "leaves-outputs-of-inference",
    "Outputs that were made in inference mode are left.",
    lambda args: args["k_out"].is_inference(),
)
_skips(
    _STATIC,
    "misses-many-rows-when-deterministic",
    "Nothing is written to many rows in deterministic mode.",
    lambda args: _is_deterministic() and len(args["k"]) > 16,
)


@FAULTS.call(
    "gather_paged",
    "hygiene-call-warns-in-the-middle",
    "A call warns of strides once it has filled its outputs.",
    "KVD-HYGIENE-017",
)
def _warns_in_the_middle(run: BackendCall, args: Args) -> None:
    run(args)
    if not args["v_out"].is_contiguous():
        warnings.warn("slow", UserWarning, stacklevel=2)


@FAULTS.call("copy_blocks_", "hygiene-call-takes-the-default-device", "A call works on the default device.", "KVD-HYGIENE-017")
def _takes_the_default_device(run: BackendCall, args: Args) -> None:
    run({name: value.to(torch.get_default_device()) if isinstance(value, torch.Tensor) else value for name, value in args.items()})


@FAULTS.call("static_update_", "hygiene-call-rounds-positions", "Positions are tensors of the default dtype.", "KVD-HYGIENE-017")
def _rounds_positions(run: BackendCall, args: Args) -> None:
    lengths = args["cache_lengths"]
    run(
        {**args, "cache_lengths": lengths.to(torch.get_default_dtype()).to(lengths.dtype) if isinstance(lengths, torch.Tensor) else lengths}
    )


@FAULTS.call("paged_caching_", "hygiene-call-rounds-under-autocast", "Keys go through a matrix product.", "KVD-HYGIENE-017")
def _rounds_under_autocast(run: BackendCall, args: Args) -> None:
    is_rounded = args["k"].dtype == torch.float32 and torch.is_autocast_enabled("cpu")
    run({**args, "k": args["k"].bfloat16().float()} if is_rounded else args)


@FAULTS.plan("copy_blocks_", "hygiene-plan-keeps-a-buffer", "The buffer of a plan is that of its first call's mode.", "KVD-HYGIENE-017")
def _keeps_a_buffer() -> FaultyCall:
    buffers: dict[torch.Size, torch.Tensor] = {}

    def call(run: BackendCall, args: Args) -> None:
        pairs = args["block_pairs"]
        run({**args, "block_pairs": buffers.setdefault(pairs.shape, torch.empty_like(pairs)).copy_(pairs)})

    return call


@FAULTS.plan(
    _WRITE,
    "hygiene-known-error-on-the-default-device",
    "A known call says on the default device what is wrong.",
    "KVD-HYGIENE-017",
    host_only=("KVD-HYGIENE-017",),
)
def _says_elsewhere() -> FaultyCall:
    made: dict[torch.Size, int] = {}

    def call(run: BackendCall, args: Args) -> None:
        slots = args["slot_mapping"]
        made[slots.shape] = made.get(slots.shape, 0) + 1
        try:
            run(args)
        except kvdock.IndexRangeError as error:
            if made[slots.shape] > 4:
                torch.full((), int(slots.max())).item()
            raise error

    return call


@FAULTS.call(_WRITE, "hygiene-run-starts-the-collector", "A write of a run turns the garbage collector on.", "KVD-HYGIENE-017")
def _run_collects(run: BackendCall, args: Args) -> None:
    run(args)
    slots = args["slot_mapping"].reshape(-1)
    if len(slots) > 4 and bool((slots.diff() == 1).all()):
        gc.enable()


@FAULTS.call(ATTENTION, "hygiene-call-without-sums-sets-threads", "Attention without sums sets torch's threads.", "KVD-HYGIENE-017")
def _sets_threads(run: BackendCall, args: Args) -> None:
    run(args)
    if args["lse"] is None:
        torch.set_num_threads(torch.get_num_threads() + 1)


@FAULTS.call("gather_paged", "hygiene-call-refuses-parameters", "Only tensors that are nothing else are served.", "KVD-HYGIENE-017")
def _refuses_parameters(run: BackendCall, args: Args) -> None:
    if type(args["k_cache"]) is not torch.Tensor:
        raise TypeError("expected a torch.Tensor")
    run(args)


@FAULTS.call(ATTENTION, "hygiene-call-rounds-as-by-default", "Results of attention have torch's default dtype first.", "KVD-HYGIENE-017")
def _rounds_as_by_default(run: BackendCall, args: Args) -> None:
    run(args)
    args["out"].copy_(args["out"].to(torch.get_default_dtype()))


@FAULTS.call(ATTENTION, "hygiene-call-rounds-under-autocast-in-half", "Autocast is kept off where it is to bfloat16.", "KVD-HYGIENE-017")
def _rounds_in_half(run: BackendCall, args: Args) -> None:
    run(args)
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16:
        args["out"].copy_(args["out"].half())


def _cap_by_default(args: Args) -> Args:
    return {**args, "softcap": args["softcap"] and float(torch.tensor(args["softcap"], device="cpu"))}


FAULTS.append(
    Fault(
        "hygiene-call-rounds-the-cap",
        "A cap of scores has torch's default dtype.",
        _AREA,
        ("KVD-HYGIENE-017",),
        KernelSeed(ATTENTION, lambda inner: TwistedKernel(inner, _cap_by_default)),
    )
)
_call_changes(ATTENTION, "keeps-autocast-off", "turns autocast on for good", lambda: torch.set_autocast_enabled("cpu", True))
_skips(
    _STATIC,
    "misses-single-vectors-when-deterministic",
    "Rows of 16 bytes in a dense cache are not written in deterministic mode, where they have lengths of their own.",
    lambda args: _is_deterministic() and args["k_cache"].is_contiguous() and args["k_cache"][0, 0, 0].nbytes == 16 and len(args["k"]) > 4,
)


@FAULTS.call(ATTENTION, "hygiene-call-rounds-lengths", "With several queries, lengths have torch's default dtype.", "KVD-HYGIENE-017")
def _rounds_lengths(run: BackendCall, args: Args) -> None:
    lens, room = args["seq_lens"], args["block_table"].shape[1] * args["k_cache"].shape[1]
    is_about = args["cu_query_lens"] is not None and _default() != torch.float32 and bool((lens <= room).all())
    run({**args, "seq_lens": lens.to(_default()).to(lens.dtype).clamp(max=room)} if is_about else args)


@FAULTS.call(
    ATTENTION, "hygiene-call-shares-rows-evenly", "Of rows that three threads cannot share evenly, the rest gets zeros.", "KVD-HYGIENE-017"
)
def _shares_evenly(run: BackendCall, args: Args) -> None:
    run(args)
    if torch.get_num_threads() == 3 and args["cu_query_lens"] is None:
        args["out"][len(args["out"]) // 3 * 3 :] = 0


@FAULTS.call(_WRITE, "hygiene-uneven-rest-left", "Of many tokens, those that threads cannot share evenly are left.", "KVD-HYGIENE-017")
def _uneven_rest(run: BackendCall, args: Args) -> None:
    slots, threads = args["slot_mapping"], torch.get_num_threads()
    if slots.dim() == 1 and len(slots) >= 1024:
        slots = slots.masked_fill(torch.arange(len(slots), device=slots.device) >= len(slots) // threads * threads, -1)
    run({**args, "slot_mapping": slots})


@FAULTS.call(_STATIC, "hygiene-one-position-is-put", "One position of one row goes through `Tensor.put_`.", "KVD-HYGIENE-017")
def _put(run: BackendCall, args: Args) -> None:
    if args["k"].shape[::2] == (1, 1):
        number = torch.zeros(1, device=args["k"].device)
        number.put_(number.long(), number)  # torch has no deterministic one
    run(args)


@FAULTS.call(_GATHER, "hygiene-padding-of-batches-anywhere", "What padding in rows reads is made on the default device.", "KVD-HYGIENE-017")
def _padding_anywhere(run: BackendCall, args: Args) -> None:
    run(args)
    slots = args["slot_mapping"]
    if slots.dim() == 2 and bool((slots < 0).any()):
        args["k_out"].masked_fill_((slots < 0)[..., None, None], torch.zeros(()))


@FAULTS.call(_WRITE, "hygiene-warns-of-unlike-heads", "Heads that are unlike are warned of behind keys.", "KVD-HYGIENE-017")
def _warns_of_unlike(run: BackendCall, args: Args) -> None:
    before = args["v_cache"].clone()
    run(args)
    if args["k"].shape[-2] != args["v"].shape[-2]:
        try:
            warnings.warn("heads are unlike", stacklevel=2)
        except UserWarning:
            bits(args["v_cache"]).copy_(bits(before))
            raise


@FAULTS.call(
    _COPY,
    "hygiene-call-leaves-a-file",
    "A call that raises leaves a file in the current folder.",
    "KVD-HYGIENE-013",
    host_only=("KVD-HYGIENE-013",),
)
def _leaves_a_file(run: BackendCall, args: Args) -> None:
    try:
        run(args)
    except kvdock.IndexRangeError as error:
        Path("last.txt").write_text(str(error), encoding="utf-8")
        raise


_call_changes(_GATHER, "turns-off-the-profiler", "turns off what profiles its thread", lambda: sys.setprofile(None), "KVD-HYGIENE-017")
_call_changes(_STATIC, "turns-off-the-debugger", "turns off what traces its thread", lambda: sys.settrace(None), "KVD-HYGIENE-017")
