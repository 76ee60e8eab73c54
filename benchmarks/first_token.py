"""The first token of a long prompt: computed, and with its blocks in the pool, in host memory and in a file.

    python benchmarks/first_token.py --out docs/benchmarks                # SmolLM2 on the CPU, 4,096 tokens
    python benchmarks/first_token.py --out docs/benchmarks                # on a GPU: a Llama of 1B parameters, random weights, bf16

In each round all ways take turns, after one that does not count. "Host" is a tier from which the blocks come after other prompts have
pushed them out of the pool; "file" is a new cache, as after a restart, that loads what the first one saved.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from generate import model_of
from transformers import PreTrainedModel

import kvdock
from kvdock.integrations.transformers import PagedCacheForTransformers

BLOCK = 16
WAYS = {"computed": "computed", "pool": "in the pool", "host": "in host memory", "file": "in a file, loading it included"}


def cache_of(model: PreTrainedModel, length: int, *tiers: kvdock.Tier) -> PagedCacheForTransformers:
    """Make a cache with room for one prompt."""
    config = kvdock.PagedKVCacheConfig(num_blocks=length // BLOCK + 8, block_size=BLOCK)
    return PagedCacheForTransformers.for_model(model, config, prefix="radix", tiers=tiers)


def first(cache: PagedCacheForTransformers, model: PreTrainedModel, ids: torch.Tensor) -> dict[str, Any]:
    """Generate one token, and say how long it took and what of the prompt was computed."""
    begin = perf_counter()
    out = model.generate(**cache.bind(input_ids=ids), max_new_tokens=1)
    token = int(out[0, -1])  # waits for the device
    took = {"seconds": perf_counter() - begin, "token": token, "computed": ids.shape[1] - cache.usage.cached_tokens}
    cache.commit(out)
    return took


def one_round(model: PreTrainedModel, prompts: list[torch.Tensor], folder: Path) -> dict[str, dict[str, Any]]:
    """Answer the first prompt in each way."""
    length, path = prompts[0].shape[1], folder / "prompt.safetensors"
    cache = cache_of(model, length, kvdock.HostTier(4 << 30))
    found = {"computed": first(cache, model, prompts[0]), "pool": first(cache, model, prompts[0])}
    begin = perf_counter()
    found["computed"]["saved_bytes"] = cache.save(path, prompts[0], model="of this benchmark").nbytes
    found["computed"]["save_seconds"] = perf_counter() - begin
    for other in prompts[1:]:
        first(cache, model, other)
    found["host"] = first(cache, model, prompts[0])
    del cache
    again = cache_of(model, length)
    begin = perf_counter()
    again.load(path, model="of this benchmark")
    load = perf_counter() - begin
    found["file"] = first(again, model, prompts[0])
    found["file"] |= {"seconds": found["file"]["seconds"] + load, "load_seconds": load}
    return found


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all ways, and prove that they say the same."""
    options.prompts, options.new_tokens = [options.tokens], 8
    model = model_of(options)
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(100, 20_000, (1, options.tokens), generator=random).to(options.device) for _ in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        rounds = [one_round(model, prompts, Path(folder)) for _ in range(options.rounds + 1)]
    assert len({way["token"] for each in rounds for way in each.values()}) == 1, "the token depends on where the blocks were"
    for each in rounds:
        assert each["computed"]["computed"] == options.tokens
        assert max(each[way]["computed"] for way in ("pool", "host", "file")) <= BLOCK, "more than a block was computed again"
    on_gpu = options.device != "cpu"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"a CPU ({platform.machine()}), {torch.get_num_threads()} thread(s)",
        "model": f"{options.model}, {options.layers} layers, {model.dtype}" if on_gpu else "SmolLM2-135M",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "kvdock": kvdock.__version__},
        "tokens": options.tokens,
        "block_size": BLOCK,
        "rounds": rounds[1:],
    }


def page(found: dict[str, Any]) -> str:
    """Return the record as a page."""
    rounds = found["rounds"]
    base = statistics.median(each["computed"]["seconds"] for each in rounds)
    lines = []
    for way, name in WAYS.items():
        times = [each[way]["seconds"] for each in rounds]
        ratios = [each[way]["seconds"] / each["computed"]["seconds"] for each in rounds]
        cells = (
            name,
            str(rounds[0][way]["computed"]),
            f"{statistics.median(times) * 1e3:,.1f} ms ({min(times) * 1e3:,.1f} .. {max(times) * 1e3:,.1f})",
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})",
        )
        lines.append(f"| {' | '.join(cells)} |")
    load = statistics.median(each["file"]["load_seconds"] / each["file"]["seconds"] for each in rounds)
    save = statistics.median(each["computed"]["save_seconds"] for each in rounds) / base
    nbytes = rounds[0]["computed"]["saved_bytes"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"""# The first token of {found["tokens"]:,}

Written by `benchmarks/first_token.py`: {found["model"]} on {found["device"]}; {versions}.
A prompt of {found["tokens"]:,} tokens in blocks of {found["block_size"]}; medians of {len(rounds)} rounds, with the least and the greatest.

| the prompt is | tokens computed | the first token comes after | of computing it |
|---|---|---|---|
{chr(10).join(lines)}

Of the answer from the file {load:.0%} is loading: {nbytes / 1e6:.0f} MB are read, their checksums compared, and copied into the pool.
Saving them takes {save:.2g} of the time of computing them.
"""


def main() -> None:
    """Measure, and write the record or print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--model", choices=["1b", "smollm2"], default="1b" if on_gpu else "smollm2")
    parser.add_argument("--layers", type=int, default=16, help="of the model of random weights (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7 if on_gpu else 2, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the page and the record")
    options = parser.parse_args()
    found = measured(options)
    if options.out:
        name = "first-token" if options.device == "cpu" else f"{found['device'].split()[-1].lower()}-first-token"
        (options.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (options.out / f"{name}.md").write_text(page(found), encoding="utf-8")
    print(page(found))


if __name__ == "__main__":
    main()
