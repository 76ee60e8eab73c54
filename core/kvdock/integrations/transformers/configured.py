"""How the attention of a model gets keys and values, by its configuration alone: what `kvdock explain transformers` answers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from kvdock.cache.paged_config import PagedKVCacheConfig
from kvdock.errors import ArgumentValueError
from kvdock.integrations.transformers.cache import PagedCacheForTransformers
from kvdock.integrations.transformers.latent import rope_of

__all__ = ["explain_configured"]


def explain_configured(name: str, *, device: str, dtype: torch.dtype | None, block_size: int) -> dict[str, Any]:
    """Make a model from its configuration, with weights drawn at random, and a cache for it; return what the cache explains.

    Which attention a model has does not follow from its weights, so none are read. It takes the memory that the model takes.

    Args:
        name: a folder with a ``config.json``, such a file, or a model's name on the hub.
        device: torch's name of the device to try it on.
        dtype: of the model; None for that of its configuration.
        block_size: of the cache.

    Returns:
        ``attention`` and ``reason`` of the cache and of each of its ``layers``; the cache's sizes under ``cache``, of latents with
        ``rope_dim``.

    Raises:
        UnsupportedError: the cache is none for this model.
        ArgumentValueError: no such model, or none that generates; or it cannot be made on the device.
    """
    model = _made(name, device, dtype)
    cache = PagedCacheForTransformers.for_model(model, PagedKVCacheConfig(num_blocks=1, block_size=block_size))
    found = cache.explain()
    layers = [{"layer": index, "attention": "gather" if why else "pages", "reason": why} for index, why in enumerate(found.layers)]
    pool = cache.state.pool
    _, _, heads, head_dim = pool.k_cache(0).shape
    sizes = {"heads": heads, "head_dim": head_dim, "block_size": block_size}
    rope = rope_of(pool, 0)
    return {
        "model": name,
        "architecture": type(model).__name__,
        "transformers": transformers.__version__,
        "attention": found.attention,
        "reason": found.reason,
        "layers": layers,
        "cache": {"dtype": str(pool.dtype), **sizes, **({"rope_dim": rope} if rope else {})},
    }


def _made(name: str, device: str, dtype: torch.dtype | None) -> Any:
    """Return a model of a configuration; the process's random numbers stay as they are."""
    try:
        config = AutoConfig.from_pretrained(name)
        auto: Any = AutoModelForCausalLM  # which is not annotated
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = auto.from_config(config, dtype=dtype or config.dtype or torch.float32)
        return model.eval().to(device)
    except (OSError, ValueError, KeyError, RuntimeError, AssertionError) as error:  # what both libraries raise for what they are given
        told = next(iter(str(error).splitlines()), type(error).__name__)
        raise ArgumentValueError(
            "MODEL",
            expected=f"a folder with a config.json, such a file, or a name on the hub, of a causal model that fits on {device}",
            got=f"{name!r} ({told})",
        ) from error
