"""Questions to plugins that are loaded. The answer is what was expected, or an error that names the backend, the question and the cause.

`kvdock.plugins.loading` guards what is asked while a plugin is loaded; this is for everything after that. A call of a prepared
descriptor is not wrapped, for it would cost time at each: `blame` says afterwards whose it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from kvdock.errors import CapacityError, KVDockError, PluginError
from kvdock.interface import Backend, Stream

__all__ = ["are_reasons", "ask", "ask_devices", "ask_guard", "ask_pin", "ask_side_stream", "blame", "is_about_memory", "raise_memory"]

_FIX = "report it to the plugin's author; KVDOCK_BACKENDS_DENY leaves a plugin out"


def ask(name: str, question: str, call: Callable[[], Any], expected: str, fits: Callable[[Any], bool]) -> Any:
    """Ask a backend something and return the answer.

    Errors of kvdock's own and of memory that is short are the plugin's to raise: they get a note about whose they are.

    Args:
        name: name of the backend.
        question: what is called, for people: ``"supports() of its kernel for gather_paged"``.
        call: asks it.
        expected: what should come, for people.
        fits: whether an answer is that.

    Raises:
        PluginError: it raised something else, or answered something else.
    """
    try:
        answer = call()
    except (KVDockError, MemoryError, torch.OutOfMemoryError) as error:
        error.add_note(f"raised by {question} of backend {name!r}")
        raise
    except KeyboardInterrupt:  # no fault of the plugin
        raise
    except BaseException as error:  # a plugin may raise anything, such as the panic of a library in Rust
        got = f"{type(error).__name__}: {error}"
        raise PluginError(f"backend {name!r}: {question}", expected=expected, got=got, fix=_FIX) from error
    if not fits(answer):
        got = f"{answer!r}"[:80] + f" ({type(answer).__name__})"
        raise PluginError(f"backend {name!r}: {question}", expected=expected, got=got, fix=_FIX)
    return answer


def is_about_memory(error: BaseException) -> bool:
    """Whether a device refused memory. That of the host has no class of errors for it."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


def raise_memory(error: BaseException, op: str) -> NoReturn:
    """Raise `CapacityError` where the error is that a device refused memory for an op's outputs, and else the error itself."""
    if is_about_memory(error):
        got, fix = str(error).partition("\n")[0][:200], "free memory on the device, pass outputs of your own, or ask for less at once"
        raise CapacityError(op, expected="memory for what it returns", got=f"less: {got}", fix=fix) from error
    raise error


def are_reasons(answer: Any) -> bool:
    """Whether an answer of `Kernel.supports` is what it should be: a text would be taken for a list of letters."""
    return isinstance(answer, Sequence) and not isinstance(answer, str) and all(isinstance(reason, str) for reason in answer)


def _are_devices(answer: Any) -> bool:
    return isinstance(answer, Sequence) and all(isinstance(device, torch.device) for device in answer)


def ask_devices(backend: Backend) -> Sequence[torch.device]:
    """Return the devices of a backend. Raises `PluginError` as `ask` does."""
    devices: Sequence[torch.device] = ask(backend.name, "devices()", backend.devices, "a list of torch.device", _are_devices)
    return devices


def ask_guard(backend: Backend, device: torch.device) -> contextlib.ExitStack:
    """Make a device the current one until what is returned is closed. Raises `PluginError` as `ask` does."""
    stack = contextlib.ExitStack()

    def enter() -> None:
        stack.enter_context(backend.device_guard(device))

    ask(backend.name, f"device_guard({device})", enter, "a context manager", lambda _: True)
    return stack


def ask_side_stream(backend: Backend, device: torch.device) -> Stream | None:
    """Return a new stream of a device, see `Backend.side_stream`. Raises `PluginError` as `ask` does."""
    with ask_guard(backend, device):
        made: Stream | None = ask(
            backend.name, "side_stream()", lambda: backend.side_stream(device), "a Stream or None", lambda it: isinstance(it, Stream | None)
        )
    return made


def ask_pin(backend: Backend, memory: torch.Tensor, device: torch.device) -> Callable[[], None] | None:
    """Lock pages of host memory for a device, see `Backend.pin`. Raises `PluginError` as `ask` does."""
    with ask_guard(backend, device):
        undo: Callable[[], None] | None = ask(
            backend.name, "pin()", lambda: backend.pin(memory, device), "a function or None", lambda it: it is None or callable(it)
        )
    return undo


def blame(error: BaseException, op: str, find: Callable[[], tuple[str, object]]) -> None:
    """Note on an error of a call who served the call, unless it is one that kvdock's contract knows.

    Args:
        error: what the call raised.
        op: name of the op.
        find: returns the name of who serves such a call, and its kernel.
    """
    if isinstance(error, (KVDockError, Warning)):
        return
    with contextlib.suppress(Exception):  # what cannot be told is not told; the error itself counts
        name, kernel = find()
        error.add_note(f"{op} was served by {name!r}, by a plan of {type(kernel).__module__}.{type(kernel).__qualname__}")
