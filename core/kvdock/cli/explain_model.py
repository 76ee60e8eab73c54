"""``kvdock explain transformers MODEL``: how the attention of a model's paged cache gets keys and values, and why."""

from __future__ import annotations

from typing import Any

import torch

from kvdock.errors import UnsupportedError

__all__ = ["calls_of", "explain_model", "lines_of"]


def explain_model(name: str, *, device: str, dtype: torch.dtype | None, block_size: int) -> dict[str, Any]:
    """Return what the cache of a model explains, see `kvdock.integrations.transformers.configured.explain_configured`.

    Raises:
        UnsupportedError: Transformers is missing or too old, or the cache is none for this model.
        ArgumentValueError: no such model, or none that generates; or it cannot be made on the device.
    """
    try:
        from kvdock.integrations.transformers.configured import explain_configured
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "transformers":
            raise
        expected, fix = "transformers to be installed", "pip install 'kvdock[transformers]'"
        raise UnsupportedError("MODEL", expected=expected, got=str(error), fix=fix) from error
    return explain_configured(name, device=device, dtype=dtype, block_size=block_size)


def calls_of(found: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the ops that read the cache of a model that was explained, and its dtype and sizes: what `explain` takes."""
    readers = {"pages": "paged_attention", "gather": "mla_gather" if "rope_dim" in found["cache"] else "gather_paged"}
    ops = dict.fromkeys(readers[layer["attention"]] for layer in found["layers"])
    sizes = {size: number for size, number in found["cache"].items() if size != "dtype"}
    return list(ops), {"dtype": found["cache"]["dtype"], "sizes": sizes}


def lines_of(found: dict[str, Any]) -> list[str]:
    """Return what people are told of a model."""
    how = "gathers keys and values" if found["reason"] else "reads pages"
    lines = [f"{found['architecture']} with transformers {found['transformers']}: attention {how}"]
    if found["reason"]:
        return [*lines, f"why: {found['reason']}"]
    reasons: dict[str, list[int]] = {}
    for layer in found["layers"]:
        if layer["reason"]:
            reasons.setdefault(layer["reason"], []).append(layer["layer"])
    return lines + [f"but layers {', '.join(map(str, layers))} gather: {reason}" for reason, layers in reasons.items()]
