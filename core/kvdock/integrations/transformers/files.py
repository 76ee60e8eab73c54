"""Prefixes of a Transformers cache in files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvdock.errors import ArgumentValueError
from kvdock.files import Loaded, Saved, save_pool, save_prefix
from kvdock.files.api import load_any
from kvdock.integrations.transformers.prompts import on_host, read_ids
from kvdock.integrations.transformers.reuse import PrefixReuse
from kvdock.integrations.transformers.state import PagedState
from kvdock.prefix.interface import Namespace

__all__ = ["load_prefixes", "save_prefixes"]

_SUBJECT = "PagedCacheForTransformers"


def save_prefixes(
    reuse: PrefixReuse, state: PagedState, path: str | os.PathLike[str], ids: Any, namespace: Namespace, options: Mapping[str, Any]
) -> Saved:
    """Save one prompt, or all prefixes; see `PagedCacheForTransformers.save`."""
    if ids is None and namespace:
        fix = "pass input_ids too, or leave namespace out: all are saved"
        raise ArgumentValueError(f"{_SUBJECT}.save: namespace", expected="none, without input_ids", got=repr(namespace)[:80], fix=fix)
    with state.change():
        if ids is None:
            return save_pool(path, reuse.manager, state.pool, beside=reuse.checkpoints, **options)
        return save_prefix(path, reuse.manager, state.pool, _one(ids), namespace, beside=reuse.checkpoints, **options)


def load_prefixes(reuse: PrefixReuse, state: PagedState, path: str | os.PathLike[str], options: Mapping[str, Any]) -> Loaded:
    """Load what was saved; see `PagedCacheForTransformers.load`."""
    with state.change():
        return load_any(path, reuse.manager, state.pool, beside=reuse.checkpoints, **options)


def _one(ids: Any) -> Any:
    """Return the token ids of one prompt."""
    subject = f"{_SUBJECT}.save: input_ids"
    found = read_ids(subject, np.atleast_2d(on_host(ids)))
    if len(found) != 1:
        raise ArgumentValueError(subject, expected="one prompt", got=f"{len(found)} rows", fix="save each row without its padding: ids[0]")
    return found[0]
