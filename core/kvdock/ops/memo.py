"""Remembering the last call of a thread, so that one just like it is launched with hardly any Python in between.

Decoding repeats one call over and over: the same pools, tensors of the same shape and strides at other addresses. What is
checked of such a call, addresses apart, has one outcome; so it is enough to see that nothing has changed. torch has a
comparison of a list of tensors with what they were, written in C++ for the guards of compiled code (`TensorGuards`): type,
dispatch keys, dtype, device, sizes, strides and requires_grad of five tensors in the time that Python takes to read one
shape. A memo holds such a guard and what the quick path found out; at each call it is left to look at the addresses:
alignment and overlap.

`TensorGuards` is private to torch. It is tried out when it is first wanted, and if it does not do what is relied on here,
nothing is remembered: calls then take the quick path of `signature`, which needs nothing private.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvdock.ops.geometry import extent

__all__ = ["MemoState", "Memory", "guard_for", "remember"]

Guard = Callable[..., bool]

_PATIENCE = 1024


class MemoState:
    """One thread's memo of one op, or of one op bound to its pools.

    Attributes:
        memo: what the generated head of a call unpacks, or None.
        size: a run-time size of the last call that took the quick path: two alike are worth a memo.
        wait: calls to let pass before the next memo is made: it doubles where memos turn out to be useless.
        clock: uses of the descriptor cache when the last memo was made, to tell whether it was any use.
        calls: calls since then that took the quick path.
    """

    __slots__ = ("calls", "clock", "memo", "size", "wait")

    def __init__(self) -> None:
        self.memo: tuple[Any, ...] | None = None
        self.size = -1
        self.wait = self.clock = self.calls = 0


class Memory(threading.local):
    """The calling thread's `MemoState`, as ``memory.state``."""

    def __init__(self) -> None:
        self.state = MemoState()


def remember(
    state: MemoState,
    plan: Any,
    entry: Any,
    cache: Any,
    epoch: int,
    generation: int,
    values: tuple[Any, ...],
    tensors: tuple[torch.Tensor, ...],
    skip: int,
) -> None:
    """Make a memo of a call that has just been checked, unless memos have been useless lately.

    Args:
        state: the calling thread's.
        plan: the plan that serves the call.
        entry: its entry in the descriptor cache.
        cache: the descriptor cache.
        epoch: `Chooser.epoch` now.
        generation: generation of the descriptor caches now.
        values: all arguments.
        tensors: the tensors among them, in order.
        skip: how many of the tensors are bound and need not be compared.
    """
    state.calls += 1
    if state.calls <= state.wait:
        return
    hits = cache.clock - state.clock - state.calls
    state.wait = 0 if hits > 4 * state.calls or state.memo is None else min(2 * state.wait + 1, _PATIENCE)
    state.clock, state.calls = cache.clock, 0
    check = guard_for(tensors[skip:])
    if check is None:
        state.wait = _PATIENCE
        return
    fixed = plan.fix(values)
    state.memo = (check, epoch, generation, fixed, entry, cache, *(extent(tensor) for tensor in tensors))


def guard_for(tensors: Sequence[torch.Tensor]) -> Guard | None:
    """Return a comparison of tensors with what these are now, or None where torch has none that can be relied on."""
    make = _trusted()
    return None if make is None else make(tensors)


@functools.cache
def _trusted() -> Callable[[Sequence[torch.Tensor]], Guard] | None:
    """Return how guards are made, if they notice all that matters."""
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return None

    def make(tensors: Sequence[torch.Tensor]) -> Guard:
        sizes: Any = [list(tensor.shape) for tensor in tensors]  # torch's annotation of these two is wrong
        strides: Any = [list(tensor.stride()) for tensor in tensors]
        guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        check: Guard = guards.check
        return check

    try:
        return make if _notices_changes(make) else None
    except Exception:  # noqa: BLE001 - private: whatever it raises, it is not what was relied on
        return None


def _notices_changes(make: Callable[[Sequence[torch.Tensor]], Guard]) -> bool:
    """Whether a guard accepts the same geometry elsewhere, and refuses every other."""
    base, index = torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.int64)
    check = make([base, index])
    changed = [
        torch.zeros(2, 3, 5),
        torch.zeros(1, 3, 4),
        torch.zeros(2, 3, 8)[..., :4],
        torch.zeros(3, 2, 4).transpose(0, 1),
        torch.zeros(2, 3, 4, dtype=torch.float64),
        torch.zeros(2, 3, 4, device="meta"),
        torch.zeros(2, 3, 4, requires_grad=True),
        torch.zeros(6, 4),
    ]
    with torch.enable_grad():
        refused = not any(check(tensor, index) for tensor in changed)
    return bool(check(torch.ones(2, 3, 4), torch.ones(2, dtype=torch.int64))) and refused and not check(base, index.to(torch.int32))
