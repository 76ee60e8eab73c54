"""Putting the hooks on a model, and taking them off again."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from kvdock.integrations.transformers.hook import finish_pass, prepare_pass
from kvdock.integrations.transformers.plain import hooks_of

__all__ = ["HookWatch"]

_USERS: weakref.WeakKeyDictionary[torch.nn.Module, list[weakref.ref[object]]] = weakref.WeakKeyDictionary()


class HookWatch:
    """The hooks on a model, which leave it when the last pool with a cache for it goes.

    Args:
        model: what runs, see `what_runs`.
        pool: what all copies of a cache share.
    """

    def __init__(self, model: torch.nn.Module, pool: object) -> None:
        self._model = weakref.ref(model)
        # One hook serves all caches of a model: it finds the cache in the arguments of the call.
        if prepare_pass not in model._forward_pre_hooks.values():
            model.register_forward_pre_hook(prepare_pass, with_kwargs=True)
            model.register_forward_hook(finish_pass, with_kwargs=True, always_call=True)
        _USERS.setdefault(model, []).append(weakref.ref(pool))
        # By the pool and not by the cache: copies of a cache share it, and need the hook as long as any of them lives.
        weakref.finalize(pool, _leave, self._model).atexit = False

    @property
    def hooks(self) -> int:
        """What runs before and behind the parts of the model."""
        model = self._model()
        return hooks_of(model) if model is not None else 0


def _leave(watched: weakref.ref[torch.nn.Module]) -> None:
    """Take the hook off a model that no cache is left for."""
    model = watched()
    if model is None:
        return
    _USERS[model] = [pool for pool in _USERS.get(model, []) if pool() is not None]
    if not _USERS[model]:
        _remove(prepare_pass, model._forward_pre_hooks, model._forward_pre_hooks_with_kwargs)
        _remove(finish_pass, model._forward_hooks, model._forward_hooks_with_kwargs, model._forward_hooks_always_called)


def _remove(function: object, hooks: dict[int, Any], *settings: dict[int, bool]) -> None:
    for key in [key for key, hook in hooks.items() if hook is function]:
        for each in (hooks, *settings):
            each.pop(key, None)
