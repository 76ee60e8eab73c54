"""ProcessSettings of the process that a backend must leave as they are: they belong to whoever runs it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import locale
import logging
import os
import random
import re
import resource
import signal
import socket
import sys
import threading
import types
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kvdock_conformance.checking.failure import NonconformanceError

__all__ = ["ProcessSettings", "renewed", "unchanged"]


class ProcessSettings:
    """The settings of the process as they are now. Its source goes into fresh interpreters too, so it uses no other of the kit's."""

    most_workers = 16 + 2 * (os.cpu_count() or 1)
    """So many daemon threads may a process have: a pool that is made once stays."""

    of_the_moment = ("Vm", "Rss", "Huge", "Threads", "State", "FDSize", "SigQ", "SigPnd", "ShdPnd", "Tracer", "CoreD", "vol", "nonvol")
    """How lines of a thread's status begin that tell of no setting."""

    of_compilers = (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 15, 24, 25, 31)
    """Signals, by number, whose system's handler LLVM replaces when it first compiles in a process: as before, it ends with them. What
    Python does with them is compared all the same."""

    everybodys = ("builtins", "logging", "numpy", "os", "random", "signal", "sys", "threading", "time", "warnings")
    """Modules whose functions and classes nobody may replace, beside kvdock's; torch replaces its own when it loads its compiler."""

    def __init__(self) -> None:
        self.values, self.threads = self.now(), set(self.running())
        own = [name for name in list(sys.modules) if name[:6] == "kvdock" and name[6:7] in ("", ".")]
        self.code, self.modules = {name: dict(vars(sys.modules[name])) for name in (*own, *self.everybodys)}, len(sys.modules)
        self.parts = self._parts_of(self.code)

    @classmethod
    @functools.cache
    def table(cls) -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
        """Return what is compared, by name: how it is read, and how it is put back."""
        return {
            **cls.pairs(),
            "the current directory": (cls.folder, os.chdir),
            "C's environment, where os.environ shows another": (cls.of_c, cls._put_c),
            "warnings.filters": (lambda: list(warnings.filters), cls._filter),
            "logging's root logger": (lambda: (logging.root.level, list(logging.root.handlers), logging.root.manager.disable), cls._log),
            "the state of Python's random numbers": (random.getstate, random.setstate),
            "the state of numpy's random numbers": (cls._numbers, cls._draw),
            "the state of torch's random numbers": (
                lambda: torch.get_rng_state().numpy().tobytes(),
                lambda was: torch.set_rng_state(torch.frombuffer(bytearray(was), dtype=torch.uint8)),
            ),
            "what is printed to stdout, in bytes": (cls.printed, lambda was: None),
            "the floating-point mode": (cls.floating_point, lambda was: torch.set_flush_denormal(not was["subnormal numbers"])),
            "traps of numbers": (getattr(ctypes.CDLL(None), "fegetexcept", int), lambda was: ctypes.CDLL(None).fedisableexcept(~was)),
            "the locale": (lambda: locale.setlocale(locale.LC_ALL), lambda was: locale.setlocale(locale.LC_ALL, was)),
            "the garbage collector": (gc.isenabled, lambda was: (gc.enable if was else gc.disable)()),
            "what handles signals": (lambda: [signal.getsignal(number) for number in cls.signals()], cls._handle),
            "sys.path": (lambda: list(sys.path), lambda was: sys.path.__setitem__(slice(None), was)),
            "sys.stdin, sys.stdout and sys.stderr": (
                lambda: (sys.stdin, sys.stdout, sys.stderr),
                lambda was: vars(sys).update(zip(("stdin", "stdout", "stderr"), was, strict=True)),
            ),
            "what the descriptors 0, 1 and 2 are": (cls.descriptors, cls._open_again),
            "torch.get_default_device()": (
                torch.get_default_device,
                lambda was: torch.set_default_device(None if was == torch.device("cpu") else was),
            ),
            "torch's options for printing": (
                lambda: dict(vars(torch._tensor_str.PRINT_OPTS)),
                lambda was: vars(torch._tensor_str.PRINT_OPTS).update(was),
            ),
            "torch's check for NaN": (torch.is_anomaly_check_nan_enabled, lambda was: None),
            "torch's inference mode": (torch.is_inference_mode_enabled, lambda was: None),
            "torch's autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda was: torch.set_autocast_enabled("cpu", was)),
            "the dtype of torch's autocast": (lambda: torch.get_autocast_dtype("cpu"), lambda was: torch.set_autocast_dtype("cpu", was)),
            "torch's modes that see functions": (torch._C._len_torch_function_stack, lambda was: None),
            "torch's modes that see operations": (torch._C._len_torch_dispatch_stack, lambda was: None),
            "the running timers": (cls.timers, cls._stop),
            "the priority": (lambda: os.getpriority(os.PRIO_PROCESS, 0), lambda was: None),
            "the processors that this thread may use": (cls.processors, lambda was: os.sched_setaffinity(0, was)),
            "the limits of resources": (
                lambda: [resource.getrlimit(number) for number in cls.limits()],
                lambda was: list(map(resource.setrlimit, cls.limits(), was)),
            ),
        }

    @classmethod
    def now(cls) -> dict[str, Any]:
        """Return what is so now, by name."""
        found = {name: read() for name, (read, _) in cls.table().items()}
        variables: dict[str, str] = cls.made_of("the environment", dict(vars(os.environ)["_data"]), cls.variables)
        return found | cls.status() | variables

    @staticmethod
    @functools.cache
    def made() -> dict[str, tuple[Any, Any]]:
        """Return where `made_of` keeps what it was given last and what was made of it, by name."""
        return {}

    @classmethod
    def made_of(cls, name: str, given: Any, make: Callable[..., Any]) -> Any:
        """Return what is made of something: what was made of it last, where it is still the same, as it is behind nearly every case."""
        if name not in cls.made() or cls.made()[name][0] != given:
            cls.made()[name] = given, make(given)
        return cls.made()[name][1]

    @staticmethod
    def variables(given: object) -> dict[str, str]:
        """Return the variables of the environment by what they are called here."""
        return {f"environment variable {name}": value for name, value in os.environ.items()}

    @classmethod
    def of_c(cls) -> dict[str, str | None]:
        """Return the variables of C's environment, which processes inherit, where `os.environ` shows another value or none."""
        place, lines = cls.environ(), list[bytes]()
        while place and (line := place[len(lines)]):
            lines.append(line)
        found: dict[str, str | None] = cls.made_of("C's environment", (lines, dict(vars(os.environ)["_data"])), cls._of_lines)
        return found

    @staticmethod
    def _of_lines(given: tuple[list[bytes], dict[bytes, bytes]]) -> dict[str, str | None]:
        """Return what is otherwise in lines of C's environment; nothing where there are none."""
        lines, own = given
        shown = {b"%b=%b" % each for each in own.items()}
        other = {each.partition(b"=")[0] for each in shown.symmetric_difference(lines) if not each.startswith(b"__KMP_")}  # OpenMP's own
        values = {name: os.fsdecode(value) for name, _, value in (each.partition(b"=") for each in lines)} if other else {}
        return {os.fsdecode(name): values.get(name) for name in (other if values else ())}

    @staticmethod
    @functools.cache
    def environ() -> Any:
        """Return where C keeps its environment; None where that cannot be told."""
        with contextlib.suppress(OSError, ValueError):
            return ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
        return None

    @classmethod
    def _put_c(cls, was: dict[str, str | None]) -> None:
        """Put C's environment back where it has come to differ."""
        for name in cls.of_c():
            value = was.get(name, os.environ.get(name))
            os.unsetenv(name) if value is None else os.putenv(name, value)

    @classmethod
    @functools.cache
    def pairs(cls) -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
        """Return every setting that a module has a function for that gets it, without arguments, and one that sets it."""
        found: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {}
        for module in (gc, sys, threading, socket, np, torch, torch._C):
            for name, read in vars(module).items():
                write = vars(module).get(re.sub("^(_?)(get|is)", r"\1set", name))
                # What is preferred depends on the devices there are, which torch would look for.
                if callable(write) and write is not read and "preferred" not in name and (module is torch or not hasattr(torch, name)):
                    with contextlib.suppress(Exception), warnings.catch_warnings(action="error"):  # deprecated, or needs arguments
                        if not isinstance(read(), torch.Tensor):
                            found[f"{module.__name__}.{name}()"] = read, functools.partial(cls._put, write)
        return found

    @staticmethod
    def _put(write: Callable[..., object], was: Any) -> None:
        """Put back what may be several arguments; what can be set once only stays."""
        with contextlib.suppress(Exception):
            write(**was) if isinstance(was, dict) else write(*was) if isinstance(was, tuple) else write(was)

    @classmethod
    def status(cls) -> dict[str, Any]:
        """Return what the system tells of the settings of this thread and its process, by name; nothing where it does not."""
        try:
            file = os.open("/proc/thread-self/status", os.O_RDONLY)
        except OSError:
            return {}
        try:
            lines = os.read(file, 1 << 16).decode("ascii", "replace").splitlines(keepends=True)
        finally:
            os.close(file)
        lasting = [line for line in lines if not line.startswith(cls.of_the_moment)]
        found: dict[str, Any] = cls.made_of("the status", lasting, cls._of_status)
        return found

    @classmethod
    def _of_status(cls, lines: list[str]) -> dict[str, Any]:
        """Return what lines of a thread's status say of its settings."""
        found: dict[str, Any] = dict(line.split(":", 1) for line in lines)
        taken = sum(1 << number - 1 for number in cls.of_compilers)
        # Signals above these are those of the C library and of runtimes.
        found |= {name: int(found[name], 16) % (1 << 31) & ~taken for name in ("SigBlk", "SigIgn", "SigCgt")}
        return {f"status of the thread: {name}": value for name, value in found.items()}

    @staticmethod
    def processors() -> set[int]:
        """Return the numbers of the processors that this thread may use; none where the system does not tell."""
        return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()

    @staticmethod
    def timers() -> list[tuple[bool, float]]:
        """Return of each of the process's timers whether it runs, and its interval in seconds."""
        return [(left > 0, interval) for left, interval in map(signal.getitimer, range(3))]

    @staticmethod
    def _stop(was: list[tuple[bool, float]]) -> None:
        """Stop the timers that did not run; nobody knows how much the others had left."""
        for number, (ran, _) in enumerate(was):
            if not ran:
                signal.setitimer(number, 0)

    @staticmethod
    @functools.cache
    def limits() -> list[int]:
        """Return the numbers of what the system limits."""
        return [number for name, number in vars(resource).items() if name.startswith("RLIMIT_")]

    @staticmethod
    def running() -> dict[int | None, threading.Thread]:
        """Return the threads that Python started, by number."""
        return {thread.ident: thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}

    @staticmethod
    def folder() -> str:
        """Return the current directory."""
        try:
            return os.getcwd()
        except OSError:
            return "a folder that is gone"

    @staticmethod
    @functools.cache
    def signals() -> list[signal.Signals]:
        """Return the signals that programs handle themselves; of the others, the status tells whether they are handled."""
        names = ("HUP", "INT", "QUIT", "USR1", "USR2", "PIPE", "ALRM", "TERM", "CHLD", "XCPU", "WINCH")
        return [signal.Signals[f"SIG{name}"] for name in names]

    @staticmethod
    def descriptors() -> list[tuple[int, int] | None]:
        """Return which files the descriptors of stdin, stdout and stderr are of; None for one that is closed."""
        found: list[tuple[int, int] | None] = [None] * 3
        for number in range(3):
            with contextlib.suppress(OSError):
                status = os.fstat(number)
                found[number] = status.st_dev, status.st_ino
        return found

    @classmethod
    def _open_again(cls, was: list[tuple[int, int] | None]) -> None:
        """Let those that are closed now be of what is nothing, so that no other file gets their numbers."""
        for number, (before, now) in enumerate(zip(was, cls.descriptors(), strict=True)):
            opened = os.open(os.devnull, os.O_RDWR) if before and now is None else number
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)

    @staticmethod
    def printed() -> int:
        """Return how much this process has written to stdout; 0 where that is no file, or the same as stderr."""
        with contextlib.suppress(Exception):  # closed, or replaced by something else
            sys.stdout.flush()
        places = [0, 0]
        for number in (1, 2):
            with contextlib.suppress(OSError):
                places[number - 1] = os.lseek(number, 0, os.SEEK_CUR)
        return places[0] if places[0] != places[1] else 0

    @staticmethod
    def floating_point() -> dict[str, bool]:
        """Return how this thread calculates: libraries built with -Ofast and the like change that for everybody in it."""
        smallest, one, eps = sys.float_info.min, float(sys.float_info.radix) / 2, sys.float_info.epsilon
        return {"subnormal numbers": smallest / 2 > 0, "rounds to nearest": one + eps / 4 == one and one - eps / 8 == one}

    def changes(self, *, workers: bool = False) -> list[tuple[str, str, str]]:
        """Return what is otherwise now: its name, what it was, and what it is.

        What kvdock has imported meanwhile is no change, nor is a thread that has ended.

        Args:
            workers: whether daemon threads may have been started that stay, as long as they are few.
        """
        was, now = self.values, self.now()
        names = [] if was == now else [name for name in {**was, **now} if self._differs(was, now, name)]
        found = [(name, self.told(was, name), self.told(now, name)) for name in names]
        spaces = {module: vars(sys.modules[module]) if module in sys.modules else before for module, before in self.code.items()}
        for module, before in () if self._alike(self._parts_of(spaces), self.parts) else self.code.items():
            parts = spaces[module]
            if not self._alike([*parts.values()], [*before.values()]):
                self.modules = 0  # to be looked at anew, with what is there now
                names = [name for name, part in before.items() if self._is_code(part) and parts.get(name) is not part]
                found += [(f"{module}.{name}", self.told(before, name), self.told(parts, name)) for name in names]
        running = self.running()
        are_workers = workers and len(running) <= self.most_workers
        started = [thread for number, thread in running.items() if number not in self.threads and not (are_workers and thread.daemon)]
        return [*found, *((f"thread {thread.ident}", "nothing", repr(thread.name)) for thread in started)]

    @staticmethod
    def _differs(was: dict[str, Any], now: dict[str, Any], name: str) -> bool:
        return name not in was or name not in now or bool(was[name] != now[name])

    @staticmethod
    def _parts_of(spaces: dict[str, dict[str, Any]]) -> list[Any]:
        """Return what all modules hold, in one list, to be compared at once."""
        return [*itertools.chain.from_iterable(map(dict.values, spaces.values()))]

    @staticmethod
    def _alike(parts: list[Any], before: list[Any]) -> bool:
        """Whether parts of a module are the same: quick to ask, and True too where one is equal to what was there."""
        try:
            return parts == before
        except Exception:  # noqa: BLE001 - of tensors
            return False

    @staticmethod
    def _is_code(part: object) -> bool:
        return isinstance(part, types.FunctionType | types.BuiltinFunctionType | type)

    @staticmethod
    def told(values: dict[str, Any], name: str) -> str:
        """Return a value as text, if it is one to be read."""
        text = repr(values[name]) if name in values else "nothing"
        return text if len(text) <= 300 else f"{text[:100]} ... {text[-100:]} (checksum {zlib.crc32(text.encode()):x})"

    def restore(self) -> None:
        """Put back what has changed."""
        table = self.table()
        for name, _, _ in self.changes():
            variable = name.removeprefix("environment variable ")
            module, _, part = name.rpartition(".")
            if name.startswith("thread ") or (name.startswith("status ") and not name.endswith("Umask")):
                continue  # it ends by itself, or not at all; of the status, most is somewhere else too
            if name in table:
                table[name][1](self.values[name])
            elif name.endswith("Umask"):
                os.umask(int(self.values[name], 8))
            elif variable == name:
                setattr(sys.modules[module], part, self.code[module][part])
            elif name in self.values:
                os.environ[variable] = self.values[name]
            else:
                del os.environ[variable]

    @classmethod
    def _numbers(cls) -> tuple[Any, ...]:
        """Return the state of numpy's random numbers, which takes it long to tell: asked anew where its bytes are others."""
        own = vars(np.random)["get_bit_generator"]()  # public, which its types do not say
        is_usual = isinstance(own, np.random.MT19937)  # 624 numbers of 32 bits, and which of them is next
        found: tuple[Any, ...] = cls.made_of("numpy", ctypes.string_at(own.ctypes.state_address, 2500) if is_usual else object(), cls._told)
        return found

    @staticmethod
    def _told(given: object) -> tuple[Any, ...]:
        """Return the state of numpy's random numbers as it tells it."""
        name, state, *others = np.random.get_state()
        return (name, np.asarray(state).tobytes(), *others)

    @staticmethod
    def _draw(was: tuple[Any, ...]) -> None:
        """Put numpy's random numbers back."""
        np.random.set_state((was[0], np.frombuffer(was[1], np.uint32), *was[2:]))

    @staticmethod
    def _log(was: tuple[int, list[logging.Handler], int]) -> None:
        """Put logging's root logger back."""
        logging.root.setLevel(was[0])
        logging.root.handlers[:] = was[1]
        logging.disable(was[2])

    @classmethod
    def _handle(cls, was: list[Any]) -> None:
        """Put what handles signals back."""
        for number, handler in zip(cls.signals(), was, strict=True):
            if signal.getsignal(number) != handler is not None:  # None: C's own, for Python to keep off
                signal.signal(number, handler)

    @staticmethod
    def _filter(filters: list[Any]) -> None:
        """Put the filters of warnings back, and let Python know."""
        warnings.resetwarnings()
        own: list[Any] = vars(warnings)["filters"]  # a list, whatever is said of its type
        own[:] = filters


def renewed(before: ProcessSettings) -> ProcessSettings:
    """Return the settings as they are now, where `unchanged` has just found them so: anew where kvdock has brought more of its own."""
    if len(sys.modules) != before.modules:
        return ProcessSettings()
    before.threads = set(before.running())
    return before


@contextmanager
def unchanged(*, workers: bool = True, before: ProcessSettings | None = None) -> Iterator[None]:
    """Hold a block to leave the settings of the process as they are, and put them back where it does not.

    Args:
        workers: whether it may leave daemon threads behind, as long as they are few: those of a pool that is made once.
        before: the settings as they are now, where they are known.

    Raises:
        NonconformanceError: the block ended by itself, and one is otherwise now.
    """
    before = before or ProcessSettings()
    try:
        yield
    except BaseException:
        before.restore()
        raise
    changes = before.changes(workers=workers)
    if changes:
        before.restore()
        raise NonconformanceError(f"{changes[0][0]} behind the calls", expected=changes[0][1], got=changes[0][2])
