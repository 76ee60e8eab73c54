"""The ops as torch knows them: `torch.ops.kvdock.*`, written from their schemas when the first call of their kind is traced.

torch wants one type for each argument, where an `OpSchema` allows several: a length is an int or a tensor, outputs are there or are made,
and a static value may be of any type. So an op of kvdock's is several of torch's, its forms, one for each combination that was met::

    static_update_.tensor    (Tensor(a0!) k_cache, Tensor(a1!) v_cache, Tensor k, Tensor v, Tensor cache_lengths, *, ...) -> ()
    static_update_.len       (..., SymInt cache_lengths, *, ...) -> ()
    gather_paged.default     (Tensor k_cache, Tensor v_cache, Tensor slot_mapping, Tensor? k_scale, ..., *, ...) -> (Tensor, Tensor)
    gather_paged.out         (..., Tensor(a5!) k_out, Tensor(a6!) v_out, *, ...) -> ()

All end in ``str? backend, int dispatcher``: the backend to use for good, and whose ops they are. No form returns what it was given.

A form is for every device type, since what runs it is kvdock's dispatcher. It records no gradients, as the op does not. Its fake is what
the schema says: `kvdock.ops.validate.check_traced`, and new outputs.
"""

from __future__ import annotations

import ast
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from kvdock.errors import ArgumentTypeError
from kvdock.ops.schema import Arg, OpSchema, Role
from kvdock.ops.signatures import new_outputs
from kvdock.ops.validate import check_traced

__all__ = ["NAMESPACE", "Form", "Forms", "kind_of"]

NAMESPACE = "kvdock"
"""Of the ops in `torch.ops`."""

_TYPES = {"bool": "bool", "int": "int", "float": "float", "str": "str", "none": "str?", "literal": "str"}
"""What torch calls a static value, by its kind."""

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)  # rows stay dense, and no copy is made for the rest


def kind_of(value: Any) -> str:
    """Return what tells forms apart about an argument. torch.compile traces it, so it is written without look-ups."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, (int, torch.SymInt)):
        return "int"
    if isinstance(value, (float, torch.SymFloat)):
        return "float"
    return "str" if isinstance(value, str) else "literal"


class Form:
    """One of torch's ops for one of kvdock's.

    Args:
        schema: the op.
        op: name of the op in `NAMESPACE`.
        kinds: kind of each argument, as `kind_of` says.

    Attributes:
        makes_outputs: whether it returns new outputs.
        roles: what becomes of each argument: "made" is none of the form's, "output" is written and returned, "literal" goes as source.
    """

    def __init__(self, schema: OpSchema, op: str, kinds: tuple[str, ...]) -> None:
        self.schema, self.op = schema, op
        pairs = [*zip(schema.args, kinds, strict=True)]
        self.makes_outputs = {kind for arg, kind in pairs if arg.returned} == {"none"}
        made = "made" if self.makes_outputs else "output"
        self.roles = tuple([made if arg.returned else kind if kind == "literal" else "given" for arg, kind in pairs])
        self._given = [pair for pair, role in zip(pairs, self.roles, strict=True) if role != "made"]

    @property
    def overload(self) -> str:
        """Its name among the forms of the op."""
        lengths = {"tensor": "tensor", "int": "len"}
        named = [lengths[kind] for arg, kind in self._given if arg.role is Role.RUNTIME_INT and arg.dims]
        named += [kind for arg, kind in self._given if arg.role is Role.STATIC]
        named += ["out"] if any(arg.returned for arg, _ in self._given) else []
        named += [arg.name for arg, kind in self._given if _may_be_written(arg, kind) and arg.optional and not arg.returned]
        return "_".join(named) or "default"

    @property
    def name(self) -> str:
        """Its full name, as torch registers it."""
        return self.op if self.overload == "default" else f"{self.op}.{self.overload}"

    @property
    def text(self) -> str:
        """Its signature, as torch writes it."""
        params = [f"{self._type(place, arg, kind)} {arg.name}" for place, (arg, kind) in enumerate(self._given)]
        results = ", ".join("Tensor" for arg in self.schema.args if arg.returned) if self.makes_outputs else ""
        return f"{self.name}({', '.join(params)}, *, str? backend, int dispatcher) -> ({results})"

    def _type(self, place: int, arg: Arg, kind: str) -> str:
        if arg.role is Role.STATIC:
            return _TYPES[kind]
        if arg.role is Role.RUNTIME_INT and kind != "tensor":
            return "SymInt"
        return (f"Tensor(a{place}!)" if _may_be_written(arg, kind) else "Tensor") + "?" * arg.optional

    def values(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return all arguments in the schema's order, given those of the form."""
        rest = iter(given)
        values = [None if role == "made" else next(rest) for role in self.roles]
        return tuple([ast.literal_eval(str(value)) if role == "literal" else value for value, role in zip(values, self.roles, strict=True)])

    def fake(self, *given: Any, backend: str | None, dispatcher: int) -> Any:
        """Check a call on tensors without memory, and return new outputs."""
        values = self.values(given)
        check_traced(self.schema, values)
        made = new_outputs(self.schema, values) if self.makes_outputs else [None]
        return made[0] if len(made) == 1 else tuple(made)

    def register(self, library: Any, run: Callable[..., Any]) -> None:
        """Make it known to torch. What runs it is described at `Forms`."""

        def on_memory(*given: Any, backend: str | None, dispatcher: int) -> Any:
            found = run(self.schema, self.values(given), backend, dispatcher)
            return found if self.makes_outputs else None

        library.define(self.text, tags=_TAGS)
        library.impl(self.name, on_memory, "CompositeExplicitAutograd")
        library.impl(self.name, torch.library.fallthrough_kernel, "Autograd")  # what runs leaves gradients alone, as eager calls do
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", self.fake, lib=library)


def _may_be_written(arg: Arg, kind: str) -> bool:
    """Whether a form writes an argument. What is absent is not said to be written: torch 2.11 compiles no op that writes only such."""
    return arg.role is Role.MUTATED and kind != "none"


def _check_kind(schema: OpSchema, arg: Arg, kind: str) -> None:
    if arg.role is Role.STATIC:
        allowed, expected = {*_TYPES}, "a value that is no tensor"
    elif arg.role is Role.RUNTIME_INT:
        allowed, expected = {"int", *["tensor"] * bool(arg.dims)}, "an int or a torch.Tensor" if arg.dims else "an int"
    else:
        allowed, expected = {"tensor", *["none"] * (arg.optional or arg.returned)}, "a torch.Tensor"
    if kind not in allowed:
        raise ArgumentTypeError(f"{schema.name}: {arg.name}", expected=expected, got=kind, fix="pass what the op's description says")


class Forms:
    """The forms that there are: each is registered once in a process, whichever thread needs it first.

    Args:
        run: runs a call on memory, given the schema, all arguments, the backend to use for good, and the number of a dispatcher.
    """

    def __init__(self, run: Callable[[OpSchema, tuple[Any, ...], str | None, int], Any]) -> None:
        self._run, self._lock = run, threading.Lock()
        self._schemas: dict[str, list[OpSchema]] = {}
        self._known: set[str] = set()

    @functools.cached_property
    def _library(self) -> Any:
        return torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call] # torch does not annotate it

    def of(self, schema: OpSchema, kinds: tuple[str, ...]) -> Form:
        """Return the form for arguments of some kinds.

        Raises:
            ArgumentTypeError: an argument is of a kind that the schema does not have there.
        """
        for arg, kind in zip(schema.args, kinds, strict=True):
            _check_kind(schema, arg, kind)
        with self._lock:
            form = Form(schema, self._name(schema), kinds)
            if form.name not in self._known:
                form.register(self._library, self._run)
                self._known.add(form.name)
            return form

    def _name(self, schema: OpSchema) -> str:
        """Return the name for an op. Another of the same name, as of a plugin that was changed and loaded again, has a number."""
        same = self._schemas.setdefault(schema.name, [])
        if schema not in same:
            same.append(schema)
        number = same.index(schema)
        return f"{schema.name}_{number + 1}" if number else schema.name
