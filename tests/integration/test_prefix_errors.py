"""Prefix reuse: what is refused, clearly and with nothing changed, since a wrong prefix would be silently wrong text."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from integration import zoo
from integration.prefixes import Watched, longer, padded, reusing, text
from kvdock.errors import ArgumentTypeError, ArgumentValueError, KVDockError, OutOfBlocksError, UnsupportedError, WrongThreadError
from kvdock.integrations.transformers import PagedCacheForTransformers

GREEDY = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
MASK = [[1] * 18]


def seen(watched: Watched) -> Any:
    """Everything that a refused call must leave alone."""
    cache, prefix = watched.cache, watched.prefix
    found = (
        cache.usage,
        zoo.table(cache).tolist(),
        list(cache.state.lengths.of),
        dict(watched.stored),
        prefix.size_info,
        prefix.num_locks,
        prefix.stats,
        cache.state.bound and cache.state.bound.closed,
    )
    watched.check()
    return found


def refused(watched: Watched, call: Callable[[], object], error: type[KVDockError], match: str) -> KVDockError:
    """Make a call that raises and changes nothing; afterwards the cache works."""
    before = seen(watched)
    with pytest.raises(error, match=match) as caught:
        call()
    assert seen(watched) == before
    return caught.value


@pytest.fixture
def watched() -> Watched:
    """A cache with one prompt stored, and the batch that stored it."""
    made = Watched("llama-gqa")
    made.generate(padded(text(18)), **GREEDY)
    return made


def rows(*tokens: int, mask: Any = MASK) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([[*text(18 - len(tokens)), *tokens]]), "attention_mask": torch.tensor(mask)}


BAD: dict[str, tuple[dict[str, Any], type[KVDockError], str]] = {
    "no ids": (
        {"attention_mask": torch.ones(1, 4)},
        ArgumentValueError,
        r"input_ids: expected token ids of shape .*, got none",
    ),
    "one dimension": ({"input_ids": torch.arange(4)}, ArgumentValueError, r"input_ids: .*got shape \(4,\). Fix: pass the ids of whole"),
    "no rows": ({"input_ids": torch.empty(0, 4, dtype=torch.long)}, ArgumentValueError, r"got shape \(0, 4\)"),
    "no tokens": ({"input_ids": torch.empty(2, 0, dtype=torch.long)}, ArgumentValueError, r"got shape \(2, 0\)"),
    "floats": ({"input_ids": torch.ones(1, 4)}, ArgumentTypeError, "input_ids: expected integers, got float32"),
    "mask of another shape": (
        rows(mask=[[1] * 24]),
        ArgumentValueError,
        r"attention_mask: expected shape \(1, 18\), as input_ids, got shape \(1, 24\). Fix: pass whole prompts",
    ),
    "padding on the right": (rows(mask=[[1] * 15 + [0] * 3]), ArgumentValueError, "padding on the left only, .*Fix: .*padding_side='left'"),
    "a hole": (rows(mask=[[1] * 9 + [0] + [1] * 8]), ArgumentValueError, "got 0s behind or among the tokens of a row"),
    "padding without a mask": (
        {"input_ids": torch.tensor([[0, 5, 6]])},
        ArgumentValueError,
        "attention_mask: expected one, since",
    ),
    "positions": (
        {**rows(), "position_ids": torch.arange(18)[None]},
        ArgumentValueError,
        "bind: position_ids: expected no tensors but input_ids and attention_mask.*got position_ids. Fix: make a cache without prefix=",
    ),
    "pixels": (
        {**rows(), "pixel_values": torch.ones(1, 3)},
        ArgumentValueError,
        "got pixel_values. Fix: make a cache without",
    ),
    "embeddings": ({**rows(), "inputs_embeds": torch.ones(1, 18, 32)}, ArgumentValueError, "got inputs_embeds"),
    "embeddings only": (
        {"inputs_embeds": torch.ones(1, 18, 32)},
        ArgumentValueError,
        "bind: inputs_embeds: expected no tensors but input_ids",
    ),
    "images in a list": ({**rows(), "pixel_values": [torch.ones(1, 3)]}, ArgumentValueError, "got pixel_values"),
    "images in a dict": ({**rows(), "images": {"a": (1, torch.ones(1, 3))}}, ArgumentValueError, "got images"),
    "an array": ({**rows(), "audio": np.ones(3)}, ArgumentValueError, "got audio"),
    "images in a namespace": (
        {**rows(), "pixel_values": torch.ones(1, 3), "namespace": ("image", "a")},
        ArgumentValueError,
        "pixel_values",
    ),
    "an adapter": (
        {**rows(), "adapter_names": ["b"]},
        ArgumentValueError,
        r"adapter_names: expected one adapter for all rows, and a namespace.*got b in namespace \(\). Fix: .*namespace=\('adapter', 'b'\)",
    ),
    "two adapters": (
        {**rows(), "adapter_names": ["b", "a"], "namespace": ("x",)},
        ArgumentValueError,
        r"got a, b in namespace \('x',\). Fix: bind the rows of one adapter at a time",
    ),
    "a namespace that is none": ({**rows(), "namespace": "tenant"}, ArgumentTypeError, "namespace: expected a tuple, got 'tenant'"),
    "a namespace of objects": ({**rows(), "namespace": (1.5,)}, ArgumentTypeError, "namespace: expected str, bytes, int"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_bound_changes_nothing(watched: Watched, case: str) -> None:
    inputs, error, match = BAD[case]
    refused(watched, lambda: watched.cache.bind(**inputs), error, match)
    watched.same(padded(text(18)), **GREEDY)
    assert watched.cached == 16


def test_what_changes_no_key_may_be_bound(watched: Watched) -> None:
    """Lists of settings, objects, and the prompt that guidance computes in a cache of its own."""
    settings = {**GREEDY, "negative_prompt_ids": torch.tensor([text(7, 3)]), "guidance_scale": 1.5, "bad_words_ids": [[3], [4, 5]]}
    expected = watched.model.generate(**padded(text(18)), **settings)
    out = watched.model.generate(**watched.cache.bind(**padded(text(18)), **settings))
    assert watched.cached == 16
    assert torch.equal(out, expected)
    watched.cache.commit(out)
    watched.check()


def test_one_adapter_in_a_namespace_of_its_own(watched: Watched) -> None:
    bound = watched.cache.bind(**padded(text(18), text(18, 2)), adapter_names=["a", "a"], namespace=("adapter", "a"))
    assert bound["adapter_names"] == ["a", "a"]
    assert watched.cached == 0


@pytest.mark.parametrize(
    ("value", "stops"),
    [(torch.tensor(3), [3]), (torch.tensor([3, 60]), [3, 60]), (np.array([3]), [3]), (3, [3]), ([3, 60], [3, 60]), ((3,), [3])],
)
def test_what_ends_sequences_in_any_form(watched: Watched, value: Any, stops: list[int]) -> None:
    watched.cache.bind(**padded(text(18)), eos_token_id=value)
    assert watched.cache.state.bound.prompts.stops.tolist() == stops


def test_a_padding_token_that_ends_sequences_hides_nothing() -> None:
    """As in many chat models: Transformers makes no mask from it either."""
    watched = Watched("llama-gqa")
    ids = torch.tensor([[5, 60, 6, 7]])
    assert watched.cache.bind(input_ids=ids, pad_token_id=60)["attention_mask"].tolist() == [[1, 1, 1, 1]]
    with pytest.raises(ArgumentValueError, match="padding token"):
        watched.cache.bind(input_ids=ids, pad_token_id=6)
    assert watched.cache.bind(input_ids=torch.tensor([[0, 6]]), eos_token_id=[0, 60])["attention_mask"].tolist() == [[1, 1]]


def test_commit_before_bind_and_twice() -> None:
    watched = Watched("llama-gqa")
    refused(
        watched,
        lambda: watched.cache.commit([[1, 2]]),
        ArgumentValueError,
        r"expected a batch that bind\(\) began.*got none. Fix: call out",
    )
    out = watched.generate(padded(text(18)), **GREEDY)
    refused(watched, lambda: watched.cache.commit(out), ArgumentValueError, "got one that is committed. Fix: .*then commit.* once")
    watched.cache.reset()
    refused(watched, lambda: watched.cache.commit(out), ArgumentValueError, "got none")


def test_commit_of_prompts_that_were_cut() -> None:
    """Something else may be behind the cut by now."""
    watched = Watched("llama-gqa")
    out = watched.generate(padded(text(18)), commit=False, **GREEDY)
    watched.cache.truncate(17)
    refused(watched, lambda: watched.cache.commit(out.sequences[:, :17]), ArgumentValueError, "whose prompts were cut to 17 tokens since")


OTHERS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "fewer rows": (lambda out: out[:1], "expected 2 rows, as in the cache, got 1. Fix: pass all"),
    "more rows": (lambda out: out.repeat(2, 1), "expected 2 rows, as in the cache, got 4"),
    "rows swapped": (lambda out: out.flip(0), "begin with the 18 tokens that were bound, padding included, got another beginning in row 0"),
    "another prompt": (lambda out: torch.cat([out[:, :3] + 1, out[:, 3:]], dim=1), "another beginning in row 0. Fix: commit what"),
    "another last row": (lambda out: torch.cat([out[:1], out[1:] * 0]), "another beginning in row 1"),
    "only what is new": (lambda out: out[:, 18:], "padding included, got too few tokens"),
    "another token behind the prompt": (
        lambda out: torch.cat([out[:, :20], out[:, 20:] + (out[:, 20:] < 30)], dim=1),
        r"the tokens that were computed, got another for token 2\d of row 0. Fix: commit what",
    ),
    "too long": (
        lambda out: torch.cat([out, out[:, :1]], dim=1),
        r"at most the 23 tokens that the cache holds, and one more, got 25 tokens. Fix: .*out\[:, :23\]",
    ),
    "one dimension": (lambda out: out[0], r"commit: out: expected token ids of shape \[rows, length\], got shape \(24,\)"),
    "nothing": (lambda out: None, "got none"),
    "rows of several lengths": (lambda out: [[1, 2], [3]], "got shape"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_cannot_be_committed_changes_nothing(case: str) -> None:
    watched = Watched("llama-gqa")
    watched.generate(padded(text(18)), **GREEDY)
    out = watched.generate(padded(text(18), text(18, 2)), commit=False, **GREEDY).sequences
    change, match = OTHERS[case]
    refused(watched, lambda: watched.cache.commit(change(out)), ArgumentValueError, match)
    refused(watched, lambda: watched.cache.commit(out.float()), ArgumentTypeError, "commit: out: expected integers, got float32")
    watched.cache.commit(out.tolist())
    watched.check()


def test_what_cannot_be_committed_of_beams() -> None:
    watched = Watched("llama-gqa")
    out = watched.generate(padded(text(18), text(18, 2)), commit=False, **GREEDY, num_beams=4, num_return_sequences=2).sequences
    refused(watched, lambda: watched.cache.commit(out[:3]), ArgumentValueError, "expected 2 rows, as in the cache, got 3")
    refused(watched, lambda: watched.cache.commit(out.flip(0)), ArgumentValueError, "another beginning in row 0")
    watched.cache.commit(out)
    assert watched.stored_texts() == sorted([text(18)[:16], text(18, 2)[:16]])


def test_what_was_not_computed_cannot_be_committed(watched: Watched) -> None:
    watched.cache.bind(**padded(text(18)))
    refused(watched, lambda: watched.cache.commit([text(18)]), ArgumentValueError, "expected at most the 16 tokens that the cache holds")


def test_a_pass_that_was_interrupted_cannot_be_committed(watched: Watched) -> None:
    inputs = padded(text(18, 4))
    bound = watched.cache.bind(**inputs)

    def fail(*args: object) -> None:
        raise RuntimeError("broken")

    handle = watched.model.model.layers[1].mlp.register_forward_pre_hook(fail)
    watched.model.model.layers[1].self_attn.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        watched.model.generate(**bound, **GREEDY)
    handle.remove()
    watched.model.model.layers[1].self_attn._forward_pre_hooks.clear()
    refused(watched, lambda: watched.cache.commit([text(18, 4)]), ArgumentValueError, "layers of one length, got lengths from 0 to 18")
    watched.same(inputs, **GREEDY)


def test_another_number_of_rows_than_was_bound(watched: Watched) -> None:
    for prompts in ([text(18), text(18)], [text(18, 5), text(18, 6)]):
        watched.cache.bind(**padded(*prompts))
        call = lambda: watched.model(input_ids=torch.tensor([[5]] * 3), **{zoo.CACHE_KEYWORD: watched.cache})  # noqa: E731 - short
        refused(watched, call, ArgumentValueError, r"a multiple of the 2 prompts that were bound, got 3. Fix: bind\(\)")
    watched.same(padded(text(18)), **GREEDY)


def test_rows_are_repeated_only_at_the_beginning(watched: Watched) -> None:
    call = lambda: watched.model(input_ids=torch.tensor([[5]] * 3), **{zoo.CACHE_KEYWORD: watched.cache})  # noqa: E731 - short
    refused(watched, call, ArgumentValueError, "batch size: expected 1, as in the 23 tokens that the cache holds, got 3")


def test_a_model_that_the_cache_was_not_made_for(watched: Watched) -> None:
    """It has no hook that leaves out what is cached, so a whole prompt must not be put behind itself."""
    other = zoo.build("Llama", {})
    assert torch.equal(other.generate(**watched.cache.bind(**rows()), **GREEDY), watched.model.generate(**rows(), **GREEDY))
    bound = watched.cache.bind(**rows())
    call = lambda: other(**bound)  # noqa: E731 - short
    refused(watched, call, ArgumentValueError, "first step: expected at most the 2 tokens that are not cached, got 18. Fix: call the model")
    with pytest.raises(ArgumentValueError, match="first step"):
        other.generate(**bound, **GREEDY, prompt_lookup_num_tokens=3)


def test_prompts_without_room_leave_the_cache_empty_and_usable_and_count_no_hits() -> None:
    watched = Watched("llama-gqa", num_blocks=16)
    inputs = padded(text(17), text(9, 2))
    watched.same(inputs, **GREEDY)
    watched.cache.reset()
    manager = watched.cache.state.manager
    others = manager.begin(text(32, 7)), manager.begin(text(4 * (16 - 8 - 7), 8))
    stats = watched.prefix.stats
    for _ in range(3):
        with pytest.raises(OutOfBlocksError, match=r"bind: input_ids: expected at most \d blocks to compute, .*Fix: reset\(\) copies"):
            watched.cache.bind(**padded(text(17), text(28, 2)))
        assert (watched.cache.get_seq_length(), watched.cache.state.bound) == (0, None)
    assert watched.prefix.stats == stats
    for seq in others:
        manager.abort(seq)
    watched.check()
    watched.same(inputs, **GREEDY)
    assert watched.cached > 0


def test_without_a_prefix_cache() -> None:
    cache = zoo.paged(zoo.model("llama-gqa"))
    assert cache.prefix is None
    cache.bind(**padded(text(5)), namespace=("a",))
    for call in (lambda: cache.commit([[1]]), cache.forget_prefixes):
        with pytest.raises(UnsupportedError, match=r"a prefix cache, got none. Fix: make the cache with for_model\(..., prefix='radix'\)"):
            call()
    assert (cache.usage.prompt_tokens, cache.usage.cached_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("prefix", "error", "match"),
    [
        ("trie", ArgumentValueError, "'trie'"),
        (3, ArgumentTypeError, "expected a name or a PrefixCache, got 3"),
        ("", ArgumentValueError, "''"),
    ],
)
def test_a_prefix_cache_that_nobody_brings(prefix: Any, error: type[KVDockError], match: str) -> None:
    with pytest.raises(error, match=match):
        reusing(zoo.model("llama-gqa"), prefix=prefix)


def test_blocks_too_large_for_a_prefix_cache() -> None:
    with pytest.raises(ArgumentValueError, match="1 to 512 tokens"):
        PagedCacheForTransformers.for_model(zoo.model("llama-gqa"), zoo.conf(block_size=513, num_blocks=2), prefix="radix")


def test_two_threads_at_once(watched: Watched) -> None:
    """One that looks at the prefix cache has it until it hands it over, and says so to the other."""
    stay, done = threading.Event(), threading.Event()

    def look() -> None:
        watched.prefix.match_prefix([1])
        done.set()
        stay.wait()

    thread = threading.Thread(target=look, name="looker")
    thread.start()
    done.wait()
    before = watched.cache.usage
    with pytest.raises(WrongThreadError, match=r"'looker'.*hand_over\(\)"):
        watched.cache.commit(watched.model.generate(**watched.cache.bind(**rows()), **GREEDY))
    stay.set()
    thread.join()
    assert before.prompt_tokens == 18
    watched.check()
    watched.same(rows(), **GREEDY)
    assert watched.cached == 16


def test_locks_of_other_threads_garbage_are_given_back_by_the_next_call(watched: Watched) -> None:
    """Finalizers run anywhere; this one runs in a thread that may not use the prefix cache."""
    copies = [watched.copy()]
    watched.model.generate(**copies[0].bind(**longer(torch.tensor([text(18)]), 5)), **GREEDY)
    watched.copies.clear()
    watched.prefix.match_prefix([1])
    locks = watched.prefix.num_locks
    thread = threading.Thread(target=copies.clear)
    thread.start()
    thread.join()
    assert watched.prefix.num_locks == locks == 2
    watched.cache.reset()
    assert watched.prefix.num_locks == 0
    assert np.array_equal(watched.prefix.stored_blocks(), sorted(watched.stored))
    watched.prefix.hand_over()
    watched.check()
