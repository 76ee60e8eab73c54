"""Calls that are traced, and calls on tensors without memory of their own: they become calls of `torch.ops.kvdock`.

Two ways lead here. Where torch.compile traces a call, or torch.fx records one, the head of an op's code (`kvdock.ops.calls`) says so.
All else that torch lets see calls of its ops, such as fake tensors, export, or a mode that counts, makes tensors or threads that no guard
accepts (`kvdock.ops.guards`), and is noticed where a call is looked into for the first time. When such a call is to run on memory in the
end, `_run` makes it a call like any other.
"""

from __future__ import annotations

import ast
import itertools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch.fx import _symbolic_trace

from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.ops.forms import NAMESPACE, Forms, kind_of
from kvdock.ops.modes import use_backend
from kvdock.ops.schema import OpSchema
from kvdock.ops.selection import Preparer
from kvdock.process import process_runtime

__all__ = ["RECORDING", "TracedForm", "as_constant", "form_of", "is_intercepted", "process_form_of", "traced"]


_AnyCallable = TypeVar("_AnyCallable", bound=Callable[..., Any])


RECORDING: Any = _symbolic_trace if hasattr(_symbolic_trace, "_is_fx_tracing_flag") else SimpleNamespace(_is_fx_tracing_flag=True)
"""Has the flag that torch.fx sets while it records calls, be it of ``make_fx``: the one such thing that guards do not notice."""


def as_constant(function: _AnyCallable) -> _AnyCallable:
    """Let torch.compile take what a function returns for a constant: `torch.compiler.assume_constant_result`, without its import.

    Its arguments are to be tensors, numbers and strings, as torch 2.11 asks; the object of a method may be any.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function


_KEYS = ("Python", "PreDispatch", "Tracer")
_INTERCEPTING = sum(torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key)).raw_repr() for key in _KEYS)
"""Keys with which torch hands a call to Python code or to a tracer, before it comes to a device."""


def is_intercepted(values: tuple[Any, ...]) -> bool:
    """Whether torch would let somebody see a call of one of its ops on these arguments: a mode that is on, or the class of a tensor."""
    keys = torch._C._dispatch_tls_local_include_set().raw_repr()
    for value in values:
        if isinstance(value, torch.Tensor):
            keys |= torch._C._dispatch_keys(value).raw_repr()
    return bool(keys & ~torch._C._dispatch_tls_local_exclude_set().raw_repr() & _INTERCEPTING)


TracedForm = tuple[str, str, int, tuple[str, ...]]
"""The names of a form, the number of its dispatcher, and for each argument whether it is anything but passed on."""


def traced(form_of: Callable[[tuple[str, ...]], TracedForm], values: tuple[Any, ...], named: str | None) -> Any:
    """Make a call one of `torch.ops.kvdock`, and return what it returns.

    torch.compile traces this. What it must not look into is done by functions whose result it takes for a constant.

    Args:
        form_of: gives the form for the kinds of arguments; a constant to torch.compile. See `form_of`.
        values: all arguments in the schema's order, None where absent.
        named: backend to use for good.
    """
    name, overload, dispatcher, roles = form_of(tuple([kind_of(value) for value in values]))
    given = [_as_literal(value) if role == "literal" else value for value, role in zip(values, roles, strict=True) if role != "made"]
    found = getattr(getattr(getattr(torch.ops, NAMESPACE), name), overload)(*given, backend=named, dispatcher=dispatcher)
    outputs = tuple([value for value, role in zip(values, roles, strict=True) if role == "output"])
    if outputs:
        return outputs if len(outputs) > 1 else outputs[0]
    return found


def form_of(schema: OpSchema, dispatcher: Preparer, kinds: tuple[str, ...]) -> TracedForm:
    """Return the form of an op for the kinds of its arguments."""
    form = _FORMS.of(schema, kinds)
    number = _numbers.setdefault(dispatcher, next(_counter))
    _dispatchers[number] = dispatcher
    return form.op, form.overload, number, form.roles


@as_constant
def process_form_of(op: str, kinds: tuple[str, ...]) -> TracedForm:
    """Return the form of an op of the process's runtime."""
    return process_runtime().dispatcher.op(op).form_of(kinds)


@as_constant
def _as_literal(value: Any) -> str:
    """Return a static value as source, for want of a type that torch has for it."""
    text = repr(value)
    try:
        is_same = ast.literal_eval(text) == value
    except (SyntaxError, ValueError):
        is_same = False
    if not is_same:
        raise ArgumentTypeError("a static argument of a traced call", expected="numbers, strings, and tuples of them", got=text[:120])
    return text


# Of dispatchers: graphs hold nothing but tensors, numbers and strings.
_numbers: weakref.WeakKeyDictionary[Preparer, int] = weakref.WeakKeyDictionary()
_dispatchers: weakref.WeakValueDictionary[int, Preparer] = weakref.WeakValueDictionary()
_counter = itertools.count(1)


def _run(schema: OpSchema, values: tuple[Any, ...], backend: str | None, number: int) -> Any:
    """Run a call of a form on memory: by the dispatcher that it was traced for, or the process's if that is gone or another process's."""
    dispatcher = _dispatchers.get(number) or process_runtime().dispatcher
    call = dispatcher.op(schema.name)
    try:
        if backend is None:
            return call(*values)
        with use_backend(backend):
            return call(*values)
    except ArgumentValueError as error:
        if error.fix is None or not error.fix.endswith(".clone()"):
            raise
        fix = "read it with kvdock.ops.gather_paged, or before the compiled function: torch.compile may drop a clone() (pytorch#198031)"
        raise ArgumentValueError(error.subject, expected=error.expected, got=error.got, fix=fix) from error


_FORMS = Forms(_run)
