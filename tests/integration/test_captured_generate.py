"""`cache.capture()`: the tokens of a pass without any cache, whatever a step is, and the reason where it is none of the captured ones.

No device here captures, so that the same code runs without graphs; tests/gpu/test_generate.py does this with graphs.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from integration import zoo
from integration.prefixes import reusing
from integration.uncached import Uncached
from kvdock import ArgumentValueError, OutOfBlocksError, UnsupportedError

NEW = 9
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True}
READ = [name for name in zoo.MODELS if name not in ("bloom", "falcon", "llama4-chunked", "gemma3n-shared")]
READ = READ if zoo.CACHE_KEYWORD == "cache" else [name for name in READ if name != "deepseek-v3"]
QUICK = ("llama-gqa", "gpt2", "gemma3", "gpt-oss")


def build(name: str) -> Any:
    family, changes = zoo.MODELS[name]
    return zoo.build(family, changes, "eager" if name in zoo.EAGER_ONLY else "sdpa")


def steps_of(cache: Any) -> list[int]:
    """Return a list to which each captured step adds its rows."""
    steps, run = list[int](), cache.captured._steps.run
    cache.captured._steps.run = lambda sequences, *inputs, **told: (steps.append(len(sequences)), run(sequences, *inputs, **told))[1]
    return steps


def launched_first(cache: Any) -> None:
    """Let a step be looked at while it runs, as one that is a graph, and not before."""
    assert not cache.captured.is_captured
    cache.captured.is_captured = True


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in READ])
def test_the_tokens_of_no_cache_at_all(name: str) -> None:
    made = build(name)
    uncached, cache = Uncached(made), zoo.paged(made)
    cache.capture(batch_sizes=(1, 4))
    steps = steps_of(cache)
    for lengths in ((3, 11, 6), (12, 3, 2), (9, 9), (5,)):  # rows of padding come behind padded ones
        inputs = zoo.prompt(*lengths)
        uncached.assert_same(inputs, made.generate(**cache.bind(**inputs), **GREEDY))
        assert cache.captured.odd == ""
        cache.reset()
    assert steps == [3] * (2 * NEW - 2) + [2] * (NEW - 1) + [1] * (NEW - 1)
    assert "forward" not in vars(made.base_model)
    cache.state.manager.check_integrity()


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
@pytest.mark.parametrize("scenario", zoo.SCENARIOS)
def test_other_ways_to_generate(name: str, scenario: str) -> None:
    """Steps of several tokens go by the model's layers, those of one by captured steps."""
    if scenario == "prompt-lookup" and name in zoo.WINDOWED and not zoo.CROPS_WINDOWS:
        pytest.skip("DynamicCache of this version cannot do it")
    made = zoo.model(name)
    expected, cache = zoo.generate(made, zoo.dynamic(made), scenario), zoo.paged(made)
    cache.capture(batch_sizes=(1, 8))
    steps = steps_of(cache)
    assert torch.equal(zoo.generate(made, cache, scenario).sequences, expected.sequences)
    assert steps or scenario == "prompt-lookup"
    cache.state.manager.check_integrity()


def test_prefixes_are_found_and_stored() -> None:
    made = build("llama-gqa")
    uncached, cache = Uncached(made), reusing(made)
    cache.capture(batch_sizes=(2,))
    steps, inputs = steps_of(cache), zoo.prompt(13, 9)
    for found in (0, 12):
        bound = cache.bind(**inputs)
        assert cache.state.length == found
        out = made.generate(**bound, **GREEDY)
        uncached.assert_same(inputs, out)
        cache.commit(out.sequences)
    whole = {"input_ids": out.sequences[:, :-1], "attention_mask": torch.ones(2, 21, dtype=torch.long)}
    whole["attention_mask"][1, :4] = 0
    assert len(steps) == 2 * (NEW - 1) + 1, "one token of the second prompt was not found"
    uncached.assert_same(whole, made.generate(**cache.bind(**whole), **GREEDY))
    cache.state.manager.check_integrity()


def test_a_prompt_of_which_all_but_the_last_token_is_cached_begins_with_a_step() -> None:
    made = build("llama-gqa")
    uncached, cache, inputs = Uncached(made), reusing(made), zoo.prompt(9, 9)
    cache.capture(batch_sizes=(4,))
    cache.commit(made.generate(**cache.bind(**inputs), **GREEDY).sequences)
    steps = steps_of(cache)
    uncached.assert_same(inputs, made.generate(**cache.bind(**inputs), **GREEDY))
    assert steps == [2] * NEW
    beams = {"num_beams": 2, "do_sample": False, "max_new_tokens": 5}
    assert torch.equal(made.generate(**cache.bind(**inputs), **beams), made.generate(**inputs, use_cache=False, **beams))


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "hidden states": ({"output_hidden_states": True}, "output_hidden_states"),
    "more rows": ({"num_return_sequences": 3, "do_sample": True, "top_k": 1}, "more than 2 rows"),
    "longer rows": ({"max_new_tokens": 30, "min_new_tokens": 30}, "or 24 tokens in one"),
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("looks", ["before", "meanwhile"])
def test_what_is_no_such_step_is_computed_without_and_says_why(case: str, looks: str) -> None:
    made, (settings, why) = build("llama-gqa"), ODD[case]
    cache, inputs = zoo.paged(made), zoo.prompt(7)
    cache.capture(batch_sizes=(2,), max_length=24)
    if looks == "meanwhile":
        launched_first(cache)
    options = {**GREEDY, **settings}
    expected = made.generate(**inputs, **{**options, "use_cache": False})
    got = made.generate(**cache.bind(**inputs), **options)
    assert torch.equal(got.sequences, expected.sequences)
    assert why in cache.captured.odd
    assert why in repr(cache.captured)
    assert why in repr(cache)
    cache.reset()
    Uncached(made).assert_same(inputs, made.generate(**cache.bind(**inputs), **GREEDY))
    assert cache.captured.odd == ""


def scaled(made: Any) -> None:
    with torch.no_grad():
        made.model.layers[0].mlp.up_proj.weight.mul_(-1.5)


def replaced(made: Any) -> None:
    weight = made.model.layers[0].mlp.up_proj.weight
    made.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight.detach() * -1.5, requires_grad=False)


def moved(made: Any) -> None:
    weight = made.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data * -1.5


class Adapter(torch.nn.Module):
    """What PEFT puts in the place of a projection."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -1.5 * self.base(x)


def adapted(made: Any) -> None:
    made.model.layers[0].mlp.up_proj = Adapter(made.model.layers[0].mlp.up_proj)


def hooked(made: Any) -> None:
    made.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, out: -1.5 * out)


def patched(made: Any) -> None:
    projection = made.model.layers[0].mlp.up_proj
    projection.forward = lambda x: -1.5 * type(projection).forward(projection, x)


def hooked_itself(made: Any) -> None:
    made.model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "input_ids": kwargs["input_ids"] * 0 + 7}), with_kwargs=True
    )


CHANGES: dict[Callable[[Any], None], str] = {
    scaled: "",
    replaced: "came or went",
    moved: "were moved",
    adapted: "came or went",
    hooked: "a hook on a part",
    patched: "a forward of its own",
    hooked_itself: "a hook on a part",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("looks", ["before", "meanwhile"])
def test_a_model_that_was_changed_since_gives_what_it_gives_now(change: Callable[[Any], None], looks: str) -> None:
    made = build("llama-gqa")
    cache, inputs = zoo.paged(made), zoo.prompt(7, 5)
    cache.capture(batch_sizes=(2,))
    if looks == "meanwhile":
        launched_first(cache)
    change(made)
    expected = made.generate(**inputs, **{**GREEDY, "use_cache": False})
    got = made.generate(**cache.bind(**inputs), **GREEDY)
    assert torch.equal(got.sequences, expected.sequences)
    assert CHANGES[change] in cache.captured.odd
    assert bool(CHANGES[change]) == bool(cache.captured.odd)
    cache.reset()
    if change not in (scaled, replaced, moved):
        with pytest.raises(UnsupportedError, match=r"can be recorded and repeated, got .+ Fix:"):
            cache.capture()
        return
    cache.capture(batch_sizes=(2,))
    again = made.generate(**cache.bind(**inputs), **GREEDY)
    assert torch.equal(again.sequences, expected.sequences)
    assert cache.captured.odd == ""


def test_autocast_is_part_of_what_was_captured() -> None:
    made = build("llama-gqa").to(torch.bfloat16)
    cache, inputs = zoo.paged(made), zoo.prompt(7)
    cache.capture(batch_sizes=(1,))
    with torch.autocast("cpu", torch.bfloat16):
        made.generate(**cache.bind(**inputs), **GREEDY)
        assert "torch.autocast" in cache.captured.odd
    cache.reset()
    made.generate(**cache.bind(**inputs), **GREEDY)
    assert cache.captured.odd == ""


def test_other_padding_than_in_the_step_before_is_seen() -> None:
    made = build("llama-gqa")
    cache, inputs = zoo.paged(made), zoo.prompt(7, 7)
    cache.capture(batch_sizes=(2,))
    launched_first(cache)
    masks = {length: torch.ones(2, length, dtype=torch.long) for length in (8, 9, 10)}
    masks[9][0, :3] = masks[10][0, :3] = 0
    odd, ids = [], inputs["input_ids"]
    with torch.no_grad():
        made(**inputs, **{zoo.CACHE_KEYWORD: cache})
        for length, mask in masks.items():
            new = torch.tensor([[length], [length + 1]])
            ids, positions = torch.cat([ids, new], dim=1), torch.full((2, 1), length - 1)
            told = {"attention_mask": mask, "position_ids": positions, zoo.CACHE_KEYWORD: cache}
            got = made(input_ids=new, **told).logits
            places = torch.arange(length).expand(2, -1)
            expected = made(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).logits[:, -1:]
            assert zoo.close(got[1], expected[1])  # the other row has tokens that saw what is hidden later
            odd.append(cache.captured.odd)
    assert odd == ["", "other padding than in the step before", ""]
    cache.state.manager.check_integrity()


MORE: dict[str, tuple[str, Any]] = {
    "a tensor": ("cu_seq_lens_q", torch.tensor([0, 1])),
    "a number": ("some_number", 3),
}


@pytest.mark.parametrize("case", MORE)
def test_layers_that_are_told_more_are_called(case: str) -> None:
    made, (name, value) = build("llama-gqa"), MORE[case]
    uncached, cache, inputs = Uncached(made), zoo.paged(made), zoo.prompt(7)
    cache.capture(batch_sizes=(1,))
    told = {"input_ids": torch.tensor([[5]]), "position_ids": torch.tensor([[7]]), zoo.CACHE_KEYWORD: cache, "use_cache": True}
    expected = uncached.logits(torch.cat([inputs["input_ids"], told["input_ids"]], dim=1))[:, -1:]
    own = made.model.__class__.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **{**kwargs, name: value})

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        made(**inputs, **{zoo.CACHE_KEYWORD: cache})
        patch.setattr(type(made.model), "__call__", call)
        assert zoo.close(made(**told).logits, expected)
    assert name in cache.captured.odd


def test_a_tuple_is_given_where_one_is_asked_for() -> None:
    made = build("llama-gqa")
    uncached, cache, inputs = Uncached(made), zoo.paged(made), zoo.prompt(7)
    cache.capture(batch_sizes=(1,))
    told = {"input_ids": torch.tensor([[5]]), "position_ids": torch.tensor([[7]]), zoo.CACHE_KEYWORD: cache, "use_cache": True}
    expected = uncached.logits(torch.cat([inputs["input_ids"], told["input_ids"]], dim=1))[:, -1:]
    with torch.no_grad():
        made(**inputs, **{zoo.CACHE_KEYWORD: cache})
        for how in ("of the layers", "of the model"):
            call = made.model if how == "of the layers" else made
            got = call(**told, return_dict=False)
            assert isinstance(got, tuple)
            assert zoo.close(made.lm_head(got[0]) if how == "of the layers" else got[0], expected)
            cache.truncate(7)


def test_no_room_left_is_said_and_loses_nothing() -> None:
    made = build("llama-gqa")
    cache, inputs = zoo.paged(made, num_blocks=5), zoo.prompt(9)
    cache.capture(batch_sizes=(1,))
    free = cache.state.manager.available_size
    with pytest.raises(OutOfBlocksError, match="make the pool larger"):
        made.generate(**cache.bind(**inputs), max_new_tokens=30, min_new_tokens=30, do_sample=False)
    assert cache.get_seq_length() == 20
    assert "forward" not in vars(made.base_model)
    cache.reset()
    assert cache.state.manager.available_size == free
    cache.state.manager.check_integrity()


def test_a_step_that_fails_is_taken_back() -> None:
    made = build("llama-gqa")
    cache, inputs = zoo.paged(made), zoo.prompt(6)
    cache.capture(batch_sizes=(1,))
    place = {"position_ids": torch.tensor([[6]]), zoo.CACHE_KEYWORD: cache}
    with torch.no_grad():
        made(**inputs, **{zoo.CACHE_KEYWORD: cache})
        with pytest.raises(IndexError):
            made(input_ids=torch.tensor([[zoo.VOCAB]]), **place)
        assert cache.get_seq_length() == 6
        logits = made(input_ids=torch.tensor([[5]]), **place).logits
    assert cache.captured.odd == ""
    expected = Uncached(made).logits(torch.cat([inputs["input_ids"], torch.tensor([[5]])], dim=1))[:, -1:]
    assert zoo.close(logits, expected)
    cache.state.manager.check_integrity()


def test_copies_of_a_cache_share_the_steps_and_write_to_their_own_blocks() -> None:
    made = build("llama-gqa")
    uncached, cache, inputs = Uncached(made), zoo.paged(made), zoo.prompt(10)
    cache.capture(batch_sizes=(1,))
    with torch.no_grad():
        made(**inputs, **{zoo.CACHE_KEYWORD: cache})
    other = copy.deepcopy(cache)
    assert other.captured is cache.captured
    steps = steps_of(cache)
    for token, one in ((20, cache), (30, other), (40, cache), (41, other)):
        length = one.get_seq_length()
        with torch.no_grad():
            made(input_ids=torch.tensor([[token]]), position_ids=torch.tensor([[length]]), **{zoo.CACHE_KEYWORD: one})
    for tokens, one in (([20, 40, 5], cache), ([30, 41, 5], other)):
        ids = torch.cat([inputs["input_ids"], torch.tensor([tokens])], dim=1)
        with torch.no_grad():
            told = {"input_ids": ids[:, -1:], "position_ids": torch.tensor([[12]]), zoo.CACHE_KEYWORD: one}
            assert zoo.close(made(**told).logits, uncached.logits(ids)[:, -1:])
    assert steps == [1] * 6


def test_another_thread_calls_the_model_while_a_graph_stands_in() -> None:
    made = build("llama-gqa")
    cache, other, inputs = zoo.paged(made), zoo.paged(made), zoo.prompt(7)
    expected = made.generate(**inputs, **GREEDY).sequences
    for each in (cache, other):
        each.capture(batch_sizes=(1,))
    results: list[torch.Tensor] = []

    def meanwhile() -> None:
        results.append(made.generate(**inputs, **GREEDY).sequences)
        results.append(made.generate(**other.bind(**inputs), **GREEDY).sequences)

    run = cache.captured._steps.run

    def interrupted(*args: Any, **told: Any) -> torch.Tensor:
        if not results:
            thread = threading.Thread(target=meanwhile)
            thread.start()
            thread.join()
        return run(*args, **told)

    cache.captured._steps.run = interrupted
    results.append(made.generate(**cache.bind(**inputs), **GREEDY).sequences)
    assert [torch.equal(each, expected) for each in results] == [True] * 3
    assert "forward" not in vars(made.base_model)


def test_a_model_is_as_it_was() -> None:
    made = build("llama-gqa")
    cache, inputs = zoo.paged(made), zoo.prompt(7)
    cache.capture(batch_sizes=(1,))
    made.generate(**cache.bind(**inputs), **GREEDY)
    twin = copy.deepcopy(made)
    assert pickle.loads(pickle.dumps(made.state_dict())).keys() == twin.state_dict().keys()  # noqa: S301 - our own
    assert vars(made.base_model).keys() == vars(twin.base_model).keys() == vars(build("llama-gqa").base_model).keys()
    Uncached(twin).assert_same(inputs, twin.generate(**inputs, **GREEDY))


BAD: dict[str, tuple[str, dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "gathers": ("bloom", {}, {}, UnsupportedError, "expected attention on pages in all layers"),
    "as chosen": ("llama-gqa", {"attention": "gather"}, {}, UnsupportedError, "got as chosen"),
    "no sizes": ("llama-gqa", {}, {"batch_sizes": ()}, ArgumentValueError, "batch_sizes"),
    "a size of 0": ("llama-gqa", {}, {"batch_sizes": (0, 1)}, ArgumentValueError, "batch_sizes"),
    "no length": ("llama-gqa", {}, {"max_length": 0}, ArgumentValueError, "max_length"),
    "a pool of one block": ("llama-gqa", {"num_blocks": 1}, {}, OutOfBlocksError, "make the pool larger"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_captured_is_refused_and_the_cache_goes_on(case: str) -> None:
    name, made_with, options, kind, why = BAD[case]
    made = build(name)
    cache = zoo.paged(made, **made_with)
    with pytest.raises(kind, match=why):
        cache.capture(**options)
    assert cache.captured is None
    assert cache.state.manager.num_sequences == 0
    cache.state.manager.check_integrity()


def test_a_cache_with_tokens_and_a_model_in_training_are_refused() -> None:
    made = build("llama-gqa")
    cache = zoo.paged(made)
    made.train()
    with pytest.raises(UnsupportedError, match=r"model\.eval\(\)"):
        cache.capture()
    made.eval()
    with torch.no_grad():
        made(**zoo.prompt(5), **{zoo.CACHE_KEYWORD: cache})
    with pytest.raises(ArgumentValueError, match=r"one with 5 tokens. Fix: reset\(\)"):
        cache.capture()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUICK)
def test_compiled_steps_give_the_tokens_of_no_cache_and_are_compiled_once(name: str) -> None:
    made = build(name)
    uncached, cache = Uncached(made), zoo.paged(made)
    with torch._dynamo.config.patch(error_on_recompile=True):
        cache.capture(batch_sizes=(1, 4), compiled=True)
        steps = steps_of(cache)
        for lengths in ((3, 11, 6), (9, 9), (5,), (12, 3, 2)):
            inputs = zoo.prompt(*lengths)
            uncached.assert_same(inputs, made.generate(**cache.bind(**inputs), **GREEDY))
            assert cache.captured.odd == ""
            cache.reset()
    assert len(steps) == 4 * (NEW - 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_model_may_be_compiled_for_any_number_of_caches() -> None:
    made, inputs = build("llama-gqa"), zoo.prompt(7)
    uncached = Uncached(made)
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        cache = zoo.paged(made)
        cache.capture(batch_sizes=(1,), compiled=True)
    uncached.assert_same(inputs, made.generate(**cache.bind(**inputs), **GREEDY))


def test_compiled_steps_are_refused_where_a_layer_cannot_be_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    made = build("llama-gqa")
    cache = zoo.paged(made)
    monkeypatch.setattr("kvdock.integrations.transformers.decoding.CACHE_KEYWORD", "past_key_values")
    with pytest.raises(UnsupportedError, match=r"Transformers 5\.24 or newer"):
        cache.capture(compiled=True)
    assert cache.captured is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_gives_the_same_tokens() -> None:
    made = build("llama-gqa")
    uncached, cache, inputs = Uncached(made), zoo.paged(made), zoo.prompt(7, 7)
    cache.capture(batch_sizes=(2,))
    compiled = torch.compile(made, backend="eager")
    uncached.assert_same(inputs, compiled.generate(**cache.bind(**inputs), **GREEDY))
    torch.compiler.reset()
