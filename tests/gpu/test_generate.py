"""Transformers on the GPU: a random-weight model generates the same tokens on the paged cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvdock import PagedKVCacheConfig

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize(("attention", "dtype"), [("gather", torch.bfloat16), ("pages", torch.float32)])
def test_identical_to_dynamic_cache(options: dict[str, Any], attention: str, dtype: torch.dtype) -> None:
    """Pages round otherwise, so that of half-size floats two tokens that are as good may change places."""
    from kvdock.integrations.transformers import PagedCacheForTransformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    model = transformers.LlamaForCausalLM(config).to("cuda", dtype).eval()
    ids = torch.randint(3, 128, (3, 17), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, :2] = 0
    cache = PagedCacheForTransformers.for_model(model, PagedKVCacheConfig(num_blocks=128, block_size=16), attention=attention)
    settings = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **options}
    ours = model.generate(**cache.bind(input_ids=ids, **settings))
    theirs = model.generate(ids, **settings)
    assert torch.equal(ours, theirs)
    assert cache.state.odd == ("" if attention == "pages" else "as chosen")
