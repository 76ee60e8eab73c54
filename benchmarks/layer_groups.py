"""How layers of well-known models share a pool: groups, tokens in a block, what of it is unused; and what a sequence holds of it.

    python benchmarks/layer_groups.py --out docs/benchmarks     # writes layer-groups.md

Shapes are those that the models' makers published, put into the configurations of Transformers that this machine has.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import kvdock
from kvdock.integrations.transformers import PagedCacheForTransformers
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


HELD: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma 3, 26 layers": ("Gemma3", {"num_hidden_layers": 26, "sliding_window": 512}),
    "gpt-oss, 36 layers": ("GptOss", {"num_hidden_layers": 36, "sliding_window": 128, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
TINY = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 64}
CHUNK, DECODED = 2_048, 4


def tiny(name: str) -> Any:
    """Return a model of Transformers with the layers and the window of a well-known one, and small heads."""
    family, numbers = HELD[name]
    kind = next(prefix for prefix in (f"{family}Text", family) if hasattr(transformers, f"{prefix}Config"))
    config = getattr(transformers, f"{kind}Config")(**TINY, **numbers, max_position_embeddings=131_072, pad_token_id=0)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def filled(cache: Any, layers: int, tokens: int, nbytes: Callable[[Any], int]) -> tuple[int, int]:
    """Write a prompt in chunks and a few tokens behind it, as forward passes do; return the bytes held at most, and at the end."""
    chunks, most = [CHUNK] * (tokens // CHUNK - 1) + [CHUNK - DECODED] + [1] * DECODED, 0
    for count in chunks:
        states = torch.zeros(1, 1, count, 8)
        for layer in range(layers):
            cache.update(states, states, layer)
            most = max(most, nbytes(cache)) if not layer else most
    return most, nbytes(cache)


def held(name: str, tokens: int) -> tuple[int, int, int, int]:
    """Return the bytes that Transformers' own cache holds of a sequence, kvdock's, that at most, and with all tokens kept."""
    model, found = tiny(name), []
    layers, ids = model.config.num_hidden_layers, torch.ones(1, tokens, dtype=torch.int64)
    theirs = transformers.DynamicCache(config=model.config)
    filled(theirs, layers, tokens, lambda _: 0)
    found.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in theirs.layers))
    for keep_all in (False, True):
        conf = kvdock.PagedKVCacheConfig(max_kv_memory_bytes=2 * 2 * tokens * layers * 8 * 4, keep_all=keep_all)
        cache = PagedCacheForTransformers.for_model(model, conf, prefix="radix", attention="gather")
        cache.bind(input_ids=ids)
        most, at_the_end = filled(cache, layers, tokens, lambda cache: cache.usage.bytes)
        found += [at_the_end] if keep_all else [at_the_end, most]
    return found[0], found[1], found[2], found[3]


def held_section(tokens: int = LENGTHS[-1]) -> str:
    """Return the part of the page about what a sequence holds in `generate`."""
    lines = ["", "## What a sequence holds in Transformers", ""]
    lines += [
        f"{tokens:,} tokens in float32, one key head of 8 elements in each layer, written in chunks of {CHUNK:,} by Transformers' own"
    ]
    lines += [
        "model classes' caches: the tensors of `DynamicCache`, and the blocks that `PagedCacheForTransformers` holds, with prefix reuse."
    ]
    lines += ["*At most* is while a chunk is computed, *of one table* with `keep_all=True`.", ""]
    lines += ["| model | `DynamicCache`, MiB | kvdock, MiB | ratio | at most, ratio | of one table, ratio |", "|---|---|---|---|---|---|"]
    for name in HELD:
        theirs, ours, most, whole = held(name, tokens)
        lines.append(
            f"| {name} | {theirs / 2**20:.2f} | {ours / 2**20:.2f} | {ours / theirs:.3f} | {most / theirs:.2f} | {whole / theirs:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the page, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the page")
    options = parser.parse_args(arguments)
    text = page() + held_section()
    print(text)
    if options.out:
        (options.out / "layer-groups.md").write_text(text)


if __name__ == "__main__":
    main()
