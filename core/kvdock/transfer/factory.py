"""Making a transport by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvdock.errors import ArgumentTypeError, ArgumentValueError, KVDockError, PluginError
from kvdock.process import process_runtime
from kvdock.transfer.built_in import torch_distributed
from kvdock.transfer.interface import Transport

__all__ = ["create_transport"]

_BUILT_IN = "torch.distributed"
_REPORT = "report it to the plugin's author"


def create_transport(name: str = _BUILT_IN, **options: Any) -> Transport:
    """Make a transport.

    Args:
        name: ``"torch.distributed"``, or what a plugin's ``kvdock_transports`` calls it. Plugins are found only when it is not the first.
        options: what its class takes.

    Raises:
        ArgumentTypeError: a name that is no str, an option that the class does not take.
        ArgumentValueError: nobody brings it; or several plugins do.
        PluginError: a plugin's class lacks methods of the contract, or made something that is no `Transport`.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError("create_transport: name", expected="a str", got=repr(name)[:80], fix=f"pass {_BUILT_IN!r}, or a plugin's")
    factory = torch_distributed() if name == _BUILT_IN else _of_plugin(name)
    if missing := getattr(factory, "__abstractmethods__", None):
        fix = "implement kvdock.transfer.Transport of the installed version"
        raise PluginError(f"transport {name!r}", expected="every method of Transport", got=f"a class without {sorted(missing)}", fix=fix)
    try:
        made = factory(**options)
    except (KVDockError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a plugin may raise anything
        if isinstance(error, TypeError) and options:
            fix = f"pass what {getattr(factory, '__name__', 'its class')} takes"
            raise ArgumentTypeError(
                f"create_transport: {name!r}", expected="options that its class takes", got=str(error), fix=fix
            ) from error
        got = f"{type(error).__name__}: {error}"
        raise PluginError(f"transport {name!r}", expected="a Transport", got=got, fix=_REPORT) from error
    if not isinstance(made, Transport) or not isinstance(getattr(made, "name", None), str):
        raise PluginError(f"transport {name!r}", expected="a Transport with a name", got=repr(made)[:80], fix=_REPORT)
    return made


def _of_plugin(name: str) -> Callable[..., object]:
    found = process_runtime().registry.transports()
    owners = sorted(plugin for plugin, brought in found.items() if name in brought)
    if len(owners) > 1:
        fix, got = "deny all but one with KVDOCK_BACKENDS_DENY", f"{name!r} from {', '.join(owners)}"
        raise ArgumentValueError("create_transport: name", expected="one plugin that brings it", got=got, fix=fix)
    if not owners:
        known = sorted({_BUILT_IN, *(key for brought in found.values() for key in brought)})
        fix = "install the plugin that brings it; `kvdock backends` says what became of those that are installed"
        raise ArgumentValueError("create_transport: name", expected=f"one of {', '.join(known)}", got=repr(name), fix=fix)
    factory: Callable[..., object] = found[owners[0]][name]
    return factory
