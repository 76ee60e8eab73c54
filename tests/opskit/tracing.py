"""Calls of every form of an op, made of its schema; and what torch sees of a call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvdock.ops.schema import Arg, OpSchema, Role
from kvdock.spec import QUANTISED_DTYPES

__all__ = ["SIZES", "Seen", "forms", "seen"]

SIZES = {"NB": 4, "block": 4, "vblock": 4, "Hk": 2, "Hv": 2, "Hq": 4, "Dk": 8, "Dv": 8, "B": 3, "S": 9, "b": 3, "n": 3, "s": 2, "N": 2} | {
    "D": 4, "E": 8, "W": 12, "C": 8, "P": 4, "R": 3, "G": 3, "T": 3, "k": 1, "m": 2, "K": 2, "H": 2, "MB": 5, "lead0": 3, "lead1": 2,
    "Dc": 8, "Dp": 4, "Dw": 12, "NBs": 4, "NBd": 5,
}  # fmt: skip
STATICS = (0.5, True, 3, None, "causal", (1, "a"))


class Seen(TorchDispatchMode):
    """Notes the calls of kvdock's ops that torch sees, and lets them happen."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "kvdock":
            self.calls.append((func, args, kwargs))
        return func(*args, **(kwargs or {}))


def seen(call: Callable[[], Any]) -> Seen:
    """Return what torch saw of a call."""
    with Seen() as mode:
        call()
    return mode


def _tensor(arg: Arg, line: str, sizes: Mapping[str, int]) -> torch.Tensor:
    words = line.split()
    lead = ["lead0"] if words[:1] == ["..."] else []
    shape = [int(w) if w.isdigit() else sizes[w.lstrip("*")] for w in [*lead, *words[len(lead) :]]]
    numbers = torch.arange(int(torch.tensor(shape).prod()) if shape else 1)
    return numbers.view(shape).to(next(dtype for dtype in (torch.float32, *arg.dtypes) if dtype in arg.dtypes))


def _kinds(arg: Arg, sizes: Mapping[str, int]) -> list[Any]:
    """Return a value of each kind that an argument may be. Scales are left out: nothing is quantised."""
    if arg.role is Role.STATIC:
        return [*STATICS]
    if arg.role is Role.RUNTIME_INT and not arg.dims:
        return [1]
    made = [_tensor(arg, line, sizes) for line in arg.dims] if arg.scale_of is None else []
    if arg.role is Role.RUNTIME_INT:
        return [2, *made]
    return [None, *made] if arg.optional or arg.returned else made


def forms(schema: OpSchema, fixed: Mapping[str, Any] | None = None, sizes: Mapping[str, int] = SIZES) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of a call of each form: outputs are all there or all made, and what is optional is all there or absent."""
    kinds = {arg.name: [(fixed or {})[arg.name]] if arg.name in (fixed or {}) else _kinds(arg, sizes) for arg in schema.args}
    assert not {dtype for arg in schema.args for dtype in arg.dtypes[:1]} & {*QUANTISED_DTYPES}
    both = {arg.name for arg in schema.args if arg.optional or arg.returned}
    choices = [range(1 if name in both else len(each)) for name, each in kinds.items()]
    for places, present in itertools.product(itertools.product(*choices), (False, True) if both else (True,)):
        named = zip(kinds.items(), places, strict=True)
        values = [each[-1 if present else 0] if name in both else each[place] for (name, each), place in named]
        yield tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in values)
