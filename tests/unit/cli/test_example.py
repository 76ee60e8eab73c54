"""What `kvdock explain` asks about."""

from __future__ import annotations

import torch

from kvdock.cli.explain import example
from kvdock.ops.catalog import CATALOG

SIZES = {"device": torch.device("cpu"), "dtype": torch.float16, "heads": 1, "head_dim": 576, "block_size": 16}


def told(op: str, **more: int) -> dict[str, torch.Tensor]:
    """Return the tensors of an example, by name."""
    made = zip((arg.name for arg in CATALOG[op].args), example(op, **SIZES, **more), strict=True)
    return {name: value for name, value in made if isinstance(value, torch.Tensor)}


def test_attention_to_latents_has_values_in_its_keys() -> None:
    latents = told("paged_attention", rope_dim=64)
    assert latents["q"].shape[-1] == latents["k_cache"].shape[-1] == 576
    assert latents["v_cache"].shape == (2, 16, 1, 512)
    assert latents["v_cache"].data_ptr() == latents["k_cache"].data_ptr()
    heads = told("paged_attention")
    assert heads["v_cache"].shape == heads["k_cache"].shape == (2, 16, 1, 576)
    assert heads["v_cache"].data_ptr() != heads["k_cache"].data_ptr()


def test_ops_on_latents_have_rows_of_both_parts() -> None:
    written = told("mla_caching_", rope_dim=64)
    assert {name: written[name].shape[-1] for name in ("kv_cache", "kv_c", "k_pe")} == {"kv_cache": 576, "kv_c": 512, "k_pe": 64}
