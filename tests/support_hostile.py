"""A backend that does to the process that runs it what it is told, by accident or to look better than it is."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import kvdock
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock_conformance.stand_ins import StandIn, register_backend
from support_plugins import CallDescriptor

BEHAVIOUR = "KVDOCK_TEST_BEHAVIOUR"
"""Variable that names a file, in which the name of one of `CALLS`, `REASONS` or `PLANS` stands."""

OP = "paged_caching_"


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def _raises(error: BaseException) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


def _crash_behind_much_output() -> None:
    line = b"x" * (1 << 20)
    for _ in range(100):
        os.write(1, line)
    os.write(1, b"\nthe end of it\n")
    os.kill(os.getpid(), signal.SIGSEGV)


def _write_to_every_pipe() -> None:
    for number in range(3, 64):
        try:
            os.write(number, b'[1, {"verdict": "passed", "seconds": 0}]\n')
        except OSError:
            continue


def _leave_things_running() -> None:
    threading.Thread(target=time.sleep, args=(600,)).start()
    left = subprocess.Popen(["sleep", "600"])
    Path(os.environ[BEHAVIOUR]).with_suffix(".left").write_text(str(left.pid))


def _replace_an_op() -> None:
    kvdock.ops.copy_blocks_ = print


CALLS: Mapping[str, Callable[[], object]] = {
    "good": lambda: None,
    "ends well": lambda: os._exit(0),
    "sys.exit": lambda: sys.exit(0),
    "interrupts": _raises(KeyboardInterrupt("stop")),
    "generator": _raises(GeneratorExit()),
    "unspeakable": _raises(UnspeakableError()),
    "odd text": _raises(RuntimeError("a \udc80 \x00 \x1b[31m ]]> \ufffe")),
    "much output": _crash_behind_much_output,
    "closes": lambda: os.closerange(3, 4096),
    "forks": lambda: os.fork(),
    "cheats": _write_to_every_pipe,
    "leaves": _leave_things_running,
    "folder": lambda: os.chdir("/proc"),
    "environment": lambda: os.environ.update(OMP_NUM_THREADS="7", HOSTILE="1"),
    "unset": lambda: os.environ.pop("PATH"),
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "device": lambda: torch.set_default_device("meta"),
    "gradients": lambda: torch.set_grad_enabled(False),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "seeds": lambda: torch.manual_seed(3),
    "seeds Python": lambda: random.seed(3),
    "filters": lambda: warnings.simplefilter("ignore"),
    "patches": _replace_an_op,
}
"""What a call does, behind what it should."""

REASONS: Mapping[str, Callable[[], Any]] = {
    "no list": lambda: None,
    "not a number": lambda: [float("nan")],
    "empty": lambda: [""],
    "letters": lambda: "no",
    "refuses and ends": lambda: sys.exit(0),
}
"""What `Kernel.supports` returns."""

PLANS: Mapping[str, Callable[[], Any]] = {"no plan": lambda: None, "plan crashes": lambda: os.kill(os.getpid(), signal.SIGSEGV)}
"""What `Kernel.prepare` returns."""


def _behaviour() -> str:
    return Path(os.environ[BEHAVIOUR]).read_text()


class Kernel(kvdock.plugin.Kernel):
    """The portable kernel, and what the file says."""

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        behaviour = _behaviour()
        return REASONS[behaviour]() if behaviour in REASONS else PORTABLE_KERNELS[OP].supports(request)  # type: ignore[no-any-return]

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        if _behaviour() in PLANS:
            return PLANS[_behaviour()]()  # type: ignore[no-any-return]
        inner = PORTABLE_KERNELS[OP].prepare(request)

        def call(*args: Any) -> None:
            inner(*args)
            CALLS[_behaviour()]()

        return CallDescriptor(call)


class Backend(StandIn):
    """The backend; where the file says so, it cannot be opened."""

    def devices(self) -> Sequence[torch.device]:
        return [] if _behaviour() == "no device" else super().devices()

    def capabilities(self) -> kvdock.plugin.Capabilities:
        if _behaviour() == "no capabilities":
            raise UnspeakableError
        return super().capabilities()


def register() -> None:
    """Put the backend into the process's registry."""
    register_backend(Backend("hostile", {**PORTABLE_KERNELS, OP: Kernel()}))


def hang() -> None:
    """Never come back, as an import that waits for a licence server."""
    time.sleep(600)
