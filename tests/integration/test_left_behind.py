"""Models that keep state beside the cache, and make it anew only when the cache is empty: what the last call left there is not ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from integration import zoo
from integration.prefixes import CLOSE, Watched, longer, padded, text
from integration.uncached import Uncached
from kvdock.errors import ArgumentValueError
from support_slow import first_of

GREEDY = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
IMAGE, START, END = 55, 57, 58
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
QWEN2 = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
VISION: dict[str, dict[str, Any]] = {
    "Qwen2VL": QWEN2,
    "Qwen2_5_VL": {"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 16, "num_heads": 2, "patch_size": 4},
    "Qwen3VL": {
        "depth": 1,
        "hidden_size": 16,
        "out_hidden_size": 32,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
    },
}


def build(family: str) -> Any:
    """Make a small model that reads images, with three planes of positions."""
    tokens = {"image_token_id": IMAGE, "video_token_id": 56, "vision_start_token_id": START, "vision_end_token_id": END}
    config = getattr(transformers, f"{family}Config")(
        text_config={**zoo.SMALL, "rope_parameters": ROPE},
        vision_config={**VISION[family], "spatial_merge_size": 2, "temporal_patch_size": 2},
        **tokens,
    )
    torch.manual_seed(11)
    return zoo.randomise(getattr(transformers, f"{family}ForConditionalGeneration")(config).eval())


def image(rows: int = 1) -> dict[str, torch.Tensor]:
    """Make prompts with an image of four tokens each, which moves all positions behind it by -2."""
    ids = torch.tensor([[3, START, *[IMAGE] * 4, END, 9, 10]] * rows)
    grid, pixels = torch.tensor([[1, 4, 4]] * rows), torch.randn(16 * rows, 3 * 2 * 4 * 4)
    told = {"mm_token_type_ids": (ids == IMAGE).int(), "image_grid_thw": grid, "pixel_values": pixels}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **told}


class Case:
    """A model with a prefix cache that knows a text, and the same without any cache."""

    def __init__(self, family: str) -> None:
        model = build(family)
        self.uncached = Uncached(model)
        self.watched = Watched(family, model=model)
        self.model = model
        self.generate(padded(text(18)))

    def generate(self, inputs: dict[str, torch.Tensor], **settings: Any) -> Any:
        """Generate with reuse, compare with no cache at all, store, and check all that is stored."""
        got = self.model.generate(**self.watched.cache.bind(**inputs), **GREEDY, **settings)
        self.uncached.assert_same(inputs, got)
        self.watched.cache.commit(got)
        for path in self.watched.paths():
            self.check_keys(path)
        return got

    def check_keys(self, path: list[int]) -> None:
        """See that the model goes on from what is stored as from nothing."""
        tokens = [token for block in path for token in self.watched.stored[block][2]]
        inputs = padded([*tokens, 5])
        with torch.no_grad():
            got = self.model(**self.watched.copy().bind(**inputs)).logits[:, -1]
        torch.testing.assert_close(got, self.uncached.logits(inputs["input_ids"])[:, -1], **CLOSE)


@pytest.fixture(params=VISION)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


BEFORE: dict[str, Any] = {
    "an image": image,
    "three images": lambda: image(3),
    "three texts": lambda: padded(text(9), text(9, 2), text(9, 3)),
}


@pytest.mark.parametrize("rows", [[text(18)], [text(18), text(10, 2)], [text(22), text(18), text(14)]], ids=["one", "padded", "three"])
@pytest.mark.parametrize("before", first_of(BEFORE))
def test_a_text_that_is_cached_has_its_own_positions(case: Case, before: str, rows: list[list[int]]) -> None:
    case.generate(padded(*rows))
    case.model.generate(**BEFORE[before](), **GREEDY)
    case.generate(padded(*rows))
    assert case.watched.cached >= 16


@pytest.mark.parametrize("way", [{"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 5}])
def test_in_other_ways_to_generate(case: Case, way: dict[str, Any]) -> None:
    case.model.generate(**image(), **GREEDY)
    case.generate(padded([*text(18), 5, 9, 7, 8]), **way)
    assert case.watched.cached == 16 or (case.watched.cached == 0 and "prefill_chunk_size" in way), (
        "older versions begin with the first chunk"
    )


def test_a_later_turn_has_its_own_positions(case: Case) -> None:
    """Also when it is not bound, and after a commit."""
    for commits in (False, True):
        got = case.generate(padded(text(18))) if commits else case.model.generate(**case.watched.cache.bind(**padded(text(18))), **GREEDY)
        case.model.generate(**image(), **GREEDY)
        turn = longer(got.sequences, 5, 9)
        later = case.model.generate(**turn, **{zoo.CACHE_KEYWORD: case.watched.cache}, **GREEDY)
        case.uncached.assert_same(turn, later)


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("told", [(), ("attention_mask",)], ids=["nothing", "the mask"])
def test_forward_passes_by_hand_have_their_own_positions(case: Case, told: tuple[str, ...], rest: bool) -> None:
    case.model.generate(**image(), **GREEDY)
    inputs = padded(text(18))
    case.watched.cache.bind(**inputs)
    with torch.no_grad():
        more = {name: inputs[name] for name in told}
        new = inputs["input_ids"][:, 16:] if rest else inputs["input_ids"]
        first = case.model(input_ids=new, **more, **{zoo.CACHE_KEYWORD: case.watched.cache}).logits[:, -1]
        then = case.model(input_ids=torch.tensor([[7]]), **{zoo.CACHE_KEYWORD: case.watched.cache}).logits[:, -1]
    expected = case.uncached.logits(torch.tensor([[*text(18), 7]]))
    torch.testing.assert_close(first, expected[:, -2], **CLOSE)
    torch.testing.assert_close(then, expected[:, -1], **CLOSE)
    case.watched.cache.commit([[*text(18), 7]])


def test_positions_of_three_planes_are_looked_at(case: Case) -> None:
    """Of ones own, where nothing is cached: they are obeyed, and not stored. Where something is, they cannot be right."""
    inputs = padded(text(18, 4))
    planes = torch.arange(18).expand(3, 1, 18) + torch.tensor([0, 3, 1])[:, None, None] * (torch.arange(18) > 4)
    case.watched.cache.bind(**inputs)
    with torch.no_grad():
        got = case.model(input_ids=inputs["input_ids"], position_ids=planes, **{zoo.CACHE_KEYWORD: case.watched.cache}).logits
        expected = case.uncached.model(input_ids=inputs["input_ids"], position_ids=planes, use_cache=False).logits
    torch.testing.assert_close(got, expected, **CLOSE)
    with pytest.raises(ArgumentValueError, match="other position_ids than its prompts have"):
        case.watched.cache.commit(inputs["input_ids"])
    case.watched.cache.bind(**padded(text(18)))
    with pytest.raises(ArgumentValueError, match="position_ids: expected those of the prompts"):
        case.model(input_ids=torch.tensor([text(18)]), position_ids=planes, **{zoo.CACHE_KEYWORD: case.watched.cache})


def test_the_state_of_others_stays(case: Case) -> None:
    """A conversation about an image, in a cache of its own, goes on as if nobody had been there meanwhile."""
    seen = image()
    own = zoo.dynamic(case.model)
    first = case.model.generate(**seen, **{zoo.CACHE_KEYWORD: own}, **GREEDY).sequences
    left = case.model.model.rope_deltas.clone()
    case.generate(padded(text(18)))
    assert torch.equal(case.model.model.rope_deltas, left)
    assert first.shape == (1, 15)
