"""A small stand-in of nano-vllm: a scheduler asks a block manager, and attention reads what a context says of the step."""

from __future__ import annotations

import importlib
import sys
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, count
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from support_engines import attend_with, logits_of, module_of


class NanoSequence:
    ids = count()

    def __init__(self, tokens: Sequence[int], new: int) -> None:
        self.seq_id = next(NanoSequence.ids)
        self.token_ids, self.stop = list(tokens), len(tokens) + new
        self.num_cached_tokens = self.num_scheduled_tokens = self.preempted = 0
        self.block_table: list[int] = []

    def __len__(self) -> int:
        return len(self.token_ids)


class NanoScheduler:
    """First come, first served; prompts before decoding; of the prompts only the first of a step is computed in chunks."""

    def __init__(self, num_blocks: int, block_size: int, budget: int) -> None:
        self.block_manager = sys.modules["nanovllm.engine.scheduler"].BlockManager(num_blocks, block_size)  # type: ignore[attr-defined]
        self.waiting, self.running = deque[NanoSequence](), list[NanoSequence]()
        self.budget, self.hits = budget, 0

    def schedule(self) -> tuple[list[NanoSequence], bool]:
        prompts = self._prompts()
        return (prompts, True) if prompts else (self._decoding(), False)

    def _prompts(self) -> list[NanoSequence]:
        batch, left = list[NanoSequence](), self.budget
        while self.waiting and left:
            seq = self.waiting[0]
            if not seq.block_table:
                cached = self.block_manager.can_allocate(seq)
                if cached < 0 or (batch and len(seq) - cached * self.block_manager.block_size > left):
                    break
                self.block_manager.allocate(seq, cached)
                assert seq.num_cached_tokens == cached * self.block_manager.block_size < len(seq)
                self.hits += seq.num_cached_tokens
            seq.num_scheduled_tokens = min(len(seq) - seq.num_cached_tokens, left)
            left -= seq.num_scheduled_tokens
            batch.append(seq)
            if seq.num_cached_tokens + seq.num_scheduled_tokens < len(seq):
                break
            self.running.append(self.waiting.popleft())
        return batch

    def _decoding(self) -> list[NanoSequence]:
        batch, left = list[NanoSequence](), deque(self.running)
        while left:
            seq = left.popleft()
            while not self.block_manager.can_append(seq):
                victim = left.pop() if left else seq
                self.preempt(victim)
                if victim is seq:
                    break
            else:
                seq.num_scheduled_tokens = 1
                self.block_manager.may_append(seq)
                batch.append(seq)
        return batch

    def preempt(self, seq: NanoSequence) -> None:
        self.running.remove(seq)
        self.block_manager.deallocate(seq)
        seq.preempted += 1
        self.waiting.appendleft(seq)

    def postprocess(self, batch: Sequence[NanoSequence], chosen: Sequence[int]) -> None:
        for seq, token in zip(batch, chosen, strict=True):
            self.block_manager.hash_blocks(seq)
            seq.num_cached_tokens += seq.num_scheduled_tokens
            if seq.num_cached_tokens < len(seq):
                continue
            seq.token_ids.append(token)
            if len(seq) == seq.stop:
                self.block_manager.deallocate(seq)
                self.running.remove(seq)


class NanoAttention(torch.nn.Module):
    """Calls what its module has under the names that it has; the caches are put into it from outside."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.k_cache = self.v_cache = torch.tensor([])

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        names: Any = sys.modules["nanovllm.layers.attention"]
        step, how = names.get_context(), {"softmax_scale": self.scale, "causal": True}
        if self.k_cache.numel():
            names.store_kvcache(k, v, self.k_cache, self.v_cache, step.slot_mapping)
        if not step.is_prefill:
            lens = {"cache_seqlens": step.context_lens, "block_table": step.block_tables}
            seen: torch.Tensor = names.flash_attn_with_kvcache(q.unsqueeze(1), self.k_cache, self.v_cache, **lens, **how)
            assert seen.shape == (len(q), 1, *q.shape[1:])
            return seen.flatten(0, 1)
        keys = (k, v) if step.block_tables is None else (self.k_cache, self.v_cache)
        lens = {name: getattr(step, name) for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")}
        return names.flash_attn_varlen_func(q, *keys, **lens, block_table=step.block_tables, **how)


class NanoRunner:
    """Runs a model once without a cache, makes one, and runs steps. Decoding is padded, as where it is a captured graph.

    Args:
        model: of Transformers.
        num_blocks: of the cache, of ``block_size`` tokens.
    """

    def __init__(self, model: Any, num_blocks: int, block_size: int) -> None:
        self.model, self.block_size, self.num_blocks = model, block_size, num_blocks
        attend_with(model, [NanoAttention(layer.self_attn.scaling) for layer in model.model.layers])
        warm = NanoSequence([1] * 5, 0)
        warm.num_scheduled_tokens = 5
        self.run([warm], is_prefill=True)
        self.allocate_kv_cache()

    def allocate_kv_cache(self) -> None:
        config = self.model.config
        self.layers = [layer.self_attn.engine for layer in self.model.model.layers]
        shape = (2, len(self.layers), self.num_blocks, self.block_size, config.num_key_value_heads, config.head_dim)
        self.kv_cache = torch.full(shape, float("nan"), dtype=self.model.dtype)
        for number, layer in enumerate(self.layers):
            layer.k_cache, layer.v_cache = self.kv_cache[:, number]

    def run(self, batch: Sequence[NanoSequence], *, is_prefill: bool) -> list[int]:
        """Compute what is due of each sequence, and choose a token for each."""
        spans = [(seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens) for seq in batch]
        ids = [token for seq, span in zip(batch, spans, strict=True) for token in seq.token_ids[slice(*span)]]
        places = [place for span in spans for place in range(*span)]
        slots = [self._slot(seq, place) for seq, span in zip(batch, spans, strict=True) for place in range(*span) if seq.block_table]
        last = torch.tensor([*accumulate(stop - start for start, stop in spans)]) - 1
        if is_prefill:
            step = self._prompts(batch, spans)
        else:
            padding = [0] * (-len(batch) % 4)
            ids, places, slots = ids + padding, places + padding, slots + [-1 for _ in padding]
            lens = torch.tensor([len(seq) for seq in batch] + padding, dtype=torch.int32)
            step = {"context_lens": lens, "block_tables": self._tables(batch, len(padding))}
        attention: Any = sys.modules["nanovllm.layers.attention"]
        attention.context = SimpleNamespace(is_prefill=is_prefill, slot_mapping=torch.tensor(slots, dtype=torch.int32), **step)
        return logits_of(self.model, ids, places, last).argmax(-1).tolist()

    def _prompts(self, batch: Sequence[NanoSequence], spans: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Tables are there only where something is cached before the step."""
        queries, keys = [stop - start for start, stop in spans], [stop for _, stop in spans]
        sums = [torch.tensor([0, *accumulate(lens)], dtype=torch.int32) for lens in (queries, keys)]
        longest = {"max_seqlen_q": max(queries), "max_seqlen_k": max(keys)}
        tables = self._tables(batch, 0) if sum(keys) > sum(queries) else None
        return {"cu_seqlens_q": sums[0], "cu_seqlens_k": sums[1], **longest, "block_tables": tables}

    def _slot(self, seq: NanoSequence, place: int) -> int:
        return seq.block_table[place // self.block_size] * self.block_size + place % self.block_size

    def _tables(self, batch: Sequence[NanoSequence], padding: int) -> torch.Tensor:
        width = max(len(seq.block_table) for seq in batch)
        rows = [seq.block_table + [-1] * (width - len(seq.block_table)) for seq in batch]
        return torch.tensor(rows + [[0] * width] * padding, dtype=torch.int32)


def nano_vllm() -> dict[str, ModuleType]:
    """Return the modules of nano-vllm that the adapter patches. That with attention needs flash-attn when it is imported."""

    class Runner(NanoRunner):
        pass

    scheduler, runner = module_of("scheduler", BlockManager=None), module_of("model_runner", ModelRunner=Runner)
    attention = module_of("attention", store_kvcache=None, get_context=lambda: vars(attention)["context"])

    class Layers(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name != "attention":
                raise AttributeError(name)
            vars(attention)["flash_attn"] = importlib.import_module("flash_attn")
            return attention

    return {
        "nanovllm": module_of("nanovllm"),
        "nanovllm__engine": module_of("engine", scheduler=scheduler, model_runner=runner),
        "nanovllm__engine__scheduler": scheduler,
        "nanovllm__engine__model_runner": runner,
        "nanovllm__layers": Layers("layers"),
        "nanovllm__layers__attention": attention,
    }
