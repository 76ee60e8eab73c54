"""How layers of well-known models share a pool: groups, tokens in a block, and what of it is unused. No memory is taken.

    python benchmarks/layer_groups.py --out docs/benchmarks     # writes layer-groups.md

Shapes are those that the models' makers published, put into the configurations of Transformers that this machine has.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import kvdock
from kvdock.layers import KeepAll, LayerGroup

LENGTHS = (1_024, 8_192, 32_768)
DELTA = {f"linear_{name}": size for name, size in (("num_key_heads", 16), ("num_value_heads", 32), ("key_head_dim", 128))}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma 3 1B": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512},
    ),
    "Gemma 3 27B": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024},
    ),
    "gpt-oss 120B": ("GptOssConfig", {"num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}),
    "Llama 3.1 8B": ("LlamaConfig", {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}),
    "Llama 4 Scout": (
        "Llama4TextConfig",
        {"num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192},
    ),
    "Qwen3-Next 80B": ("Qwen3NextConfig", {"num_hidden_layers": 48, "num_key_value_heads": 2, "head_dim": 256, **DELTA}),
    "Jamba 1.5 Mini": ("JambaConfig", {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}),
    "DeepSeek V3": ("DeepseekV3Config", {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}),
}


def spec_of(name: str) -> kvdock.KVSpec:
    """Return what a model's layers keep, in bfloat16."""
    family, numbers = MODELS[name]
    return kvdock.KVSpec.from_hf_config(getattr(transformers, family)(**numbers, max_position_embeddings=131_072), torch.bfloat16)


def described(groups: Sequence[LayerGroup]) -> str:
    """Return groups as text, equal ones together."""
    found = Counter((str(group.retention), len(group.members), group.block_size) for group in groups)
    per = "state" if all(group.retention.is_state for group in groups) else "tokens"
    texts = [
        f"{count} x {layers} layers, {rule}" + (f", {size} {per}" if "State" not in rule else "")
        for (rule, layers, size), count in found.items()
    ]
    return "; ".join(texts)


def page() -> str:
    """Return the page."""
    lines = ["# How layers share a pool", "", "Written by `benchmarks/layer_groups.py`.", ""]
    lines += [f"Transformers {transformers.__version__}, bfloat16, `block_size=16`, one rank. A group has one block table; blocks of all"]
    lines += ["groups are of one size. *Of one table* is what the same sequence takes where one table serves all layers and nothing is let"]
    lines += ["go. *Unused* is the part of a sequence's blocks that holds nothing that it needs.", ""]
    lines += [
        f"| model | groups | block, KiB | {' | '.join(f'unused at {length:,}' for length in LENGTHS)} | of one table at {LENGTHS[-1]:,} |"
    ]
    lines += ["|---" * (4 + len(LENGTHS)) + "|"]
    for name in MODELS:
        spec = spec_of(name)
        plan = kvdock.plan_blocks(spec, kvdock.PagedKVCacheConfig(num_blocks=1), kvdock.RankInfo("cpu"))
        unused = " | ".join(f"{plan.waste(length):.1%}" for length in LENGTHS)
        kept = [group for group in plan.groups if not group.retention.is_state]
        whole = sum(group.nbytes for group in kept) * KeepAll().kept(LENGTHS[-1])
        ratio = "-" if len(kept) < len(plan.groups) else f"{plan.sequence_bytes(LENGTHS[-1]) / whole:.2f}"
        lines.append(f"| {name} | {described(plan.groups)} | {plan.bytes_per_block / 1024:,.0f} | {unused} | {ratio} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the page, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the page")
    options = parser.parse_args(arguments)
    print(page())
    if options.out:
        (options.out / "layer-groups.md").write_text(page())


if __name__ == "__main__":
    main()
