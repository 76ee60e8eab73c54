"""ProcessSettings of the process that a backend must leave as they are: they belong to whoever runs it."""

from __future__ import annotations

import gc
import locale
import os
import random
import sys
import threading
import types
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvdock_conformance.checking.failure import NonconformanceError

__all__ = ["ProcessSettings", "unchanged"]


class ProcessSettings:
    """The settings of the process as they are now. Its source goes into fresh interpreters too, so it uses no other of the kit's."""

    def __init__(self) -> None:
        self.values = self.now()
        self._random, self._rng = random.getstate(), torch.get_rng_state()

    def now(self) -> dict[str, Any]:
        """Return what is compared, by name."""
        try:
            directory = os.getcwd()
        except OSError:
            directory = "a folder that is gone"
        found = {
            "the current directory": directory,
            "warnings.filters": list(warnings.filters),
            "the state of Python's random numbers": f"{hash(random.getstate()):x}",
            "the state of torch's random numbers": f"{zlib.crc32(torch.get_rng_state().numpy().tobytes()):x}",
            "the floating-point mode": self.floating_point(),
            "the locale": locale.setlocale(locale.LC_ALL),
            "the garbage collector": (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
            "torch.get_default_dtype()": torch.get_default_dtype(),
            "torch.get_default_device()": torch.get_default_device(),
            "torch.is_grad_enabled()": torch.is_grad_enabled(),
            "torch.get_num_threads()": torch.get_num_threads(),
            "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
            "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        }
        threads = [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]
        found.update((f"thread {thread.ident}", thread.name) for thread in threads)
        found.update((f"environment variable {name}", value) for name, value in os.environ.items())
        for module in [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "kvdock"]:
            parts = [(name, part) for name, part in vars(module).items() if isinstance(part, types.FunctionType | type)]
            found.update((f"{module.__name__}.{name}", part) for name, part in parts)
        return found

    @staticmethod
    def floating_point() -> dict[str, bool]:
        """Return how this thread calculates: libraries built with -Ofast and the like change that for everybody in it."""
        smallest, one, eps = sys.float_info.min, float(sys.float_info.radix) / 2, sys.float_info.epsilon
        return {"subnormal numbers": smallest / 2 > 0, "rounds to nearest": one + eps / 4 == one and one - eps / 8 == one}

    def changes(self) -> list[tuple[str, str, str]]:
        """Return what is otherwise now: its name, what it was, and what it is.

        What kvdock has imported meanwhile is no change, nor is a thread that has ended.
        """
        was, now = self.values, self.now()
        names = [name for name in {**was, **now} if not name.startswith("kvdock." if name not in was else "thread ")]
        return [(name, self.told(was, name), self.told(now, name)) for name in names if name not in was or was[name] != now.get(name)]

    @staticmethod
    def told(values: dict[str, Any], name: str) -> str:
        """Return a value as text, if it is one to be read."""
        text = repr(values[name]) if name in values else "nothing"
        return text if len(text) <= 300 else f"{text[:100]} ... {text[-100:]}"

    def restore(self) -> None:
        """Put back what has changed."""
        device = self.values["torch.get_default_device()"]
        back: dict[str, Callable[[Any], object]] = {
            "the current directory": os.chdir,
            "warnings.filters": self._filter,
            "the state of Python's random numbers": lambda was: random.setstate(self._random),
            "the state of torch's random numbers": lambda was: torch.set_rng_state(self._rng),
            "the floating-point mode": lambda was: torch.set_flush_denormal(not was["subnormal numbers"]),
            "the locale": lambda was: locale.setlocale(locale.LC_ALL, was),
            "the garbage collector": self._collect,
            "torch.get_default_dtype()": torch.set_default_dtype,
            "torch.get_default_device()": lambda was: torch.set_default_device(None if device == torch.device("cpu") else device),
            "torch.is_grad_enabled()": torch.set_grad_enabled,
            "torch.get_num_threads()": torch.set_num_threads,
            "torch.are_deterministic_algorithms_enabled()": torch.use_deterministic_algorithms,
            "torch.get_float32_matmul_precision()": torch.set_float32_matmul_precision,
        }
        for name, _, _ in self.changes():
            variable = name.removeprefix("environment variable ")
            module, _, part = name.rpartition(".")
            if name.startswith("thread "):
                continue  # it ends by itself, or not at all
            if name in back:
                back[name](self.values[name])
            elif variable == name:
                setattr(sys.modules[module], part, self.values[name])
            elif name in self.values:
                os.environ[variable] = self.values[name]
            else:
                del os.environ[variable]

    @staticmethod
    def _collect(was: tuple[bool, tuple[int, int, int], int]) -> None:
        """Put the garbage collector back."""
        (gc.enable if was[0] else gc.disable)()
        gc.set_threshold(*was[1])
        gc.set_debug(was[2])

    @staticmethod
    def _filter(filters: list[Any]) -> None:
        """Put the filters of warnings back, and let Python know."""
        warnings.resetwarnings()
        own: list[Any] = vars(warnings)["filters"]  # a list, whatever is said of its type
        own[:] = filters


@contextmanager
def unchanged() -> Iterator[None]:
    """Hold a block to leave the settings of the process as they are, and put them back where it does not.

    Raises:
        NonconformanceError: the block ended by itself, and one is otherwise now.
    """
    before = ProcessSettings()
    try:
        yield
    except BaseException:
        before.restore()
        raise
    changes = before.changes()
    if changes:
        before.restore()
        raise NonconformanceError(f"{changes[0][0]} behind the calls", expected=changes[0][1], got=changes[0][2])
