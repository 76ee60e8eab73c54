"""Recognising tensors that are like earlier ones, in one call from Python.

What is checked of a call, addresses and run-time sizes apart, has one outcome; so it is enough to see that nothing else has
changed. torch has such a comparison of a list of tensors with what they were, written in C++ for the guards of compiled code
(`TensorGuards`): type, dispatch keys, dtype, device, requires_grad, and those sizes and strides that are to be compared, of
five tensors in the time that Python takes to read four shapes. Dispatch keys tell lazy negation, inference tensors and
whatever wraps a tensor: a guard accepts only what it was made of, and knows no list of what to look out for.

`TensorGuards` is private to torch. It is tried out when it is first wanted, and if it does not do what is relied on here,
the same is compared in Python, which takes some ten times as long and needs nothing private.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Guard", "Sizes", "guard_in_python", "make_guard"]

Guard = Callable[..., bool]
"""Whether tensors are like those that it was made of. Raises TypeError, or returns False, for what is no tensor."""

Sizes = Sequence[Sequence[int | None]]
"""Sizes or strides of each tensor; None where any will do."""


def make_guard(tensors: Sequence[torch.Tensor], sizes: Sizes, strides: Sizes) -> Guard:
    """Return a guard of some tensors.

    Args:
        tensors: what it accepts, wherever it lies.
        sizes: for each tensor the sizes to insist on.
        strides: likewise.
    """
    if not tensors:
        return lambda *values: True
    if len(set(map(id, tensors))) < len(tensors):  # torch's guards refuse one tensor in two places, which calls may well have
        return guard_in_python(tensors, sizes, strides)
    return _maker()(tensors, sizes, strides)


@functools.cache
def _maker() -> Callable[[Sequence[torch.Tensor], Sizes, Sizes], Guard]:
    """Return how guards are made: by torch, if it notices all that matters."""
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return guard_in_python

    def make(tensors: Sequence[torch.Tensor], sizes: Sizes, strides: Sizes) -> Guard:
        dims: Any = [list(each) for each in sizes], [list(each) for each in strides]  # torch's annotation of these is wrong
        check: Guard = TensorGuards(*tensors, dynamic_dims_sizes=dims[0], dynamic_dims_strides=dims[1]).check
        return check

    answers: list[bool] = []

    def ask() -> None:
        try:
            answers.append(_notices_changes(make))
        except Exception:  # noqa: BLE001 - private: whatever it raises, it is not what was relied on
            answers.append(False)

    # In a thread where nothing is set that this one may have set, such as inference mode: the answer is for the process.
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return make if answers == [True] else guard_in_python


def guard_in_python(tensors: Sequence[torch.Tensor], sizes: Sizes, strides: Sizes) -> Guard:
    """Make a guard that needs nothing private: see `make_guard`."""
    here = _thread_keys()
    expected = [(_traits(tensor), tuple(size), tuple(stride)) for tensor, size, stride in zip(tensors, sizes, strides, strict=True)]

    def check(*values: Any) -> bool:
        return _thread_keys() == here and all(_is_like(value, *each) for value, each in zip(values, expected, strict=True))

    return check


def _thread_keys() -> tuple[int, int]:
    """Return the dispatch keys that this thread adds and takes away, by which it has calls of torch's ops shown to others."""
    return torch._C._dispatch_tls_local_include_set().raw_repr(), torch._C._dispatch_tls_local_exclude_set().raw_repr()


def _traits(tensor: torch.Tensor) -> tuple[Any, ...]:
    lazy = tensor.is_neg() or tensor.is_conj()
    gradients = tensor.requires_grad and torch.is_grad_enabled()
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor)
    return type(tensor), tensor.dtype, tensor.device, tensor.layout, lazy, tensor.is_inference(), gradients, is_wrapped


def _is_like(value: Any, traits: tuple[Any, ...], sizes: Sequence[int | None], strides: Sequence[int | None]) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and _traits(value) == traits
        and len(value.shape) == len(sizes)
        and all(a is None or a == b for a, b in zip((*sizes, *strides), (*value.shape, *value.stride()), strict=True))
    )


def _notices_changes(make: Callable[[Sequence[torch.Tensor], Sizes, Sizes], Guard]) -> bool:
    """Whether a guard accepts the same elsewhere, and other sizes and strides where any will do, and refuses all else."""
    base, index = torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.int64)
    check = make([base, index], [[None, 3, 4], [None]], [[None, 4, 1], [None]])
    like = [
        torch.ones(2, 3, 4),
        torch.zeros(5, 3, 4),
        torch.zeros(0, 3, 4),
        torch.zeros(4, 3, 4)[::2],
        torch.zeros(1, 3, 4).expand(7, 3, 4),
    ]
    changed = [
        torch.zeros(2, 3, 5),
        torch.zeros(2, 3, 8)[..., :4],
        torch.zeros(3, 2, 4).transpose(0, 1),
        torch.zeros(2, 3, 4, dtype=torch.float64),
        torch.zeros(2, 3, 4, device="meta"),
        torch.zeros(2, 3, 4, requires_grad=True),
        torch.zeros(6, 4),
        torch._neg_view(base),
        torch.nn.Parameter(torch.zeros(2, 3, 4), requires_grad=False),
    ]
    with torch.inference_mode():
        changed.append(torch.zeros(2, 3, 4))
    with torch.enable_grad():
        accepted = all(check(tensor, index) for tensor in like) and check(base, index[:1].expand(9))
        return bool(accepted) and not any(check(tensor, index) for tensor in changed) and not check(base, index.to(torch.int32))
