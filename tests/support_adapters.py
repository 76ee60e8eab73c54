"""The adapters of `examples/adapters` under the stand-ins of their engines: every text is compared with one without any cache."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import kvdock
from support_docs import ROOT
from support_engines import assert_as_without_a_cache, model_of, modules
from support_mini_sglang import MiniScheduler, Req, mini_sglang
from support_nano_vllm import NanoScheduler, NanoSequence, nano_vllm

ENGINES = {"kvdock_nano_vllm": nano_vllm, "kvdock_mini_sglang": mini_sglang}


@contextmanager
def installed(name: str) -> Iterator[ModuleType]:
    """Let an engine be there, with its adapter installed."""
    with modules(**ENGINES[name]()):
        sys.path.insert(0, str(ROOT / "examples" / "adapters"))
        try:
            sys.modules.pop(name, None)
            made = importlib.import_module(name)
        finally:
            sys.path.pop(0)
        made.install()
        yield made


class Nano:
    """A nano-vllm of so many blocks."""

    def __init__(self, num_blocks: int, block_size: int = 4, budget: int = 64, model: Any = None, least: float = 1e-9) -> None:
        self.model, self.least = model or model_of("llama"), least
        self.scheduler = NanoScheduler(num_blocks, block_size, budget)
        runner = sys.modules["nanovllm.engine.model_runner"].ModelRunner  # type: ignore[attr-defined]
        self.runner = runner(self.model, num_blocks, block_size)
        self.manager: kvdock.CacheManager = self.scheduler.block_manager.manager

    def serve(self, *requests: tuple[list[int], int]) -> list[NanoSequence]:
        """Serve prompts with so many new tokens; compare each text, and prove after each step that no block is lost."""
        seqs = [NanoSequence(prompt, new) for prompt, new in requests]
        self.scheduler.waiting.extend(seqs)
        while self.scheduler.waiting or self.scheduler.running:
            batch, is_prefill = self.scheduler.schedule()
            assert batch, "somebody always gets on"
            self.scheduler.postprocess(batch, self.runner.run(batch, is_prefill=is_prefill))
            self.manager.check_integrity()
            for seq in seqs:
                if seq.block_table:
                    held = self.scheduler.block_manager.sequences[seq.seq_id]
                    assert seq.block_table == held.block_table().tolist()
                    assert held.computed <= seq.num_cached_tokens, "nothing is found before it is computed"
        for seq, (prompt, new) in zip(seqs, requests, strict=True):
            assert len(seq) == len(prompt) + new
            assert_as_without_a_cache(self.model, len(prompt), seq.token_ids, self.least)
        assert self.manager.num_sequences == 0
        assert not self.scheduler.block_manager.sequences
        return seqs


def mini_engine(num_pages: int, page_size: int, chunk: int, model: Any = None) -> MiniScheduler:
    """Return a mini-sglang of so many pages."""
    return MiniScheduler(model or model_of("llama"), num_pages, page_size, chunk)


def serve(engine: MiniScheduler, *requests: tuple[list[int], int], least: float = 1e-9) -> list[Req]:
    """Serve prompts with so many new tokens; compare each text, and prove after each step that no page is lost."""
    reqs = [Req(list(prompt), len(prompt) + new) for prompt, new in requests]
    engine.waiting.extend(reqs)
    left = len(engine.done) + len(reqs)
    for _ in range(1000):
        engine.step()
        engine.check()
        if len(engine.done) == left:
            break
    for req, (prompt, new) in zip(reqs, requests, strict=True):
        assert len(req.tokens) == len(prompt) + new
        assert_as_without_a_cache(engine.model, len(prompt), req.tokens, least)
    assert engine.prefix.size_info.protected_size == 0
    return reqs
