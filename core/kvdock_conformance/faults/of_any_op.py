"""Faults that any op can have, as functions of a call that know nothing of an op but its schema: `FAULTS` has them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch

from kvdock.ops.catalog import CATALOG
from kvdock.ops.schema import Arg, Role
from kvdock_conformance.checking.meaning import schema_of
from kvdock_conformance.faults.fault import Args, BackendCall, Fault, HostSeed, KernelSeed, Seed
from kvdock_conformance.faults.seeds import FaultyKernel
from kvdock_conformance.faults.tensors import bits
from kvdock_conformance.requirement import Case, Level, Requirement, cases_at

__all__ = ["FAULTS", "OpFault", "add", "called", "changed_by", "planned", "tensors_of"]

FaultyOpCall = Callable[[str, BackendCall, Args], None]
"""Stands in for a call of an op of that name."""


@attrs.frozen
class OpFault:
    """One way to be wrong for every op that a plugin brings.

    Args:
        name: its name, in lower case with hyphens.
        sentence: what is wrong.
        killers: ids of the requirements that must fail, without the op.
        seed: given the op's name, how it gets into a backend.
        shows: whether a case could show it; None where every case could.
        in_errors: whether it shows in errors for indices out of range alone.
    """

    name: str
    sentence: str
    killers: tuple[str, ...]
    seed: Callable[[str], Seed]
    shows: Callable[[Case], bool] | None = None
    in_errors: bool = False

    def of(self, op: str, asked: Mapping[str, Requirement] | None = None) -> Fault:
        """Return it as a fault of one op, noticed by its killers, or by those of them that are asked and have cases that show it."""
        killers = [f"{killer}@{op}" for killer in self.killers]
        if asked is not None:
            killers = [name for name in killers if name in asked and self._is_shown(asked[name])]
        args = CATALOG[op].args if op in CATALOG else ()  # indices of others may be anything: no case makes them wrong
        is_read = any(arg.host and arg.scale_of is None for arg in args if arg.role is Role.TENSOR)  # then the host knows, on any device
        host_only = tuple(killers) if self.in_errors and not is_read else ()
        return Fault(f"{self.name}@{op}", self.sentence, op, tuple(killers), self.seed(op), host_only=host_only)

    def _is_shown(self, requirement: Requirement) -> bool:
        return self.shows is None or any(map(self.shows, cases_at(Level.EXTENDED, requirement.cases())))


FAULTS: dict[str, OpFault] = {}


def add(name: str, sentence: str, killers: str, seed: Callable[[str], Seed]) -> None:
    """Add a fault; ``killers`` are numbers of ``KVD-OP``."""
    FAULTS[name] = OpFault(name, sentence, tuple(f"KVD-OP-{number}" for number in killers.split()), seed)


def called(name: str, sentence: str, killers: str, *, by_address: bool = False) -> Callable[[FaultyOpCall], FaultyOpCall]:
    """Add a fault of a call; ``by_address`` where it shows in host memory alone, by where that lies."""

    def decorate(change: FaultyOpCall) -> FaultyOpCall:
        def seed(op: str) -> Seed:
            made = KernelSeed(op, lambda inner: FaultyKernel(inner, lambda: _bound(change, op)))
            return HostSeed(made) if by_address else made

        add(name, sentence, killers, seed)
        return change

    return decorate


def _bound(change: FaultyOpCall, op: str) -> Callable[[BackendCall, Args], None]:
    return lambda run, args: change(op, run, args)


def planned(name: str, sentence: str, killers: str) -> Callable[[Callable[[str], Callable[[BackendCall, Args], None]]], Any]:
    """Add a fault that keeps something from call to call of a plan."""

    def decorate(make: Callable[[str], Callable[[BackendCall, Args], None]]) -> Any:
        add(name, sentence, killers, lambda op: KernelSeed(op, lambda inner: FaultyKernel(inner, lambda: make(op))))
        return make

    return decorate


def tensors_of(op: str, args: Args, *roles: Role) -> Iterator[tuple[Arg, torch.Tensor]]:
    """Yield the tensors of a call that have a role."""
    for arg in schema_of(op).args:
        if arg.role in roles and isinstance(args[arg.name], torch.Tensor):
            yield arg, args[arg.name]


def changed_by(op: str, run: BackendCall, args: Args) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Make a call, and yield the bits of each tensor that it changes, those from before, and the places that changed."""
    before = [(bits(tensor), bits(tensor).clone()) for _, tensor in tensors_of(op, args, Role.MUTATED)]
    run(args)
    for now, then in before:
        places = (now != then).nonzero()
        if len(places) and now.dim():
            yield now, then, places
