"""What differs between the versions of Transformers, asked of the code itself where that is possible.

| what | between |
|---|---|
| a layer's `get_max_length` exists | 5.12 and 5.14 |
| `crop(max_length)` became `crop(-tokens_to_remove)` | 5.14 and 5.16 |
| models with latent attention hand over the latent instead of every head's keys and values | 5.14 and 5.16 |
| layers that share another's keys and values are `DummyLayer`, no longer left out | 5.18 and 5.23 |
| ``past_key_values=`` became ``cache=`` | 5.23 and 5.24 |
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from transformers import GenerationMixin, cache_utils

from kvdock.errors import UnsupportedError

__all__ = ["CACHE_KEYWORD", "CROPS_TO_LENGTH", "DUMMY_LAYER"]

if not hasattr(cache_utils.CacheLayerMixin, "get_max_length"):
    raise UnsupportedError(
        "kvdock.integrations.transformers",
        expected="transformers 5.14 or newer",
        got=f"transformers {transformers.__version__}",
        fix="pip install 'kvdock[transformers]'",
    )

_PREPARE = inspect.signature(GenerationMixin.prepare_inputs_for_generation)
CACHE_KEYWORD: str = "cache" if "cache" in _PREPARE.parameters else "past_key_values"
"""Argument of ``generate`` and ``forward`` that takes a cache."""

CROPS_TO_LENGTH: bool = "max_length" in inspect.signature(cache_utils.DynamicLayer.crop).parameters
"""Whether a positive argument of ``crop`` is the length to keep; newer versions refuse it."""

DUMMY_LAYER: Any = getattr(cache_utils, "DummyLayer", None)
"""What stands for a layer that stores nothing, where the version has one."""
