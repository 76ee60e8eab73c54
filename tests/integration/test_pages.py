"""Attention on pages: which passes read them, what becomes of the others, and that a model is as it was as soon as a pass is over."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from integration import zoo
from integration.prefixes import reusing
from integration.uncached import Uncached
from kvdock import ArgumentValueError, UnsupportedError
from kvdock.errors import WrongThreadError
from kvdock.integrations.transformers import PagedCacheForTransformers
from kvdock.integrations.transformers.attention import attend
from kvdock.integrations.transformers.switching import configs_of, former_of

GREEDY = {"do_sample": False, "max_new_tokens": 9, "min_new_tokens": 9, "return_dict_in_generate": True, "output_logits": True}


def forward(made: Any, ids: torch.Tensor, cache: Any, **told: Any) -> torch.Tensor:
    """Run one pass; return its logits."""
    with torch.no_grad():
        logits: torch.Tensor = made(input_ids=ids, **{zoo.CACHE_KEYWORD: cache}, **told).logits
    return logits


def attention_of(made: Any) -> str:
    """Return which attention a model's configuration names."""
    name: str = made.config._attn_implementation
    return name


@contextmanager
def watching(made: Any, call: Callable[[], None], layer: int = 1) -> Iterator[None]:
    """Call something in the middle of each pass."""
    hook = made.model.layers[layer].register_forward_pre_hook(lambda module, args: call())
    try:
        yield
    finally:
        hook.remove()


def test_a_pass_reads_pages_and_a_model_is_as_it_was_before_and_behind_it() -> None:
    made = zoo.build("Llama", {})
    cache, seen = zoo.paged(made), list[str]()
    assert attention_of(made) == "sdpa"
    with watching(made, lambda: seen.append(attention_of(made))):
        for tokens in (5, 2, 1):
            forward(made, torch.full((2, tokens), 7), cache)
            assert attention_of(made) == "sdpa"
    assert seen[0] == "sdpa", "there is nothing to read yet"
    assert seen[1] == seen[2] != "sdpa"
    assert "flash" not in seen[1], "some models look for that"
    assert former_of(made.config) == "sdpa"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_generate_without_the_cache_gives_the_same_bits_as_ever(attention: str) -> None:
    made = zoo.build("Gemma3", zoo.MODELS["gemma3"][1], attention)
    before = made.generate(**zoo.prompt(4, 9), **GREEDY)
    cache = zoo.paged(made)
    for _ in range(2):
        got = made.generate(**cache.bind(**zoo.prompt(4, 9)), **GREEDY)
        plain = made.generate(**zoo.prompt(4, 9), **GREEDY)
        assert torch.equal(before.sequences, got.sequences)
        assert all(torch.equal(left, right) for left, right in zip(before.logits, plain.logits, strict=True))
        cache.reset()
    hooks = made._forward_pre_hooks, made._forward_hooks, made._forward_hooks_always_called
    assert [len(each) for each in hooks] == [1, 1, 1]
    del cache, got
    assert not any(hooks)


def test_a_pass_that_fails_leaves_the_model_as_it_was() -> None:
    made = zoo.build("Llama", {})
    cache = zoo.paged(made)
    forward(made, zoo.prompt(6)["input_ids"], cache)

    def fail() -> None:
        assert attention_of(made) != "sdpa"
        raise RuntimeError("in the middle")

    with watching(made, fail), pytest.raises(RuntimeError, match="in the middle"):
        forward(made, torch.tensor([[5]]), cache)
    assert attention_of(made) == "sdpa"
    cache.truncate(6)
    expected = zoo.dynamic(made)
    forward(made, zoo.prompt(6)["input_ids"], expected)
    assert zoo.close(forward(made, torch.tensor([[5]]), expected), forward(made, torch.tensor([[5]]), cache))
    assert cache.state.odd == ""


def test_an_interrupt_is_made_up_for_by_the_next_pass() -> None:
    """No hook runs then. Whatever the next pass is, it is right, and the model is as it was behind it."""
    made = zoo.build("Llama", {})
    cache, ids = zoo.paged(made), zoo.prompt(6)["input_ids"]
    before = forward(made, ids, None)
    forward(made, ids, cache)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with watching(made, interrupt), pytest.raises(KeyboardInterrupt):
        forward(made, torch.tensor([[5]]), cache)
    twin = copy.deepcopy(made)
    assert torch.equal(forward(made, ids, None), before)
    assert attention_of(made) == "sdpa"
    assert torch.equal(forward(twin, ids, None), before), "a copy made meanwhile has kvdock's name for good, and its own attention"
    cache.reset()
    assert torch.equal(forward(made, ids, cache), before)


def test_a_copy_of_a_model_made_in_the_middle_of_a_pass_works() -> None:
    made, twins = zoo.build("Llama", {}, "eager"), list[Any]()
    cache, ids = zoo.paged(made), zoo.prompt(6)["input_ids"]
    forward(made, ids, cache)
    with watching(made, lambda: twins.append(copy.deepcopy(made))):
        forward(made, torch.tensor([[5]]), cache)
    twin = twins[0]
    for hooked in (twin.model.layers[1]._forward_pre_hooks,):
        hooked.clear()
    assert former_of(twin.config) == "eager"
    assert torch.equal(forward(twin, ids, None), forward(made, ids, None))
    own = zoo.paged(twin)
    assert own.attention == "pages"
    expected = zoo.dynamic(made)
    for part in (ids, torch.tensor([[5]])):
        assert zoo.close(forward(twin, part, own), forward(made, part, expected))


def test_two_caches_on_one_model_take_turns() -> None:
    made = zoo.model("gemma3")
    paged, dynamic = [zoo.paged(made), zoo.paged(made, attention="gather")], [zoo.dynamic(made), zoo.dynamic(made)]
    for step, tokens in enumerate((6, 1, 3, 1)):
        for row in range(2):
            ids = zoo.prompt(tokens, seed=10 * step + row)["input_ids"]
            assert zoo.close(forward(made, ids, dynamic[row]), forward(made, ids, paged[row]))


class Meanwhile:
    """Passes in another thread, while one of this thread is in its middle.

    Args:
        calls: what the other thread does; results are kept.
    """

    def __init__(self, *calls: Callable[[], Any]) -> None:
        self.calls = calls
        self.results: list[Any] = []

    def __call__(self) -> None:
        if threading.current_thread() is threading.main_thread() and not self.results:
            thread = threading.Thread(target=self.run)
            thread.start()
            thread.join()

    def run(self) -> None:
        for call in self.calls:
            try:
                self.results.append(call())
            except Exception as error:  # noqa: BLE001 - the test looks at it
                self.results.append(error)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_another_thread_runs_the_model_meanwhile(attention: str) -> None:
    """Without a paged cache, and with one of its own in a pool of its own; in the middle of a pass that reads pages."""
    made = zoo.build("Gemma3", zoo.MODELS["gemma3"][1], attention)
    mine, other, dynamic = zoo.paged(made), zoo.paged(made), [zoo.dynamic(made), zoo.dynamic(made)]
    ids, padded = zoo.prompt(9)["input_ids"], zoo.prompt(5, 11)
    for cache in (mine, other, *dynamic):
        forward(made, ids, cache)

    def plain() -> torch.Tensor:
        return forward(made, padded["input_ids"], None, attention_mask=padded["attention_mask"])

    expected = [plain(), *(forward(made, ids, cache) for cache in dynamic)]
    meanwhile = Meanwhile(plain, lambda: forward(made, ids, other))
    with watching(made, meanwhile):
        got = forward(made, ids, mine)
    assert torch.equal(meanwhile.results[0], expected[0])
    assert zoo.close(meanwhile.results[1], expected[1])
    assert zoo.close(got, expected[2])
    assert attention_of(made) == attention
    assert (mine.state.odd, other.state.odd) == ("", "")


def test_the_same_cache_in_two_threads_at_once_is_refused() -> None:
    made = zoo.build("Llama", {})
    cache, expected = zoo.paged(made), zoo.dynamic(made)
    for each in (cache, expected):
        forward(made, zoo.prompt(6)["input_ids"], each)
    meanwhile = Meanwhile(lambda: forward(made, torch.tensor([[8]]), cache))
    with watching(made, meanwhile):
        got = forward(made, torch.tensor([[5]]), cache)
    assert isinstance(meanwhile.results[0], WrongThreadError)
    assert "expected one at a time" in str(meanwhile.results[0])
    assert zoo.close(got, forward(made, torch.tensor([[5]]), expected))
    assert attention_of(made) == "sdpa"


def test_copies_of_a_cache_read_the_same_pages() -> None:
    made = zoo.build("Llama", {})
    cache, uncached = zoo.paged(made), Uncached(made)
    ids = zoo.prompt(7, 7)["input_ids"]
    forward(made, ids, cache)
    for number, other in enumerate((copy.deepcopy(cache), copy.copy(cache), cache)):
        assert other.attention == "pages"
        more = torch.cat([ids, torch.tensor([[20 + number], [30 + number]])], dim=1)
        expected = uncached.logits(more)[:, -1:]
        assert zoo.close(forward(made, more[:, -1:], other), expected)
        assert other.state.odd == ""


GATHERED: dict[str, tuple[Callable[[Any, Any, torch.Tensor], Any], str]] = {
    "attention weights": (lambda made, cache, ids: run(made, cache, ids, output_attentions=True), "attention weights are asked for"),
    "a mask of four dimensions": (lambda made, cache, ids: run(made, cache, ids, attention_mask=tree()), "not [rows, tokens]"),
    "gradients": (lambda made, cache, ids: made(input_ids=ids, **{zoo.CACHE_KEYWORD: cache}), "gradients are recorded"),
}


def tree() -> torch.Tensor:
    """Make a mask by which two drafts of one place do not see each other."""
    mask = torch.zeros(1, 1, 3, 10)
    mask[..., 2, 8] = mask[..., 0, 8:] = mask[..., 1, 9] = torch.finfo(torch.float32).min
    return mask


def run(made: Any, cache: Any, ids: torch.Tensor, **told: Any) -> Any:
    """Run one pass without gradients; return all that comes."""
    with torch.no_grad():
        return made(input_ids=ids, **{zoo.CACHE_KEYWORD: cache}, **told)


@pytest.mark.parametrize("case", GATHERED)
def test_what_pages_do_not_give_is_gathered(case: str) -> None:
    made = zoo.build("Llama", {}, "eager")
    call, reason = GATHERED[case]
    caches = zoo.dynamic(made), zoo.paged(made)
    for cache in caches:
        forward(made, zoo.prompt(7)["input_ids"], cache)
    expected, got = (call(made, cache, torch.tensor([[5, 6, 7]])) for cache in caches)
    assert zoo.close(expected.logits, got.logits)
    if "weights" in case:
        assert all(zoo.close(left, right) for left, right in zip(expected.attentions, got.attentions, strict=True))
    assert reason in caches[1].state.odd
    assert f"attention=pages (not in the last pass: {caches[1].state.odd})" in repr(caches[1])
    forward(made, torch.tensor([[8]]), caches[1])
    assert "attention=pages," in repr(caches[1])


def test_a_model_in_training_drops_out_on_gathered_keys() -> None:
    made = zoo.build("Llama", {"attention_dropout": 0.5}, "eager").train()
    caches = zoo.dynamic(made), zoo.paged(made)
    assert caches[1].attention == "pages", "it may be made before eval() is called"
    results = []
    for cache in caches:
        torch.manual_seed(4)
        forward(made, zoo.prompt(7)["input_ids"], cache)
        results.append(forward(made, torch.tensor([[5]]), cache))
    assert zoo.close(*results)
    assert caches[1].state.odd == "the model is in training"


MASKS = {
    "a hole": [[1, 1, 0, 1, 1, 1, 1, 1, 1], [1] * 9],
    "on the right": [[1, 1, 1, 1, 1, 1, 1, 0, 0], [1] * 9],
    "on both sides": [[0, 1, 1, 1, 1, 1, 1, 1, 0], [1] * 9],
    "on the left": [[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1]],
    "nowhere": [[1] * 9, [1] * 9],
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
@pytest.mark.parametrize("case", MASKS)
def test_masks_of_two_dimensions_hide_what_they_hide(case: str, name: str, attention: str) -> None:
    """Those that are not plain padding on the left are gathered, in the middle of a pass. Afterwards plain ones read pages again."""
    made = zoo.model(name, attention)
    ids, mask = zoo.prompt(9, 9)["input_ids"], torch.tensor(MASKS[case])
    caches = zoo.dynamic_of_all(made), zoo.paged(made)
    for start, stop in ((0, 6), (6, 8), (8, 9)):
        expected, got = (forward(made, ids[:, start:stop], cache, attention_mask=mask[:, :stop]) for cache in caches)
        shown = mask[:, start:stop].bool()
        assert zoo.close(expected[shown], got[shown])


def test_padding_that_moves_is_noticed() -> None:
    """Each pass has a mask of its own; what stood for the last one is not taken for it."""
    made = zoo.model("llama-gqa")
    caches, ids = (zoo.dynamic(made), zoo.paged(made)), zoo.prompt(6, 6)["input_ids"]
    for cache in caches:
        forward(made, ids, cache)
    for pads in ((0, 2), (0, 2), (3, 0), (0, 0)):
        length = caches[1].get_seq_length() + 1
        mask = torch.stack([torch.arange(length) >= pad for pad in pads]).long()
        expected, got = (forward(made, torch.tensor([[5], [6]]), cache, attention_mask=mask) for cache in caches)
        assert zoo.close(expected, got)
        assert caches[1].state.odd == ""


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("prefix", [None, "radix"])
def test_what_nobody_sees_may_be_no_number(name: str, prefix: str | None) -> None:
    """A pool of NaN stands for blocks that had other tokens before: behind lengths, in padding, behind windows."""
    made = zoo.model(name, "eager" if name in zoo.EAGER_ONLY else "sdpa")
    cache = reusing(made) if prefix else zoo.paged(made)
    for layer in range(cache.state.pool.num_layers):
        cache.state.pool.k_cache(layer).fill_(torch.nan)
        cache.state.pool.v_cache(layer).fill_(torch.nan)
    for lengths in ((3, 11, 6), (10, 2)):
        inputs = zoo.prompt(*lengths)
        Uncached(made).assert_same(inputs, made.generate(**cache.bind(**inputs), **GREEDY))
        assert cache.state.odd == ""
        if prefix:
            cache.commit(made.generate(**cache.bind(**inputs), **GREEDY))
        else:
            cache.reset()
    cache.state.manager.check_integrity()


def test_prefixes_that_were_found_are_read_on_pages() -> None:
    """Also in rows of which padding goes on behind what the others have: such a first pass gathers."""
    made = zoo.build("Llama", {})
    cache, uncached = reusing(made), Uncached(made)
    long = zoo.prompt(18)
    cache.commit(made.generate(**cache.bind(**long), **GREEDY).sequences)
    odd = []

    def note() -> None:
        odd.append(cache.state.odd)

    ids = torch.cat([long["input_ids"], zoo.prompt(18, seed=9)["input_ids"]])
    for mask, cached in (([[1] * 18] * 2, 0), ([[1] * 18, [0] * 17 + [1]], 16), ([[1] * 18, [1] * 18], 0)):
        inputs = {"input_ids": torch.where(torch.tensor(mask) > 0, ids, zoo.PAD), "attention_mask": torch.tensor(mask)}
        with watching(made, note):
            uncached.assert_same(inputs, made.generate(**cache.bind(**inputs), **GREEDY))
        assert cache.usage.cached_tokens == cached
    assert odd.count("padding behind what is cached") == 1
    once = {name: value[:1] for name, value in inputs.items()}
    with watching(made, note):
        uncached.assert_same(once, made.generate(**cache.bind(**once), **GREEDY))
    assert cache.usage.cached_tokens == 16
    assert odd[-9:] == [""] * 9, "the first pass too"


def test_tables_are_made_once_a_step() -> None:
    made = zoo.build("Llama", {"num_hidden_layers": 5})
    cache = zoo.paged(made)
    forward(made, zoo.prompt(6)["input_ids"], cache)
    tables = cache.state.tables
    begin, begun = tables.begin, list[int]()

    def count(*args: Any, **told: Any) -> None:
        begun.append(args[2])
        begin(*args, **told)

    tables.begin = count  # type: ignore[method-assign]  # counts, and does what it did
    forward(made, torch.tensor([[5]]), cache)
    table = tables.block_tables[0]
    forward(made, torch.tensor([[5]]), cache)
    assert begun == [7, 8]
    assert tables.block_tables[0] is table, "the blocks are the same"
    forward(made, torch.tensor([[5]]), cache)
    assert tables.block_tables[0] is not table, "9 tokens are in another block"


REFUSED = {
    "bloom": "a trial of BloomForCausalLM on pages failed",
    "falcon": "FalconForCausalLM",
    "llama4-chunked": "a mask that is not plain",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_says_why(name: str) -> None:
    made = zoo.model(name, "eager" if name in zoo.EAGER_ONLY else "sdpa")
    cache = zoo.paged(made)
    assert REFUSED[name] in repr(cache)
    with pytest.raises(UnsupportedError, match=REFUSED[name]) as caught:
        zoo.paged(made, attention="pages")
    assert "PagedCacheForTransformers.for_model: attention: expected a model whose layers can all read pages" in str(caught.value)
    assert "Fix: leave attention= out" in str(caught.value)


def test_head_counts_that_differ_from_the_configuration_gather() -> None:
    """Jetmoe lays its keys beside themselves, one time for each expert, before it attends."""
    changes = {"num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": None}
    made = zoo.build("JetMoe", changes)
    cache = zoo.paged(made)
    assert cache.attention == "gather"
    Uncached(made).assert_same(zoo.prompt(4, 9), made.generate(**cache.bind(**zoo.prompt(4, 9)), **GREEDY))


def test_what_was_chosen_is_said() -> None:
    made = zoo.model("llama-gqa")
    assert zoo.paged(made, attention="pages").attention == "pages"
    gathering = zoo.paged(made, attention="gather")
    assert gathering.attention == "gather"
    assert "attention=gather (as chosen)" in repr(gathering)
    with pytest.raises(ArgumentValueError, match=r"for_model: attention: expected 'auto', 'pages' or 'gather', got 'flash'"):
        PagedCacheForTransformers.for_model(made, zoo.conf(), attention="flash")


def test_a_model_whose_attention_is_changed_later_gathers() -> None:
    made = zoo.build("Llama", {})
    cache, expected = zoo.paged(made), zoo.dynamic(made)
    made.set_attn_implementation("eager")
    for part in (zoo.prompt(6)["input_ids"], torch.tensor([[5]])):
        assert zoo.close(forward(made, part, cache), forward(made, part, expected))
    assert cache.state.odd == "the model's attention was changed since"
    assert attention_of(made) == "eager"
    assert zoo.paged(made).attention == "pages", "a new cache tries it anew"


def test_another_model_than_that_of_the_cache_gathers() -> None:
    made, cache = zoo.build("Llama", {}), zoo.paged(zoo.model("llama-gqa"))
    keep, expected = zoo.paged(made), zoo.dynamic(made)
    for part in (zoo.prompt(6)["input_ids"], torch.tensor([[5]])):
        assert zoo.close(forward(made, part, cache), forward(made, part, expected))
    assert cache.state.odd == "the cache was made for another model"
    assert keep.attention == "pages"


@pytest.mark.parametrize("layer", [0, 1])
def test_an_attention_that_passes_pages_by_is_an_error_and_never_a_wrong_token(layer: int) -> None:
    """It was tried when the cache was made; now it attends to the new tokens alone."""
    made = zoo.build("Llama", {})
    cache = zoo.paged(made)
    forward(made, zoo.prompt(6)["input_ids"], cache)
    attention = made.model.layers[layer].self_attn
    before = attention.forward

    def bypass(*args: Any, **told: Any) -> Any:
        attention.config = copy.copy(attention.config)
        attention.config._attn_implementation_internal = "sdpa"
        return before(*args, **{**told, "attention_mask": None})

    attention.forward = bypass
    text = rf"layer {layer} of LlamaForCausalLM: expected attention by .* interface, .*Fix: make the cache with attention='gather'"
    with pytest.raises(UnsupportedError, match=text):
        forward(made, torch.tensor([[5]]), cache)
    assert attention_of(made) == "sdpa"
    del attention.forward
    cache.reset()
    cache.state.manager.check_integrity()


def test_keys_of_a_pass_that_is_over_are_refused() -> None:
    made = zoo.build("Llama", {})
    cache, kept = zoo.paged(made), list[Any]()
    forward(made, zoo.prompt(6)["input_ids"], cache)
    update = type(cache.layers[0]).update

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(cache.layers[0]), "update", lambda layer, *args, **told: kept.append(update(layer, *args, **told)) or kept[-1])
        forward(made, torch.tensor([[5]]), cache)
    keys, values = kept[0]
    query = torch.zeros(1, 4, 1, 8)
    with pytest.raises(UnsupportedError, match="expected keys that the cache returned in this pass, got those of another pass"):
        attend(made.model.layers[0].self_attn, query, keys, values, None)


def test_arguments_that_nobody_knows_are_left_to_the_models_own_attention() -> None:
    """A new argument of a coming version, or of a model with code of its own."""
    made = zoo.build("Llama", {})
    caches, seen = (zoo.dynamic(made), zoo.paged(made)), list[Any]()

    def halved(module: Any, query: torch.Tensor, *args: Any, temperature: float = 1.0, **told: Any) -> Any:
        seen.append(temperature)
        return AttentionInterface()["sdpa"](module, query / temperature, *args, **told)

    AttentionInterface.register("halved", halved)
    made.config._attn_implementation_internal = "halved"
    caches = zoo.dynamic(made), zoo.paged(made)
    assert caches[1].attention == "gather", "it has no masks"
    made.config._attn_implementation_internal = "sdpa"
    own = zoo.paged(made)
    expected = zoo.dynamic(made)
    for part in (zoo.prompt(6)["input_ids"], torch.tensor([[5]])):
        assert zoo.close(forward(made, part, expected, position_bias=None), forward(made, part, own, position_bias=None))
    assert own.state.odd == ""


def test_a_trial_is_made_once_for_a_model() -> None:
    made = zoo.build("Llama", {})
    passes = list[int]()
    hook = made.register_forward_pre_hook(lambda module, args, told: passes.append(told["input_ids"].shape[1]), with_kwargs=True)
    caches = [zoo.paged(made) for _ in range(3)]
    hook.remove()
    assert passes.count(2) == 2, "in three passes each, on pages and on Transformers' own cache"
    assert passes.count(1) == 3 + 2
    assert {cache.attention for cache in caches} == {"pages"}
    assert [former_of(config) for config in configs_of(made)] == ["sdpa"]
