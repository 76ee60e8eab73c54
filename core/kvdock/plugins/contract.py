"""Whether a plugin keeps to the contract: version, hooks, and what the hooks return. Every refusal says expected and got.

The version comes first, because nothing else about a plugin made for another contract can be judged. Hooks are verified
by pluggy in a manager that is thrown away: pluggy 1.6 leaves a plugin with a bad hook half registered.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pluggy
import torch

from kvdock.errors import PluginError
from kvdock.interface import KVDOCK_API, Backend, Capabilities, Kernel, Priority, Probe, ProbeState
from kvdock.ops.catalog import Op
from kvdock.plugins import hookspecs

__all__ = [
    "RESERVED",
    "BrokenContractError",
    "Hooks",
    "check_api",
    "check_backends",
    "check_capabilities",
    "check_classes",
    "check_kernels",
    "check_ops",
    "check_probe",
    "find_hooks",
    "unknown_op",
]

RESERVED = "portable"
"""What `use_backend` takes for kvdock's own kernels: no backend may have this name."""

Hooks = Mapping[str, Sequence[Callable[[], Any]]]
"""Implementations by name of the hook."""

_SPECS = tuple(name for name in hookspecs.__all__ if name.startswith("kvdock_"))
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DEVICE_TYPE = re.compile(r"[a-z][a-z0-9_]*")


class BrokenContractError(PluginError):
    """A plugin does not keep to the contract; becomes the reason of an INCOMPATIBLE record."""


def check_api(plugin: object) -> tuple[int, int]:
    """Compare the version that a plugin was made for with ours, and return it.

    Raises:
        BrokenContractError: missing, not two integers, another major version, or newer than ours.
    """
    made_for = getattr(plugin, "KVDOCK_API", None)
    if made_for is None:
        # A plugin that is an object has the constant in the module of its class.
        module = sys.modules.get(getattr(plugin, "__module__", None) or "")
        made_for = getattr(module, "KVDOCK_API", None)
    known = _is_version(made_for)
    if made_for is not None and known and made_for[0] == KVDOCK_API[0] and made_for[1] <= KVDOCK_API[1]:
        version: tuple[int, int] = made_for
        return version
    major, minor = KVDOCK_API
    raise BrokenContractError(
        "KVDOCK_API",
        expected=f"({major}, 0){f' to ({major}, {minor})' if minor else ''}, as a module constant beside the hook",
        got="nothing" if made_for is None else repr(made_for),
        fix="install versions of kvdock and of the plugin that fit each other" if known else "add it to the module",
    )


def _is_version(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(type(part) is int for part in value)


def find_hooks(plugin: object, name: str) -> Hooks:
    """Return the hooks that a plugin implements, verified.

    Raises:
        BrokenContractError: wrong arguments, an unknown name, or no hook at all.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name)
    except pluggy.PluginValidationError as error:
        got = "; ".join(str(error).splitlines()[1:]).removeprefix("hookimpl definition: ")
        raise BrokenContractError("hook", expected=_signatures(), got=got) from error
    callers = manager.get_hookcallers(plugin) or []
    _refuse_unknown(manager, callers)
    hooks = {caller.name: [impl.function for impl in caller.get_hookimpls()] for caller in callers if caller.name in _SPECS}
    if not hooks:
        raise BrokenContractError("hooks", expected=f"at least one of {_signatures()}", got="none", fix=_unmarked(plugin))
    return hooks


def _signatures() -> str:
    """Return how the hooks are declared: ``kvdock_backends(), kvdock_prefix_caches()``."""
    signatures = {name: inspect.signature(getattr(hookspecs, name)) for name in _SPECS}
    return ", ".join(f"{name}{signature.replace(return_annotation=inspect.Signature.empty)}" for name, signature in signatures.items())


def _refuse_unknown(manager: pluggy.PluginManager, callers: Sequence[pluggy.HookCaller]) -> None:
    """Refuse a hook that kvdock does not have, which would never be called."""
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        unknown = [caller.name for caller in callers if not caller.has_spec()]
        close = difflib.get_close_matches(unknown[0], _SPECS, n=1, cutoff=0.8)
        fix = f"rename it to {close[0]}" if close else "remove it, or mark it @hookimpl(optionalhook=True)"
        raise BrokenContractError("hook", expected=_signatures(), got=", ".join(unknown), fix=fix) from error


def _unmarked(plugin: object) -> str:
    """Guess why a plugin has no hook."""
    forgotten = [name for name in _SPECS if callable(getattr(plugin, name, None))]
    if not forgotten:
        return "define it in the module that the entry point names"
    return f"mark {', '.join(forgotten)} with @kvdock.plugin.hookimpl"


def _check_kind(value: object, kind: type[Any], where: str) -> None:
    if not isinstance(value, kind):
        raise BrokenContractError(where, expected=f"a {kind.__name__}", got=_show(value))


def check_backends(value: object) -> list[Backend]:
    """Return what `kvdock_backends` returned, verified to be backends with well-formed names.

    Raises:
        BrokenContractError: not a list or tuple, an item that is no `Backend`, a bad name or device type.
    """
    where = "kvdock_backends()"
    if not isinstance(value, list | tuple):
        raise BrokenContractError(where, expected="a list of Backend objects", got=_show(value))
    backends: list[Backend] = list(value)
    for index, backend in enumerate(backends):
        _check_kind(backend, Backend, f"{where}[{index}]")
        kind = type(backend).__name__
        _check_text(getattr(backend, "name", None), _NAME, f"{kind}.name", "letters, digits, '.', '_' and '-'")
        if backend.name == RESERVED:
            raise BrokenContractError(
                f"{kind}.name", expected=f"another name than {RESERVED!r}, which means kvdock's own kernels", got=repr(RESERVED)
            )
        _check_text(getattr(backend, "device_type", None), _DEVICE_TYPE, f"{kind}.device_type", "lower-case letters, digits and '_'")
    return backends


def _check_text(value: object, pattern: re.Pattern[str], where: str, expected: str) -> None:
    """Refuse a name that could not be asked for, or that would make no environment variable."""
    if not (isinstance(value, str) and pattern.fullmatch(value)):
        raise BrokenContractError(where, expected=f"a str of {expected}", got=_show(value))


def check_kernels(value: object, name: str) -> dict[str, Kernel]:
    """Return what `Backend.kernels` returned, verified to be kernels by op name.

    Raises:
        BrokenContractError: not a mapping, a key that is no str, or a value that is no `Kernel`.
    """
    where = f"kernels() of backend {name!r}"
    if not isinstance(value, Mapping):
        raise BrokenContractError(where, expected="a mapping of op name to Kernel", got=_show(value))
    for op, kernel in value.items():
        if not isinstance(op, str):
            raise BrokenContractError(where, expected="op names (str) as keys", got=_show(op))
        _check_kind(kernel, Kernel, f"{where}[{op!r}]")
    return dict(value)


def check_ops(value: object) -> dict[str, Op]:
    """Return what `kvdock_ops` returned, by name, verified to be ops.

    Raises:
        BrokenContractError: not a list or tuple, an item that is no `Op`, or two of one name.
    """
    where = "kvdock_ops()"
    if not isinstance(value, list | tuple):
        raise BrokenContractError(where, expected="a list of Op objects", got=_show(value))
    ops: dict[str, Op] = {}
    for index, op in enumerate(value):
        _check_kind(op, Op, f"{where}[{index}]")
        if op.schema.name in ops:
            raise BrokenContractError(where, expected="ops of different names", got=f"two of {op.schema.name!r}")
        ops[op.schema.name] = op
    return ops


def unknown_op(op: str, ops: Collection[str]) -> str:
    """Say that a kernel is for an op that there is not, and which was probably meant."""
    close = difflib.get_close_matches(op, ops, n=1)
    fix = f"rename it to {close[0]!r}" if close else f"name one of {', '.join(sorted(ops))}; or bring the op"
    return f"kernels() has one for {op!r}, which is no op of this kvdock: it is never called. Fix: {fix}"


def check_classes(value: object, hook: str) -> dict[str, Any]:
    """Return what a hook returned, verified to be classes by name.

    Raises:
        BrokenContractError: not a mapping of str to something that can be called.
    """
    where = f"{hook}()"
    if not isinstance(value, Mapping):
        raise BrokenContractError(where, expected="a mapping of name to class", got=_show(value))
    for name, factory in value.items():
        if not (isinstance(name, str) and callable(factory)):
            raise BrokenContractError(where, expected="a mapping of name to class", got=f"{_show(name)}: {_show(factory)}")
    return dict(value)


def check_capabilities(value: Any, name: str) -> Capabilities:
    """Return what `Backend.capabilities` returned, verified with its parts. Raises BrokenContractError."""
    where = f"capabilities() of backend {name!r}"
    _check_kind(value, Capabilities, where)
    for part, kind in (("priority", Priority), ("graph_capture", bool), ("batch_invariant", bool)):
        _check_kind(getattr(value, part), kind, f"{where}: {part}")
    dtypes = value.dtypes
    if dtypes is not None and not (isinstance(dtypes, list | tuple) and all(isinstance(dtype, torch.dtype) for dtype in dtypes)):
        raise BrokenContractError(f"{where}: dtypes", expected="a tuple of torch.dtype, or None", got=_show(dtypes))
    able: Capabilities = value
    return able


def check_probe(value: Any, name: str) -> Probe:
    """Return what `Backend.probe` returned, verified with its parts. Raises BrokenContractError."""
    where = f"probe() of backend {name!r}"
    _check_kind(value, Probe, where)
    _check_kind(value.state, ProbeState, f"{where}: state")
    _check_kind(value.reason, str, f"{where}: reason")
    probe: Probe = value
    return probe


def _show(value: object) -> str:
    """Name a value and its type, without its whole content."""
    if inspect.isclass(value):
        return f"the class {value.__name__} (not an object of it)"
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
