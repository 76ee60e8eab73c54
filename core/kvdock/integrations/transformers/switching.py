"""Which attention a model has: that of its configuration, but during passes that read pages, when it is kvdock's.

A configuration is changed for the length of a pass. Until then, and from then on, the model is as it was: whoever copies, saves or
runs it without a paged cache sees nothing of kvdock. Another thread may run the model meanwhile, without a paged cache or with
one of its own: names tell which attention a model had before, and that is what serves whatever does not read pages.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvdock.errors import UnsupportedError

__all__ = ["configs_of", "former_attention", "former_mask", "former_of", "register", "restore", "switch"]

_NAME = "kvdock_pages_{}"  # without the former name, in which some models look for "flash"

_ATTRIBUTE = "_attn_implementation_internal"

_FORMER: dict[str, str] = {}
"""By name what a configuration said before."""

_FUNCTIONS: list[Callable[..., Any]] = []
"""kvdock's attention and mask function, see `register`."""

_LOCK = threading.Lock()
_PASSES: dict[int, int] = {}
"""Passes that are under way with a configuration, by its id."""


def register(attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Say which functions serve passes that read pages."""
    _FUNCTIONS[:] = attention, mask


def configs_of(model: Any) -> list[Any]:
    """Return the configurations of a model's parts that name an attention."""
    found = {id(config): config for part in model.modules() if isinstance(former_of(config := getattr(part, "config", None)), str)}
    return list(found.values())


def former_of(config: Any) -> Any:
    """Return the attention that a configuration names, or named before it was switched."""
    try:
        # Past Transformers' own way to an attribute, which looks for another name of it first: this is asked several times a pass.
        name = object.__getattribute__(config, _ATTRIBUTE)
    except AttributeError:
        name = getattr(config, "_attn_implementation", None)
    return _FORMER.get(name, name) if isinstance(name, str) else name


def switch(configs: Iterable[Any]) -> None:
    """Let configurations name kvdock's attention, until `restore` was called as often."""
    with _LOCK:
        for config in configs:
            _PASSES[id(config)] = _PASSES.get(id(config), 0) + 1
            object.__setattr__(config, _ATTRIBUTE, _name_for(former_of(config)))


def restore(configs: Iterable[Any]) -> None:
    """Let configurations name what they did, once nobody needs them otherwise."""
    with _LOCK:
        for config in configs:
            _PASSES[id(config)] -= 1
            if not _PASSES[id(config)]:
                del _PASSES[id(config)]
                object.__setattr__(config, _ATTRIBUTE, former_of(config))


def _name_for(former: str) -> str:
    """Return the name of kvdock's attention where another one was before."""
    for name, known in _FORMER.items():
        if known == former:
            return name
    name = _NAME.format(len(_FORMER))
    attention, mask = _FUNCTIONS
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    _FORMER[name] = former
    return name


def former_attention(module: Any) -> Callable[..., Any]:
    """Return the attention function that a module would call if its configuration were not switched.

    Raises:
        UnsupportedError: it is not known: that of ``eager`` is its model's own.
    """
    name = former_of(getattr(module, "config", None))
    beside = [vars(sys.modules[kind.__module__]) for kind in type(module).__mro__ if kind.__module__ in sys.modules]
    eager = next((names["eager_attention_forward"] for names in beside if "eager_attention_forward" in names), None)
    # Some models keep an interface of their own, with a function of their own under a common name.
    interface = next((names["ALL_ATTENTION_FUNCTIONS"] for names in beside if "ALL_ATTENTION_FUNCTIONS" in names), ALL_ATTENTION_FUNCTIONS)
    found = interface.get(name, eager)
    if not callable(found):
        raise UnsupportedError(
            f"PagedCacheForTransformers: attention of {type(module).__name__}",
            expected="an attention function that can be found",
            got=f"{name!r}, with no eager_attention_forward beside the module's class",
            fix="make the cache with attention='gather'",
        )
    function: Callable[..., Any] = found
    return function


def former_mask(config: Any) -> Callable[..., Any]:
    """Return the function that would make the masks of a configuration if it were not switched."""
    function: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS[former_of(config)]
    return function
