"""Transformers on the GPU: a random-weight model generates the same tokens on the paged cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvdock import PagedKVCacheConfig

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

SHAPE = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama(dtype: torch.dtype, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, num_hidden_layers=3, **changes)
    return transformers.LlamaForCausalLM(config).to("cuda", dtype).eval()


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize(("attention", "dtype"), [("gather", torch.bfloat16), ("pages", torch.float32)])
def test_identical_to_dynamic_cache(options: dict[str, Any], attention: str, dtype: torch.dtype) -> None:
    """Pages round otherwise, so that of half-size floats two tokens that are as good may change places."""
    from kvdock.integrations.transformers import PagedCacheForTransformers

    model = llama(dtype)
    ids = torch.randint(3, 128, (3, 17), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, :2] = 0
    cache = PagedCacheForTransformers.for_model(model, PagedKVCacheConfig(num_blocks=128, block_size=16), attention=attention)
    settings = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **options}
    ours = model.generate(**cache.bind(input_ids=ids, **settings))
    theirs = model.generate(ids, **settings)
    assert torch.equal(ours, theirs)
    assert cache.state.odd == ("" if attention == "pages" else "as chosen")


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_captured_steps_give_the_tokens_that_no_cache_gives(options: dict[str, Any], compiled: bool) -> None:
    from kvdock.integrations.transformers import PagedCacheForTransformers
    from kvdock.integrations.transformers.compat import CACHE_KEYWORD

    if compiled and CACHE_KEYWORD != "cache":
        pytest.skip("Transformers before 5.24 cannot hand over a layer to a compiled graph")
    model = llama(torch.float32)
    cache = PagedCacheForTransformers.for_model(model, PagedKVCacheConfig(num_blocks=128, block_size=16))
    captured = cache.capture(batch_sizes=(1, 4, 12), max_length=64, compiled=compiled)
    assert captured.is_captured
    for pads in ((5, 2, 0), (0, 0), (3,)):
        ids = torch.randint(3, 128, (len(pads), 17), device="cuda")
        mask = (torch.arange(17) >= torch.tensor(pads)[:, None]).long().cuda()
        settings = {"attention_mask": mask, "max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **options}
        ours = model.generate(**cache.bind(input_ids=ids, **settings))
        assert captured.odd == ""
        assert torch.equal(ours, model.generate(ids, use_cache=False, **settings))
        cache.reset()
    cache.state.manager.check_integrity()


def test_what_a_graph_cannot_do_is_computed_without() -> None:
    from kvdock.integrations.transformers import PagedCacheForTransformers

    model = llama(torch.float32)
    cache = PagedCacheForTransformers.for_model(model, PagedKVCacheConfig(num_blocks=128, block_size=16))
    captured = cache.capture(batch_sizes=(1, 2), max_length=40)
    ids = torch.randint(3, 128, (3, 30), device="cuda")
    for rows, new, why in ((3, 5, "more than 2 rows"), (1, 20, "or 40 tokens in one"), (2, 6, "")):
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        ours = model.generate(**cache.bind(input_ids=ids[:rows], **settings))
        assert why in captured.odd
        assert bool(why) == bool(captured.odd)
        assert torch.equal(ours, model.generate(ids[:rows], use_cache=False, **settings))
        cache.reset()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(-1)  # in place: a graph reads it
    for moved in (False, True):
        if moved:
            layer = model.model.layers[0].mlp.up_proj
            layer.weight = torch.nn.Parameter(layer.weight * 2, requires_grad=False)
        ours = model.generate(**cache.bind(input_ids=ids[:1], max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0))
        assert ("came or went" in captured.odd) == moved
        theirs = model.generate(ids[:1], use_cache=False, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
        assert torch.equal(ours, theirs)
        cache.reset()


def test_a_model_that_waits_for_the_device_is_refused() -> None:
    from kvdock import UnsupportedError
    from kvdock.integrations.transformers import PagedCacheForTransformers

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = llama(torch.float32, max_position_embeddings=512, rope_parameters=rope)
    cache = PagedCacheForTransformers.for_model(model, PagedKVCacheConfig(num_blocks=128, block_size=16))
    with pytest.raises(UnsupportedError, match="can be recorded and repeated"):
        cache.capture()
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    ids = torch.randint(3, 128, (2, 9), device="cuda")
    ours = model.generate(**cache.bind(input_ids=ids, **settings))
    assert torch.equal(ours, model.generate(ids, use_cache=False, **settings))
    cache.state.manager.check_integrity()
