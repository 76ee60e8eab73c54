"""The example engine on tiny random models: the tokens of `generate()` without any cache, whatever else runs, and no block lost."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from support_docs import ROOT
from support_tiny_engine import EOS, MODELS, Engine, Request, ask, check_idle, generated, make, prompts, run, tiny, uncached

from tiny_engine.model import Decoder  # isort: skip
from tiny_engine.sampling import choose  # isort: skip
from tiny_engine.worker import Worker  # isort: skip


def requests(count: int, seed: int = 0, **settings: Any) -> list[Request]:
    return [ask(prompt, **{"max_tokens": 3 + 5 * number % 17, **settings}) for number, prompt in enumerate(prompts(count, seed))]


def check(engine: Engine, asked: list[Request], name: str = "llama") -> None:
    """Compare every token, and check that nothing is left behind."""
    for request in asked:
        assert request.tokens == uncached(name, request)
        new = request.tokens[request.prompt_len :]
        assert request.finish_reason == ("stop" if new[-1] == EOS else "length")
        assert EOS not in new[:-1]
        assert len(new) == request.max_tokens or new[-1] == EOS
    check_idle(engine)


def test_it_is_small_enough_to_read() -> None:
    lines = sum(path.read_text().count("\n") for path in (ROOT / "examples" / "engine").rglob("*.py"))
    assert 200 < lines <= 500


@pytest.mark.parametrize("name", MODELS)
def test_requests_that_come_at_different_times_get_the_tokens_of_generate(name: str) -> None:
    engine, asked = make(name), requests(8)
    run(engine, asked, every=2)
    check(engine, asked, name)
    assert len({tuple(request.tokens[request.prompt_len :]) for request in asked}) > 4, "the model says different things"


@pytest.mark.parametrize("seed", range(4))
def test_a_pool_that_runs_out_in_the_middle_of_a_generation(seed: int) -> None:
    engine, asked = make(num_blocks=14, max_tokens=12 - seed), requests(8, seed, max_tokens=24)
    run(engine, asked)
    check(engine, asked)
    assert sum(request.preemptions for request in asked) > 0
    assert asked[0].preemptions == 0, "who came first always gets on"


def test_what_a_request_computed_is_found_when_it_begins_again() -> None:
    engine = make(num_blocks=14)
    first, second = ask(prompts(2)[0][:8], 30), ask(list(range(2, 22)), 20)
    run(engine, [first, second])
    assert second.preemptions > 0
    assert engine.manager.prefix.stats.hit_tokens > 0
    assert second.cached_tokens == 0, "found when it first came"
    check(engine, [first, second])


def test_a_request_that_fills_the_pool_alone() -> None:
    engine = make(num_blocks=11)
    request = ask(list(range(2, 22)), 21)
    run(engine, [request])
    check(engine, [request])


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    engine = make(max_tokens=6)
    short, long, steps = ask([3, 4, 5], 12), ask(list(range(2, 42)), 3), []
    engine.add(short)
    engine.step()
    engine.add(long)
    while long.missing > 1 or not steps:
        before = len(short.tokens)
        engine.step()
        steps.append(long.count)
        assert len(short.tokens) == before + 1, "who decodes gets a token at each step"
    assert steps == [5] * 8
    run(engine, [])
    check(engine, [short, long])


def test_what_others_computed_of_a_prompt_is_found() -> None:
    engine, text = make(), list(range(2, 32))
    first, second, third = ask([*text, 7], 4), ask([*text, 9, 9], 4), ask(text[:16], 4)
    run(engine, [first])
    run(engine, [second, third])
    assert [request.cached_tokens for request in (first, second, third)] == [0, 28, 12]
    check(engine, [first, second, third])


def test_a_prompt_goes_on_behind_what_another_computes_at_the_same_time() -> None:
    engine, text = make(max_tokens=8), list(range(2, 42))
    ahead, behind = ask([*text, 7], 2), ask([*text, 9], 2)
    engine.add(ahead)
    engine.step()
    engine.step()
    engine.add(behind)
    computed = 0
    while engine.is_busy:
        engine.step()
        computed += behind.count
    assert behind.cached_tokens + computed <= len(text) + 8, "its chunks are not computed twice"
    check(engine, [ahead, behind])


def test_steps_in_which_all_decode_are_the_captured_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sizes, runs = make(), [], []
    captured, decode = engine.captured.run, Decoder.__call__
    monkeypatch.setattr(engine.captured, "run", lambda sequences, tokens: runs.append(len(tokens)) or captured(sequences, tokens))

    def seen(self: Decoder, tables: Any, tokens: Any, longest: Any = None) -> Any:
        sizes.append((len(tokens), longest))
        return decode(self, tables, tokens, longest)

    monkeypatch.setattr(Decoder, "__call__", seen)
    asked = [ask([3, 4], 6), ask([5, 6, 7], 6), ask([8, 9], 6)]
    run(engine, asked)
    assert runs == [3] * 5
    assert sizes == [(7, 3), *[(4, None)] * 5], "prompts without padding, then decoding in the next size"
    check(engine, asked)


def test_tokens_are_handed_out_as_they_come() -> None:
    engine, heard = make(), []
    asked = [ask(prompt, 4, emit=lambda token, who=who: heard.append((who, token))) for who, prompt in enumerate(prompts(2))]
    for request in asked:
        engine.add(request)
    while engine.is_busy:
        before = len(heard)
        engine.step()
        assert len(heard) - before <= 4
    for who, request in enumerate(asked):
        assert [token for other, token in heard if other == who] == [*request.tokens[request.prompt_len :], None]
    assert heard[0][0] != heard[1][0], "in turns"


@pytest.mark.parametrize("steps", [0, 1, 2, 6], ids=["waits", "reads its prompt", "reads on", "decodes"])
def test_a_request_that_is_cancelled_releases_its_blocks_and_others_go_on(steps: int) -> None:
    engine, asked = make(max_tokens=8), [ask(list(range(2, 20)), 12), ask(prompts(1)[0], 12)]
    for request in asked:
        engine.add(request)
    for _ in range(steps):
        engine.step()
    gone, heard = asked[0], []
    gone.emit = heard.append
    assert (gone.sequence is None) == (steps == 0)
    engine.cancel(gone)
    engine.manager.check_integrity()
    assert (gone.finish_reason, gone.sequence, heard) == ("cancelled", None, [None])
    assert engine.manager.num_sequences == (1 if asked[1].sequence else 0)
    engine.cancel(gone)
    assert heard == [None], "it is over once"
    run(engine, [])
    check(engine, asked[1:])


@pytest.mark.parametrize(
    ("change", "reason", "error"),
    [
        ({"tokens": list(range(2, 60)) * 3}, "error", "the prompt has 174 tokens, and 4 new ones are asked for; pool and model hold 156"),
        ({"max_tokens": 200}, "error", "the prompt has 3 tokens, and 200 new ones are asked for; pool and model hold 156. Fix: a shorter"),
        ({"tokens": []}, "error", "the prompt is empty"),
        ({"tokens": [3, 61]}, "error", "the prompt has ids of 3 to 61; the model has 61"),
        ({"tokens": [-1]}, "error", "the prompt has ids of -1 to -1; the model has 61"),
        ({"temperature": float("nan")}, "error", "temperature is nan and top_p 1.0; expected at least 0, and above 0 to 1"),
        ({"temperature": -1.0}, "error", "temperature is -1.0"),
        ({"top_p": 0.0}, "error", "temperature is 0.0 and top_p 0.0"),
        ({"max_tokens": 0}, "length", ""),
    ],
)
def test_a_request_that_cannot_be_served_says_why_and_others_go_on(change: dict[str, Any], reason: str, error: str) -> None:
    engine, other, heard = make(), ask(prompts(1)[0], 8), []
    engine.add(other)
    engine.step()
    odd = Request(**{"tokens": [3, 4, 5], "max_tokens": 4, "emit": heard.append, **change})
    engine.add(odd)
    assert (odd.finish_reason, heard) == (reason, [None])
    assert odd.error.startswith(error)
    assert len(odd.tokens) == odd.prompt_len
    run(engine, [])
    check(engine, [other])


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_generate_itself_says_the_same(name: str) -> None:
    engine, asked = make(name), [ask([3, 4, 5, 6], 5), ask([7, 8], 5)]
    run(engine, asked)
    assert [request.tokens for request in asked] == [generated(name, request) for request in asked]


def test_a_comparison_that_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are lost must show."""
    engine, asked = make(), requests(4)
    update = engine.decoder.cache.update
    monkeypatch.setattr(engine.decoder.cache, "update", lambda layer, k, v, slots: update(layer, 0 * k, v, slots))
    run(engine, asked)
    assert [request.tokens for request in asked] != [uncached("llama", request) for request in asked]


def test_what_is_drawn_follows_from_the_seed_and_not_from_the_batch() -> None:
    def drawn(seed: int | None, others: int, num_blocks: int = 40) -> list[int]:
        engine, request = make(num_blocks=num_blocks), Request([3, 4, 5], 24, temperature=1.5, top_p=0.9, seed=seed)
        run(engine, [*requests(others, temperature=1.0), request], every=1)
        check_idle(engine)
        return request.tokens

    alone = drawn(7, 0)
    assert drawn(7, 3) == alone
    assert drawn(7, 3, num_blocks=12) == alone, "also where it has to begin again"
    assert drawn(8, 0) != alone
    assert len({tuple(drawn(None, 0)) for _ in range(3)}) > 1


def test_draws_have_the_probabilities_of_the_logits() -> None:
    probabilities = torch.tensor([0.05, 0.5, 0.15, 0.3])
    rows, request = 4000, Request([1], temperature=2.0, seed=1)
    tokens = choose((2 * probabilities.log()).expand(rows, 4), [request] * rows)
    frequencies = torch.tensor(tokens).bincount(minlength=4) / rows
    torch.testing.assert_close(frequencies, probabilities, atol=0.03, rtol=0)


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, {1}), (0.6, {1, 3}), (0.79, {1, 3}), (0.9, {1, 3, 2}), (1.0, {0, 1, 2, 3})])
def test_top_p_keeps_the_likeliest_tokens(top_p: float, kept: set[int]) -> None:
    logits = torch.tensor([0.05, 0.5, 0.15, 0.3]).log().expand(500, 4)
    assert set(choose(logits, [Request([1], temperature=1.0, top_p=top_p, seed=3)] * 500)) == kept


def test_greedy_and_drawn_rows_in_one_batch() -> None:
    logits = torch.tensor([[0.0, 9.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
    asked = [Request([1]), Request([1], temperature=1.0, seed=2), Request([1])]
    first, drawn, last = choose(logits, asked)
    assert (first, last) == (1, 2)
    assert drawn in (0, 1, 2)


def test_models_of_another_shape_are_refused() -> None:
    import transformers

    import kvdock

    config = kvdock.PagedKVCacheConfig(num_blocks=4)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 10}
    small = transformers.GemmaConfig(**sizes, intermediate_size=16, head_dim=8)
    with pytest.raises(ValueError, match=r"expected one of .*'llama', 'mistral', 'qwen2', 'qwen3'.*, got GemmaForCausalLM"):
        Decoder(transformers.GemmaForCausalLM(small), config)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    moving = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=16, rope_parameters=rope))
    with pytest.raises(ValueError, match="a rope that stays, got LlamaForCausalLM"):
        Decoder(moving, config)
    extra = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=16))
    extra.model.layers[0].self_attn.q_norm = torch.nn.LayerNorm(8)
    with pytest.raises(ValueError, match=r"has weights that this decoder would not use: \['model.layers.0.self_attn.q_norm.bias'\]"):
        Decoder(extra, config)


class Heard:
    """What a request emits, waited for from another thread."""

    def __init__(self) -> None:
        self.tokens: list[int | None] = []
        self.over = threading.Event()

    def __call__(self, token: int | None) -> None:
        self.tokens.append(token)
        if token is None:
            self.over.set()


def test_a_worker_answers_while_requests_come_and_go() -> None:
    engine = make()
    worker, heard = Worker(engine), [Heard() for _ in range(4)]
    asked = [ask(prompt, 8, emit=emit) for prompt, emit in zip(prompts(4), heard, strict=True)]
    endless = Request([3, 4], 100, emit=Heard())
    for request in (endless, *asked):
        worker.call(engine.add, request)
    assert all(emit.over.wait(30) for emit in heard)
    worker.call(engine.cancel, endless)
    assert endless.emit.over.wait(30)
    assert endless.finish_reason in ("cancelled", "length")
    worker.close()
    check(engine, asked)


def test_a_step_that_fails_is_told_and_the_next_request_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    worker, logits = Worker(engine), engine._logits

    def fail(batch: Any) -> Any:
        monkeypatch.setattr(engine, "_logits", logits)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, "_logits", fail)
    failed, served = (ask([3, 4, 5], 6, emit=Heard()) for _ in range(2))
    worker.call(engine.add, failed)
    assert failed.emit.over.wait(30)
    assert (failed.finish_reason, failed.error) == ("error", "RuntimeError: out of memory")
    worker.call(engine.add, served)
    assert served.emit.over.wait(30)
    worker.close()
    check(engine, [served])


def test_a_worker_that_is_closed_cancels_what_there_is() -> None:
    engine = make()
    worker, request = Worker(engine), Request([3, 4], 150, emit=Heard())
    worker.call(engine.add, request)
    worker.close()
    assert request.finish_reason == "cancelled"
    check_idle(engine)


def test_the_dtype_is_the_models() -> None:
    model = copy.deepcopy(tiny("qwen2")).to(torch.float64)
    engine, request = Engine(model, 8, 4, batch_sizes=(1,)), ask([3, 4, 5], 5)
    run(engine, [request])
    assert engine.decoder.cache.dtype == torch.float64
    check(engine, [request], "qwen2")
