"""ProcessSettings of the process that a backend must leave as they are: they belong to whoever runs it."""

from __future__ import annotations

import os
import random
import sys
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
            "torch.get_default_dtype()": torch.get_default_dtype(),
            "torch.get_default_device()": torch.get_default_device(),
            "torch.is_grad_enabled()": torch.is_grad_enabled(),
            "torch.get_num_threads()": torch.get_num_threads(),
            "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
            "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        }
        found.update((f"environment variable {name}", value) for name, value in os.environ.items())
        for module in [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "kvdock"]:
            parts = [(name, part) for name, part in vars(module).items() if isinstance(part, types.FunctionType | type)]
            found.update((f"{module.__name__}.{name}", part) for name, part in parts)
        return found

    def changes(self) -> list[tuple[str, str, str]]:
        """Return what is otherwise now: its name, what it was, and what it is. What kvdock has imported meanwhile is no change."""
        was, now = self.values, self.now()
        names = [name for name in {**was, **now} if name in was or not name.startswith("kvdock.")]
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
            if name in back:
                back[name](self.values[name])
            elif variable == name:
                setattr(sys.modules[module], part, self.values[name])
            elif name in self.values:
                os.environ[variable] = self.values[name]
            else:
                del os.environ[variable]

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
