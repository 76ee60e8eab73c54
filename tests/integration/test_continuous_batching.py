"""What docs/continuous-batching.md says is missing in Transformers: when one of these fails, there is more to do for kvdock there."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import transformers
from packaging.version import Version
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache
from transformers.generation.continuous_batching.utils import attn_mask_is_needed

from integration import zoo
from kvdock.integrations.transformers.compat import CACHE_KEYWORD

pytestmark = pytest.mark.skipif(Version(transformers.__version__) < Version("5.20"), reason="before, attention is found by name")


def nobody(*args: Any, **told: Any) -> Any:
    raise AssertionError("nobody calls it")


def test_an_attention_of_another_name_is_refused() -> None:
    AttentionInterface.register("kvdock_named", nobody)
    made = zoo.build("Llama", {})
    made.set_attn_implementation("kvdock_named")
    with pytest.raises(ValueError, match="Implementation kvdock_named is not supported for continuous batching"):
        made.init_continuous_batching(generation_config=GenerationConfig(eos_token_id=-1))


def test_a_name_with_flash_in_it_is_looked_for_among_those_of_flash_attn() -> None:
    AttentionInterface.register("kvdock_flash", nobody)
    with pytest.raises(ValueError, match="Could not find the currently requested flash attention implementation"):
        zoo.build("Llama", {}).set_attn_implementation("kvdock_flash")


def test_a_mask_is_made_for_the_name_that_is_accepted() -> None:
    made = zoo.build("Llama", {})
    made.set_attn_implementation("paged|eager")
    assert attn_mask_is_needed(made.config)


def test_nobody_can_hand_over_a_cache() -> None:
    parameters = {
        name
        for call in (ContinuousBatchingConfig, ContinuousBatchingManager, zoo.build("Llama", {}).generate_batch)
        for name in inspect.signature(call).parameters
    }
    assert not {name for name in parameters if "cache_c" in name or name in ("cache", "cache_factory", "past_key_values")}
    source = inspect.getsource(ContinuousBatchingManager._create_batch_processor)
    assert f"{PagedAttentionCache.__name__}(" in source, "it is made by its name"


def test_a_model_gives_keys_and_values_to_its_cache_first_from_5_24_on() -> None:
    calls_update = "cache.update(" in inspect.getsource(type(zoo.model("llama-gqa").model.layers[0].self_attn).forward)
    assert calls_update == (CACHE_KEYWORD == "cache")
