"""The forward passes that read pages, by thread: how one begins, and how it ends."""

from __future__ import annotations

import threading
from typing import Any

from kvdock.errors import ArgumentValueError, WrongThreadError
from kvdock.integrations.transformers.reading import Pass
from kvdock.integrations.transformers.state import PagedState
from kvdock.integrations.transformers.switching import restore, switch

__all__ = ["current_pass", "enter", "leave"]


class _Passes(threading.local):
    """Those of a thread, the innermost last, each with its state."""

    def __init__(self) -> None:
        self.stack: list[tuple[Pass, PagedState]] = []


_PASSES = _Passes()


def current_pass() -> Pass | None:
    """Return the pass of this thread that reads pages, or None."""
    stack = _PASSES.stack
    return stack[-1][0] if stack else None


def enter(model: Any, state: PagedState, told: dict[str, Any]) -> None:
    """Begin a pass: one that reads pages, if it can.

    Args:
        model: what runs.
        state: of the cache that it gets.
        told: its arguments, by name.

    Raises:
        WrongThreadError: another thread is in such a pass with this cache.
    """
    _check_alone(state)
    if not state.length:  # there is nothing to read but what is new
        return
    state.odd = state.reader.why_not(model, told) or _pads_ahead(state)
    if not state.odd:
        state.reading = Pass(model, state.reader, state.length, state.markers)
        switch(config for config, _ in state.reader.configs)
        _PASSES.stack.append((state.reading, state))
        if state.captured is not None:
            state.captured.begin(state.reading, state, told)


def _check_alone(state: PagedState) -> None:
    """Raise if another thread is in a pass that reads these pages, or steps of decoding are to be made."""
    if state.is_decoding:
        raise ArgumentValueError(
            "PagedCacheForTransformers: a forward pass",
            expected="the arguments that next() of the decoding returns",
            got="the cache itself",
            fix="leave the `with` block of decoding() first",
        )
    if state.reading is not None and state.reading.thread != threading.get_ident():
        raise WrongThreadError(
            "PagedCacheForTransformers: a forward pass",
            expected="one at a time",
            got="one in another thread meanwhile",
            fix="give each thread a cache of its own; after an interrupt, reset() this one",
        )


def _pads_ahead(state: PagedState) -> str:
    """Return whether padding that has no blocks goes on behind the tokens that are there, as a reason; or ""."""
    batch = state.batch
    return "padding behind what is cached" if batch is not None and batch.most_pads > batch.length else ""


def leave(model: Any) -> Pass | None:
    """End the pass of a model, if it reads pages, and what an interrupt has left of others in it; return it."""
    stack, found = _PASSES.stack, None
    while any(begun.model is model for begun, _ in stack):
        found, state = stack.pop()
        restore(config for config, _ in found.reader.configs)
        state.reading = None
        if state.captured is not None:
            state.captured.end(found)
    return found
