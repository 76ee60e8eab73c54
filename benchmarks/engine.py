"""The example engine beside static batches of `generate()` and Transformers' own continuous batching: tokens per second.

    python benchmarks/engine.py                                # on a GPU: a Llama of 1B parameters, random weights, bf16
    python benchmarks/engine.py --requests 10 --layers 2       # that it works, on a CPU with a small model
    python benchmarks/engine.py --out docs/benchmarks          # writes <card>-engine.json and .md

Requests have the lengths of Mooncake's conversation trace, scaled so that the longest prompt and the longest answer are what
``--longest-prompt`` and ``--longest-answer`` say, and share as much of their prompts as there. All are there at the start. All three
sides run the same model in one process, in turns; a batch of each is at most ``--batch`` requests. What is made once (pools,
graphs, the manager of `generate_batch`) is not counted; each round begins with nothing cached. A token counts if a request asked for
it: a static batch goes on until its longest answer is there.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import numpy as np
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.continuous_batching.continuous_api import WorkloadHints

import kvdock

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "engine"))

from tiny_engine.engine import Engine  # noqa: E402 - found by the line above
from tiny_engine.request import Request  # noqa: E402

TRACE = ROOT / "tests" / "data" / "mooncake_conversation_300.jsonl"
SHAPES = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256},
    "small": {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4_000},
}
LAYERS = {"1b": 16, "small": 4}
TRACE_BLOCK = 512
"""Tokens that an id of the trace stands for."""

Answers = list[list[int]]


@attrs.frozen
class Load:
    """What is asked.

    Args:
        prompts: token ids of each request.
        answers: how many tokens each wants.
    """

    prompts: list[list[int]]
    answers: list[int]


def load_of(trace: Path, count: int, longest_prompt: int, longest_answer: int, vocabulary: int) -> Load:
    """Read requests from a trace, and scale them; prompts that begin alike there begin alike here."""
    rows = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()[:count]]
    by_prompt = longest_prompt / max(row["input_length"] for row in rows)
    by_answer = longest_answer / max(row["output_length"] for row in rows)
    size = max(1, round(TRACE_BLOCK * by_prompt))
    prompts = []
    for row in rows:
        parts = [np.random.default_rng(number).integers(3, vocabulary, size) for number in row["hash_ids"]]
        prompts.append(np.concatenate(parts)[: max(1, round(row["input_length"] * by_prompt))].tolist())
    return Load(prompts, [max(1, round(row["output_length"] * by_answer)) for row in rows])


def model_of(shape: str, layers: int, positions: int, device: str) -> Any:
    """Make a model with random weights, which never ends by itself."""
    config = LlamaConfig(**SHAPES[shape], num_hidden_layers=layers, max_position_embeddings=positions, tie_word_embeddings=True)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.float32 if device == "cpu" else torch.bfloat16).eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
    return model


class Ours:
    """The example engine."""

    def __init__(self, model: Any, load: Load, options: argparse.Namespace) -> None:
        self.load, sizes = load, [2**power for power in range(20) if 2**power < options.batch] + [options.batch]
        self.engine = Engine(model, options.pool_tokens // 16 + 1, batch_sizes=sizes, max_tokens=options.chunk)
        self.requests: list[Request] = []

    def run(self) -> tuple[float, Answers]:
        """Answer all."""
        self.engine.manager.reset()
        self.requests = [Request(prompt, most) for prompt, most in zip(self.load.prompts, self.load.answers, strict=True)]
        start = perf_counter()
        for request in self.requests:
            self.engine.add(request)
        while self.engine.is_busy:
            self.engine.step()
        seconds = perf_counter() - start
        self.engine.manager.check_integrity()
        return seconds, [request.tokens[request.prompt_len :] for request in self.requests]

    def note(self) -> str:
        """Say what the last run found cached, and how many requests had to begin again."""
        found, again = (sum(getattr(request, name) for request in self.requests) for name in ("cached_tokens", "preemptions"))
        prompts, graphs = sum(map(len, self.load.prompts)), "graphs" if self.engine.captured.is_captured else "no graphs"
        return f"{graphs}; {found / prompts:.0%} of prompt tokens found; began again: {again}"


class Static:
    """`generate()` in batches of requests as they come, padded on the left, until the longest answer is there."""

    def __init__(self, model: Any, load: Load, options: argparse.Namespace) -> None:
        self.model, self.load, self.batch = model, load, options.batch

    def run(self) -> tuple[float, Answers]:
        """Answer all."""
        self.model.set_attn_implementation("sdpa")
        answers: Answers = []
        start = perf_counter()
        for first in range(0, len(self.load.prompts), self.batch):
            answers += self._batch(slice(first, first + self.batch))
        return perf_counter() - start, answers

    def _batch(self, rows: slice) -> Answers:
        prompts, wanted = self.load.prompts[rows], self.load.answers[rows]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=self.model.device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=self.model.device)
        out = self.model.generate(ids, attention_mask=mask, max_new_tokens=max(wanted))
        return [row[:most] for row, most in zip(out[:, width:].tolist(), wanted, strict=True)]

    def note(self) -> str:
        """Say how much of what it computes nobody asked for."""
        parts = [self.load.answers[first : first + self.batch] for first in range(0, len(self.load.answers), self.batch)]
        made = sum(len(part) * max(part) for part in parts)
        return f"{1 - sum(self.load.answers) / made:.0%} of the tokens that it makes are beyond what was asked"


class Theirs:
    """What is under `generate_batch`: its manager, with the number of tokens of each request."""

    def __init__(self, model: Any, load: Load, options: argparse.Namespace) -> None:
        self.model, self.load = model, load
        self.hints = WorkloadHints(max(map(len, load.prompts)), max(load.answers), len(load.prompts))
        most = {"num_blocks": options.pool_tokens // 256 + 1, "max_requests_per_batch": options.batch, "max_batch_tokens": options.chunk}
        self.config = most if options.same_limits or options.device == "cpu" else {}  # on a CPU it would take most of the memory

    def run(self) -> tuple[float, Answers]:
        """Answer all."""
        config, generation = ContinuousBatchingConfig(**self.config), GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        settings = {"continuous_batching_config": config, "workload_hints": self.hints, "block": True, "timeout": 30}
        with self.model.continuous_batching_context_manager(generation, **settings) as manager:
            start, done = perf_counter(), {}
            pairs = zip(self.load.prompts, self.load.answers, strict=True)
            names = [manager.add_request(prompt, max_new_tokens=most) for prompt, most in pairs]
            while len(done) < len(names):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("the manager of generate_batch has stopped")
                if result is not None and result.is_finished():
                    done[result.request_id] = result
            seconds = perf_counter() - start
        if errors := {result.error for result in done.values() if result.error is not None}:
            raise RuntimeError(f"generate_batch: {errors}")
        return seconds, [done[name].generated_tokens for name in names]

    def note(self) -> str:
        """Say how it was set up."""
        return "with the engine's limits: pool, batch, tokens of a step" if self.config else "as it chooses: pool, batch, graphs"


SIDES: dict[str, Callable[..., Any]] = {"kvdock's example engine": Ours, "static batches of generate()": Static, "generate_batch": Theirs}


def measure(model: Any, load: Load, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all sides in turns; return a row for each."""
    sides = {name: make(model, load, options) for name, make in SIDES.items()}
    short = Load([prompt[:20] for prompt in load.prompts[:2]], [4, 4])
    for side in sides.values():  # what a first call compiles and prepares
        side.load = short
        side.run()
        side.load = load
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    answers: dict[str, Answers] = {}
    for number in range(options.rounds):
        names = list(sides)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            taken, answers[name] = sides[name].run()
            if list(map(len, answers[name])) != load.answers:
                raise AssertionError(f"{name} did not give as many tokens as each request asked for")
            seconds[name].append(taken)
            print(f"round {number + 1}: {name}: {taken:.2f} s, {sum(load.answers) / taken:.1f} tokens/s", flush=True)
    first = answers["static batches of generate()"]
    return [
        {
            "side": name,
            "tokens/s": sum(load.answers) / statistics.median(seconds[name]),
            "from": sum(load.answers) / max(seconds[name]),
            "to": sum(load.answers) / min(seconds[name]),
            "the engine is quicker by": statistics.median(seconds[name]) / statistics.median(seconds["kvdock's example engine"]),
            "answers as of generate()": f"{sum(a == b for a, b in zip(answers[name], first, strict=True))} of {len(first)}",
            "": side.note(),
        }
        for name, side in sides.items()
    ]


def page(rows: Sequence[dict[str, Any]], about: str) -> str:
    """Write the table."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    cells = [
        [
            f"{cell:.2f}" if isinstance(cell, float) and cell < 100 else f"{cell:.0f}" if isinstance(cell, float) else cell
            for cell in row.values()
        ]
        for row in rows
    ]
    return "\n".join([about, "", *lines, *("| " + " | ".join(row) + " |" for row in cells)]) + "\n"


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=device)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--trace", type=Path, default=TRACE, help="in Mooncake's format")
    parser.add_argument("--shape", choices=SHAPES, help="of the model (default: 1b on a GPU, small on a CPU)")
    parser.add_argument("--layers", type=int, help="of the model (default: 16, or 4 of the small one)")
    parser.add_argument("--longest-prompt", type=int, help="tokens (default: 4096, or 256 on a CPU)")
    parser.add_argument("--longest-answer", type=int, help="tokens (default: 512, or 24 on a CPU)")
    parser.add_argument("--batch", type=int, help="most requests at a time (default: 64, or 4 on a CPU)")
    parser.add_argument("--chunk", type=int, help="most tokens of a step (default: 2048, or 128 on a CPU)")
    parser.add_argument("--pool-tokens", type=int, help="of the engine's pool (default: room for a batch of the longest)")
    parser.add_argument("--same-limits", action="store_true", help="give generate_batch the engine's limits; by default it chooses its own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for the records")
    options = parser.parse_args(argv)
    on_host = options.device == "cpu"
    usual = {"shape": ("1b", "small"), "longest_prompt": (4096, 256), "longest_answer": (512, 24), "batch": (64, 4), "chunk": (2048, 128)}
    for name, (large, small) in usual.items():
        if getattr(options, name) is None:
            setattr(options, name, small if on_host else large)
    options.layers = options.layers or LAYERS[options.shape]
    options.pool_tokens = options.pool_tokens or options.batch * (options.longest_prompt + options.longest_answer)
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write records if asked."""
    options = parse_options(argv)
    load = load_of(options.trace, options.requests, options.longest_prompt, options.longest_answer, SHAPES[options.shape]["vocab_size"])
    model = model_of(options.shape, options.layers, options.longest_prompt + options.longest_answer, options.device)
    with torch.no_grad():
        rows = measure(model, load, options)
    card = torch.cuda.get_device_name(0) if options.device != "cpu" else platform.processor() or platform.machine()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, kvdock {kvdock.__version__}"
    asked = f"{len(load.prompts)} requests, {sum(map(len, load.prompts))} prompt tokens, {sum(load.answers)} new ones"
    shape = f"{options.shape}, {options.layers} layers, {model.dtype}"
    settings = f"at most {options.batch} at a time, {options.chunk} tokens a step, a pool of {options.pool_tokens} tokens"
    text = page(rows, f"{card}, {versions}; {shape}; {asked}; {settings}; medians of {options.rounds} rounds, and their range.")
    print(f"\n{text}")
    if options.out:
        name = card.lower().replace("nvidia ", "").split()[0]
        found = {"about": f"{card}, {versions}", "options": {key: str(value) for key, value in vars(options).items()}, "rows": rows}
        (options.out / f"{name}-engine.json").write_text(json.dumps(found, indent=1) + "\n")
        (options.out / f"{name}-engine.md").write_text(f"# The example engine\n\nMade by `benchmarks/engine.py`.\n\n{text}")


if __name__ == "__main__":
    main()
