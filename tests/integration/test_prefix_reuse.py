"""Prefixes over many calls: what is found, what is stored, who shares it, and what makes room."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from integration import zoo
from integration.prefixes import Watched, assert_same, longer, padded, reusing, text
from kvdock import Runtime
from kvdock.errors import OutOfBlocksError
from kvdock.plugin import KVDOCK_API
from kvdock.plugins.registry import Registry
from kvdock.prefix import NaivePrefixCache, RadixPrefixCache
from opskit import active
from support_plugins import module

GREEDY = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}


class Forced(LogitsProcessor):
    """Makes each row of a batch end after so many tokens."""

    def __init__(self, prompt: int, *lengths: int) -> None:
        self.prompt, self.lengths = prompt, lengths

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, zoo.SMALL["eos_token_id"]] = -torch.inf
        for row, length in enumerate(self.lengths):
            if ids.shape[1] - self.prompt == length - 1:
                scores[row] = -torch.inf
                scores[row, zoo.SMALL["eos_token_id"]] = 0
        return scores


class Counter:
    """Counts the tokens that a model computes."""

    def __init__(self, model: Any) -> None:
        self.passes: list[tuple[int, int]] = []
        embedding = model.get_input_embeddings()
        self.handle = embedding.register_forward_hook(lambda module, args, output: self.passes.append(tuple(args[0].shape)))

    def __enter__(self) -> list[tuple[int, int]]:
        return self.passes

    def __exit__(self, *_: object) -> None:
        self.handle.remove()


def test_only_what_is_not_cached_is_computed() -> None:
    watched = Watched("llama-gqa")
    with Counter(watched.model) as passes:
        watched.generate(padded(text(18)), **GREEDY)
        watched.generate(padded(text(18)), **GREEDY)
    assert passes == [(1, 18), *[(1, 1)] * 5, (1, 2), *[(1, 1)] * 5]
    usage = watched.cache.usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (18, 16)
    assert watched.prefix.stats.hit_rate == 16 / 36


def test_a_prompt_for_beams_is_computed_once_when_it_is_computed_first() -> None:
    watched = Watched("llama-gqa")
    inputs, beams = padded(text(19), text(19, 2)), {**GREEDY, "num_beams": 4}
    with Counter(watched.model) as passes:
        watched.generate(inputs, max_new_tokens=1)
        got = watched.generate(inputs, **beams)
    assert passes == [(2, 19), (8, 3), *[(8, 1)] * 5]
    assert_same(watched.without(inputs, **beams), got, greedy=False)
    assert watched.cache.usage.blocks <= 2 * 4 + 8 * 2, "four blocks of each prompt are there once"


def test_turns_of_a_chat_compute_their_new_tokens_only() -> None:
    watched = Watched("llama-gqa")
    inputs, computed = padded(text(10)), []
    for turn in range(6):
        before = inputs["input_ids"].shape[1]
        out = watched.same(inputs, **GREEDY).sequences
        computed.append(before - watched.cached)
        inputs = longer(out, 5 + turn, 9, 12)
    assert computed == [10, *[4 + (10 + 9 * turn - 4) % 4 for turn in range(1, 6)]], (
        "one of the answer, three new ones, and a part of a block"
    )
    assert watched.stored_texts() == [out[0, : (out.shape[1] - 1) // 4 * 4].tolist()], "one path, no copies"


def test_questions_about_one_text_share_it() -> None:
    watched = Watched("llama-gqa", block_size=16)
    about = text(70)
    for index in range(4):
        watched.same(padded([*about, *text(7, 10 + index)]), **GREEDY)
        assert watched.cached == (64 if index else 0)
    stats = watched.prefix.stats
    assert (stats.lookup_tokens, stats.hit_tokens) == (4 * 77, 3 * 64)


@pytest.mark.parametrize("block_size", [1, 4, 9])
def test_a_full_hit_leaves_at_least_one_token(block_size: int) -> None:
    watched = Watched("llama-gqa", block_size=block_size)
    for length in (36, 36, 18, 1, 2, block_size, block_size + 1):
        watched.same(padded(text(36)[:length]), **GREEDY)
        assert watched.cached <= length - 1
    watched.same(padded(text(36)), **GREEDY)
    assert watched.cached == 35 // block_size * block_size


def test_rows_of_one_batch_that_are_equal_are_stored_once() -> None:
    watched = Watched("llama-gqa")
    watched.same(padded(text(12), text(12), text(12)), **GREEDY)
    assert len(watched.stored) == 17 // 4
    watched.same(padded(text(12), text(12), text(12)), **GREEDY)
    assert watched.cached == 3 * 8
    assert watched.cache.usage.blocks == 4 + 3, "the stored blocks are shared, what is behind them is each row's own"


def test_all_rows_have_what_the_shortest_hit_allows() -> None:
    watched = Watched("llama-gqa")
    watched.same(padded(text(20)), **GREEDY)
    watched.same(padded(text(12, 2)), **GREEDY)
    watched.same(padded(text(20), [*text(12, 2), *text(8, 3)]), **GREEDY)
    assert watched.cached == 12 + 12
    watched.same(padded(text(20), text(20, 9)), **GREEDY)
    assert watched.cached == 0, "one row knows nothing"
    watched.same(padded(text(20), text(20, 9)[:12]), **GREEDY)
    assert watched.cached == 16 + 8, "row 0 has 16, row 1 has 8 behind 8 of padding: of its 12 tokens one is left, so two blocks"


def test_padding_of_any_length_finds_and_stores() -> None:
    """All rows go on at one place: where that is in the middle of a cached block, the block is copied."""
    watched = Watched("llama-gqa")
    batch = padded(text(20), text(17, 2))
    expected = [watched.without(padded(row), **GREEDY).sequences[0] for row in (text(20), text(17, 2))]
    for cached in (0, 16 + 13):
        watched.same(batch, **GREEDY)
        assert watched.cached == cached
    assert watched.stored_texts() == sorted([expected[0][:24].tolist(), expected[1][:20].tolist()])
    watched.same(padded(text(20, 3)[:19]), **GREEDY)
    watched.same(padded(text(20), text(20, 3)[:19]), **GREEDY)
    assert watched.cached == 16 + 15
    watched.same(padded(text(20), text(17, 2), text(7, 4)), **GREEDY)
    assert watched.cached == 13 + 10, "row 2 is padding up to 13"


def test_a_batch_of_padding_only_up_to_its_past() -> None:
    """The longest row is no longer there: everything that the others have in common is padding."""
    watched = Watched("llama-gqa")
    inputs = padded([0] * 20, text(12), text(7, 2))
    inputs = {name: value[1:] for name, value in inputs.items()}
    watched.same(inputs, **GREEDY)
    assert (watched.cached, watched.cache.state.bound.past) == (0, 8)
    watched.same(inputs, **GREEDY)
    assert (watched.cached, watched.cache.state.bound.past) == (8 + 3, 16), "row 0 has found 8, so row 1 needs 3 of the 4 that it has"


def test_padding_is_read_as_zeros_and_needs_no_block() -> None:
    """NaN in a masked place would be NaN in every result."""
    watched = Watched("llama-gqa", num_blocks=40)
    inputs = padded(text(20), text(12, 2))
    expected = watched.generate(inputs, **GREEDY)
    for _ in range(3):
        watched.cache.reset()
        watched.poison_free_blocks()
        got = watched.generate(inputs, **GREEDY)
        assert watched.cached == 16 + 8
        assert_same(expected, got, greedy=True)
        assert not watched.cache.layers[0].keys[1, :, :8].any()
        assert len(watched.cache.state.batch.sequences[1].block_table()) == 5
    watched.check()


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["greedy", "beams", "lookup"])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_what_free_blocks_hold_does_not_matter(way: dict[str, Any], name: str) -> None:
    if "prompt_lookup_num_tokens" in way and name in zoo.WINDOWED and not zoo.CROPS_WINDOWS:
        pytest.skip("DynamicCache of this version cannot do it")
    watched = Watched(name, num_blocks=48)
    for _ in range(3):
        watched.poison_free_blocks()
        watched.same(padded(text(21)), **GREEDY, **way)


def test_namespaces_never_share() -> None:
    watched = Watched("llama-gqa")
    spaces: list[Any] = [(), ("a",), ("b",), ("a", 1), ("a", True), ("a", "1"), (("a",),)]
    for space in spaces:
        watched.same(padded(text(18)), namespace=space, **GREEDY)
        assert watched.cached == 0
    for space in reversed(spaces):
        watched.same(padded(text(18)), namespace=space, **GREEDY)
        assert watched.cached == 16
    assert len(watched.stored) == len(spaces) * (23 // 4)


def test_naive_finds_nothing_and_keeps_nothing() -> None:
    cache = reusing(zoo.model("llama-gqa"), prefix="naive")
    assert isinstance(cache.prefix, NaivePrefixCache)
    expected = zoo.model("llama-gqa").generate(**padded(text(18)), **GREEDY)
    for _ in range(2):
        out = zoo.model("llama-gqa").generate(**cache.bind(**padded(text(18))), **GREEDY)
        cache.commit(out)
        assert torch.equal(out, expected)
        assert cache.usage.cached_tokens == 0
    cache.reset()
    assert cache.state.manager.allocator.num_used == 0


def test_a_plugins_prefix_cache_by_name() -> None:
    class Mine(RadixPrefixCache):
        pass

    registry = Registry()
    registry.register(module("acme", kvdock_prefix_caches=lambda: {"mine": Mine}, KVDOCK_API=KVDOCK_API), "acme")
    with active(Runtime(registry)):
        cache = reusing(zoo.model("llama-gqa"), prefix="mine", block_size=8)
    assert isinstance(cache.prefix, Mine)
    assert cache.prefix.block_size == 8
    cache.commit(zoo.model("llama-gqa").generate(**cache.bind(**padded(text(18))), **GREEDY))
    cache.bind(**padded(text(18)))
    assert cache.usage.cached_tokens == 16


def test_the_tokens_of_a_row_that_ended_are_stored_and_the_padding_behind_is_not() -> None:
    watched = Watched("llama-gqa", block_size=1)
    inputs = padded(text(9), text(9, 2), text(9, 3))
    out = watched.generate(inputs, max_new_tokens=7, logits_processor=LogitsProcessorList([Forced(9, 2, 5, 99)]))
    sequences = out.sequences.tolist()
    assert sequences[0][10:] == [60, 0, 0, 0, 0, 0], "a row that ended is fed padding"
    assert watched.stored_texts() == sorted([sequences[0][:11], sequences[1][:14], sequences[2][:15]])
    watched.check()


@pytest.mark.parametrize("by", ["bind", "config", "model"])
def test_what_ends_a_sequence_is_asked_of_the_call_and_of_the_model(by: str) -> None:
    watched = Watched("llama-gqa", block_size=1)
    inputs, stop = padded(text(9)), watched.without(padded(text(9)), **GREEDY).sequences[0, 11].item()
    if by == "bind":
        bound = watched.cache.bind(**inputs, eos_token_id=[3, stop])
    elif by == "config":
        bound = watched.cache.bind(**inputs, generation_config=GenerationConfig(eos_token_id=stop, pad_token_id=0, do_sample=False))
    else:
        bound = watched.cache.bind(**inputs)
    settings = GREEDY if by == "model" else {"do_sample": False, "max_new_tokens": 6}
    out = watched.model.generate(**bound, **settings)
    out = torch.cat([out, torch.zeros(1, 15 - out.shape[1], dtype=torch.long)], dim=1)
    watched.cache.commit(out[:, : watched.cache.get_seq_length() + 1])
    assert [len(stored) for stored in watched.stored_texts()] == [14 if by == "model" else 11]
    watched.check()


def test_a_stop_in_the_prompt_ends_nothing() -> None:
    """Templates of chats end each turn with it."""
    watched = Watched("llama-gqa", block_size=1)
    prompt = [*text(5), 60, *text(5, 2), 60, *text(3, 3)]
    watched.same(padded(prompt), **GREEDY)
    assert [len(stored) for stored in watched.stored_texts()] == [15 + 5]


def test_of_beams_only_prompts_are_stored() -> None:
    """The rows of the table went on from one another; what is in them cannot be told from the output."""
    watched = Watched("llama-gqa", block_size=1)
    inputs = padded(text(11), text(7, 2))
    watched.same(inputs, **GREEDY, num_beams=3, num_return_sequences=2)
    assert watched.stored_texts() == sorted([text(11), text(7, 2)])
    watched.same(inputs, **GREEDY, num_beams=3)
    assert watched.cached == 10 + 6


def test_rows_that_were_chosen_are_known_by_their_prompts() -> None:
    """As an engine of its own may do: repeat, reorder, drop."""
    watched = Watched("llama-gqa")
    inputs = padded(text(12), text(12, 2), text(12, 3))
    cache = watched.cache
    out = watched.model.generate(**cache.bind(**inputs), **GREEDY)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([5, 1, 0]))
    cache.commit(out)
    assert watched.stored_texts() == sorted([text(12), text(12, 3)]), "the second prompt has no row any more"
    watched.check()


def test_rows_that_were_chosen_before_anything_was_computed() -> None:
    watched = Watched("llama-gqa")
    watched.same(padded(text(12)), **GREEDY)
    inputs = padded(text(12), [*text(8), 5, 6, 7, 8])
    watched.cache.bind(**inputs)
    watched.cache.batch_select_indices(torch.tensor([1, 0]))
    stored = dict(watched.stored)
    watched.cache.commit(inputs["input_ids"])
    assert watched.stored == stored, "what they found is there, and no more"
    watched.check()


def test_rows_in_their_own_order_are_not_reordered() -> None:
    watched = Watched("llama-gqa")
    out = watched.model.generate(**watched.cache.bind(**padded(text(9), text(9, 2))), **GREEDY)
    watched.cache.reorder_cache(torch.tensor([0, 1]))
    watched.cache.commit(out)
    assert [len(stored) for stored in watched.stored_texts()] == [12, 12]


def test_without_commit_nothing_is_stored() -> None:
    watched = Watched("llama-gqa")
    for _ in range(3):
        watched.same(padded(text(18)), commit=False, **GREEDY)
        assert (watched.cached, watched.stored) == (0, {})


def test_a_loop_of_ones_own() -> None:
    """Forward passes by hand: the first leaves out what is cached, and logits are those of the rest."""
    watched = Watched("llama-gqa")
    watched.same(padded(text(18)), **GREEDY)
    bound = watched.cache.bind(**padded(text(18)))
    with torch.no_grad():
        logits = watched.model(**bound).logits
        expected = watched.model(**padded(text(18))).logits
    assert logits.shape[1] == 2
    torch.testing.assert_close(logits, expected[:, -2:], rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        watched.model(input_ids=torch.tensor([[7, 8]]), **{zoo.CACHE_KEYWORD: watched.cache})
    watched.cache.commit([[*text(18), 7, 8]])
    assert [*text(18), 7, 8] in watched.stored_texts()
    watched.check()


def test_a_first_pass_over_more_than_the_rest() -> None:
    """Not the prompt again: what is left of it, and more tokens than are cached."""
    watched = Watched("llama-gqa")
    watched.same(padded(text(6)), **GREEDY)
    watched.cache.bind(**padded(text(6)))
    with torch.no_grad():
        watched.model(input_ids=torch.tensor([[*text(6)[4:], *text(9, 2)]]), **{zoo.CACHE_KEYWORD: watched.cache})
    watched.cache.commit([[*text(6), *text(9, 2)]])
    assert [*text(6), *text(9, 2)][:12] in watched.stored_texts()
    watched.check()


@pytest.mark.parametrize("told_by", ["mask", "positions", "ids"])
def test_chunks_that_begin_with_what_is_cached_are_computed_again(told_by: str) -> None:
    """Chunked prefill knows of no past, up to Transformers 5.18."""
    watched = Watched("llama-gqa")
    watched.same(padded(text(18)), **GREEDY)
    bound = watched.cache.bind(**padded(text(18), text(18)))
    ids, mask = bound.pop("input_ids"), bound.pop("attention_mask")
    with torch.no_grad():
        for start in (0, 7, 14):
            told = {
                "mask": {"attention_mask": mask[:, : start + 7]},
                "positions": {"position_ids": torch.arange(start, min(start + 7, 18))[None]},
            }
            got = watched.model(input_ids=ids[:, start : start + 7], **told.get(told_by, {}), **bound).logits
        expected = watched.model(**padded(text(18), text(18))).logits
    assert watched.cached == 0
    torch.testing.assert_close(got[:, -1], expected[:, -1], rtol=1e-3, atol=1e-4)
    watched.cache.commit(ids)
    watched.check()


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("settings", [{}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 2}], ids=["plain", "lookup", "chunks"])
def test_one_token_over_and_over(settings: dict[str, Any], told: bool) -> None:
    """Which part of the prompt a pass is over cannot be told from its tokens."""
    watched = Watched("llama-gqa")
    inputs = padded([7] * 18)
    watched.generate(inputs, **GREEDY)
    if told:
        watched.same(inputs, **GREEDY, **settings)
    else:
        bound = watched.cache.bind(**inputs)
        with torch.no_grad():
            for _ in range(2):
                watched.model(input_ids=torch.tensor([[7]]), **{zoo.CACHE_KEYWORD: bound[zoo.CACHE_KEYWORD]})
        watched.cache.commit(inputs["input_ids"])
        watched.check()


def test_ids_without_the_keyword_too() -> None:
    watched = Watched("llama-gqa")
    watched.same(padded(text(18)), **GREEDY)
    bound = watched.cache.bind(**padded(text(18)))
    with torch.no_grad():
        assert watched.model(bound.pop("input_ids"), **bound).logits.shape[1] == 2


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window"])
def test_an_assistant_model_drafts(name: str) -> None:
    if name in zoo.WINDOWED and not zoo.CROPS_WINDOWS:
        pytest.skip("DynamicCache of this version cannot do it")
    watched, assistant = Watched(name), zoo.model("llama-mqa")
    for hits in (0, 16, 16):
        watched.same(padded(text(18)), **GREEDY, assistant_model=assistant)
        assert watched.cached == hits


def test_a_model_with_the_hook_can_be_copied_and_pickled() -> None:
    made = zoo.build("Llama", {})
    for _ in range(3):
        cache = reusing(made)
    assert len(made._forward_pre_hooks) == 1
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):  # noqa: S301 - what was just dumped
        assert len(other._forward_pre_hooks) == 1
        assert torch.equal(other.generate(**cache.bind(**padded(text(9))), **GREEDY), made.generate(**padded(text(9)), **GREEDY))
    zoo.paged(fresh := zoo.build("Llama", {}))
    assert not fresh._forward_pre_hooks, "without a prefix cache the model is left alone"


def test_when_the_pool_is_full_what_was_used_least_recently_makes_room() -> None:
    watched = Watched("llama-gqa", num_blocks=16)
    for seed in range(8):
        watched.same(padded(text(17, seed)), **GREEDY)
        watched.same(padded(text(17, 0)), **GREEDY)
        assert watched.cached == 16, "the first one is used again and again"
    assert watched.prefix.stats.evicted_tokens > 0
    watched.same(padded(text(17, 7)), **GREEDY)
    assert watched.cached == 16
    watched.same(padded(text(17, 4)), **GREEDY)
    assert watched.cached == 0


def test_a_request_larger_than_the_pool_fails_and_the_next_works() -> None:
    watched = Watched("llama-gqa", num_blocks=8)
    watched.same(padded(text(17)), **GREEDY)
    kept = dict(watched.stored)
    with pytest.raises(OutOfBlocksError, match=r"at most 8 blocks .*, got 10. Fix: reset\(\) copies"):
        watched.generate(padded(text(40, 2)), **GREEDY)
    watched.check()
    assert watched.stored == kept, "nothing is evicted for what fails all the same"
    with pytest.raises(OutOfBlocksError):
        watched.generate(padded(text(20, 3)), do_sample=False, max_new_tokens=40, min_new_tokens=40)
    watched.check()
    watched.same(padded(text(17)), **GREEDY)


def test_a_live_batch_is_never_evicted() -> None:
    """Its prefixes are locked, found and stored ones alike, so what is evicted is free at once."""
    watched = Watched("llama-gqa", num_blocks=16)
    watched.same(padded(text(17)), **GREEDY)  # 22 tokens: 5 blocks stored, and one of the table's own
    manager = watched.cache.state.manager
    with pytest.raises(OutOfBlocksError):
        manager.begin(text(4 * 11, 9))
    assert watched.prefix.size_info.evictable_size == 0
    other = watched.copy()
    out = watched.model.generate(**other.bind(**padded(text(17))), **GREEDY)
    other.commit(out)
    watched.cache.reset()
    assert watched.prefix.size_info.evictable_size == 0, "the copy has it too"
    watched.check()
    other.reset()
    assert watched.prefix.size_info.evictable_size == 20
    assert manager.begin(text(4 * 16, 9)).num_tokens == 64
    assert not watched.stored


def test_an_aborted_generate_stores_nothing_and_the_next_bind_works() -> None:
    watched = Watched("llama-gqa")

    def abort(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 21:
            raise KeyboardInterrupt
        return scores

    with pytest.raises(KeyboardInterrupt):
        watched.generate(padded(text(18)), **GREEDY, logits_processor=[abort])
    assert not watched.stored
    watched.check()
    watched.same(padded(text(18)), **GREEDY)
    assert watched.cached == 0


def test_a_pass_that_fails_in_the_middle_can_be_tried_again() -> None:
    """Also with another number of beams: the rows are taken from the prompts anew."""
    watched = Watched("llama-gqa")
    inputs = padded(text(18), text(18, 2))
    watched.same(inputs, **GREEDY)

    def fail(*args: object) -> None:
        raise RuntimeError("broken")

    handle = watched.model.model.layers[1].mlp.register_forward_pre_hook(fail)
    bound = watched.cache.bind(**inputs)
    with pytest.raises(RuntimeError, match="broken"):
        watched.model.generate(**bound, **GREEDY, num_beams=3)
    handle.remove()
    watched.cache.truncate(16)
    for beams in (2, 1):
        bound = watched.cache.bind(**inputs)
        got = watched.model.generate(**bound, **GREEDY, num_beams=beams)
        assert torch.equal(got, watched.model.generate(**inputs, **GREEDY, num_beams=beams))
    watched.check()


def test_copies_share_the_prefix_cache_and_keep_what_they_hold() -> None:
    watched = Watched("llama-gqa", num_blocks=32)
    first = watched.same(padded(text(18)), **GREEDY).sequences
    watched.same(padded(text(18)), commit=False, **GREEDY)
    other = watched.copy()
    assert other.prefix is watched.prefix
    watched.same(padded(text(30, 5)), **GREEDY)
    assert watched.prefix.num_locks == 1 + 1, "one for each row"
    watched.check()
    expected = watched.model.generate(**longer(first, 5, 9), **GREEDY)
    out = watched.model.generate(**longer(first, 5, 9), **{zoo.CACHE_KEYWORD: other}, **GREEDY)
    assert torch.equal(out, expected)
    other.commit(out)
    watched.check()
    del other, watched.copies[:]
    gc.collect()
    watched.cache.reset()
    assert watched.prefix.num_locks == 0
    watched.check()


def test_a_copy_made_before_the_commit_keeps_its_blocks_from_being_evicted() -> None:
    watched = Watched("llama-gqa", num_blocks=12)
    out = watched.generate(padded(text(18)), commit=False, **GREEDY)
    watched.copy()
    watched.cache.commit(out)
    watched.cache.reset()
    assert watched.prefix.size_info.evictable_size == 0
    watched.check()
    watched.copies.clear()
    gc.collect()
    watched.cache.reset()
    assert watched.prefix.size_info.evictable_size == 20


def test_a_cache_that_is_dropped_gives_its_locks_and_rows_back() -> None:
    watched = Watched("llama-gqa")
    watched.same(padded(text(18)), **GREEDY)
    other = watched.copy()
    watched.model.generate(**other.bind(**padded(text(18))), **GREEDY)
    locks = watched.prefix.num_locks
    watched.copies.clear()
    del other
    gc.collect()
    watched.cache.reset()
    assert (locks, watched.prefix.num_locks) == (2, 0)
    assert watched.cache.state.manager.allocator.num_used == len(watched.stored)
    watched.check()


def test_everything_can_be_forgotten() -> None:
    watched = Watched("llama-gqa")
    watched.same(padded(text(18)), namespace=("a",), **GREEDY)
    watched.generate(padded(text(18)), commit=False, **GREEDY)
    watched.cache.forget_prefixes()
    watched.check()
    assert (watched.stored, watched.cache.get_seq_length()) == ({}, 23)
    watched.same(padded(text(18)), **GREEDY)
    assert watched.cached == 0
    watched.same(padded(text(18)), **GREEDY)
    assert watched.cached == 16
    watched.cache.forget_prefixes()
    watched.cache.reset()
    assert watched.cache.state.manager.allocator.num_used == 0
    watched.same(padded(text(18)), namespace=("a",), **GREEDY)
    assert watched.cached == 0


def test_a_batch_goes_on_without_bind_and_is_committed_as_one() -> None:
    watched = Watched("llama-gqa")
    first = watched.generate(padded(text(18)), commit=False, **GREEDY).sequences
    inputs = longer(first, 5, 9)
    out = watched.model.generate(**inputs, **{zoo.CACHE_KEYWORD: watched.cache}, **GREEDY)
    assert torch.equal(out, watched.model.generate(**inputs, **GREEDY))
    watched.cache.commit(out)
    assert [len(stored) for stored in watched.stored_texts()] == [28]
    watched.check()


def test_rows_may_be_cut_behind_their_prompts_before_they_are_committed() -> None:
    watched = Watched("llama-gqa")
    out = watched.generate(padded(text(18)), commit=False, **GREEDY).sequences
    watched.cache.truncate(20)
    watched.cache.commit(out[:, :20])
    assert [len(stored) for stored in watched.stored_texts()] == [20]
    watched.check()


def test_generate_in_another_thread() -> None:
    """As with a streamer: bound here, generated there, in a pool that must make room, and committed here."""
    watched = Watched("llama-gqa", num_blocks=12)
    for seed in (1, 2, 3, 1, 2):
        bound = watched.cache.bind(**padded(text(18, seed)))
        outs: list[Any] = []
        thread = threading.Thread(target=lambda bound=bound, outs=outs: outs.append(watched.model.generate(**bound, **GREEDY)))
        thread.start()
        thread.join()
        watched.cache.commit(outs[0])
        assert torch.equal(outs[0], watched.model.generate(**padded(text(18, seed)), **GREEDY))
        watched.check()
    assert watched.prefix.stats.evicted_tokens > 0


def test_a_cache_used_in_another_thread_from_begin_to_end() -> None:
    watched = Watched("llama-gqa")
    watched.same(padded(text(18)), **GREEDY)
    errors: list[Any] = []

    def work() -> None:
        try:
            watched.same(padded(text(18)), **GREEDY)
            assert watched.cached == 16
            copy.deepcopy(watched.cache).reset()
            watched.cache.reset()
        except BaseException as error:
            errors.append(error)
            raise

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    watched.same(padded(text(18)), **GREEDY)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_modes(mode: Any) -> None:
    watched = Watched("llama-gqa")
    inputs = padded(text(20), text(12, 2))
    with mode():
        watched.generate(inputs, **GREEDY)
    watched.same(inputs, **GREEDY)
    assert watched.cached == 16 + 8
    with mode():
        watched.same(inputs, **GREEDY)
    watched.check()


def test_a_mask_is_made_where_there_is_none() -> None:
    watched = Watched("llama-gqa")
    ids = torch.tensor([text(18)])
    bound = watched.cache.bind(input_ids=ids)
    assert bound["attention_mask"].tolist() == [[1] * 18]
    watched.cache.commit(watched.model.generate(**bound, **GREEDY))
    watched.cache.bind(input_ids=ids)
    assert watched.cached == 16


def test_what_is_bound_is_not_aliased() -> None:
    watched = Watched("llama-gqa")
    inputs = padded(text(18))
    bound = watched.cache.bind(**inputs)
    out = watched.model.generate(**bound, **GREEDY)
    expected = out.clone()
    inputs["input_ids"].fill_(3)
    watched.cache.commit(out)
    out.fill_(4)
    assert watched.stored_texts() == [expected[0, :20].tolist()]
