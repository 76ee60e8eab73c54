"""Up to which length the keys of a model depend on token ids and positions only.

Two kinds of rotary embeddings turn all keys of a pass by its length: ``longrope`` from a length on, ``dynamic`` more and more.
Keys that such a pass computed are not those that a shorter prompt, or a longer one, would compute for the same tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["steady_length"]


def steady_length(model: Any) -> int:
    """Return the length up to which a pass over the same tokens gives the same keys; for most models `sys.maxsize`.

    Args:
        model: a ``PreTrainedModel``.
    """
    return min((length for module in model.modules() for length in _lengths(module)), default=sys.maxsize)


def _lengths(module: Any) -> Iterator[int]:
    """Yield such lengths of a module with rotary embeddings; of others nothing."""
    kinds = getattr(module, "rope_type", None)
    for name, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
        if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind):
            parameters = getattr(module.config, "rope_parameters", None) or {}
            original = (parameters.get(name) or parameters).get("original_max_position_embeddings") if kind == "longrope" else None
            yield (original or module.original_max_seq_len) - 1  # exactly at that length some go on with what the last call left
