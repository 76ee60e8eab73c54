"""A small stand-in of mini-sglang: a scheduler has free pages and a table of slots; a prefix cache says which slots hold a prefix."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from support_engines import attend_with, logits_of, module_of


@dataclass(frozen=True)
class BaseCacheHandle(ABC):
    cached_len: int

    @abstractmethod
    def get_matched_indices(self) -> torch.Tensor: ...


class SizeInfo(NamedTuple):
    evictable_size: int
    protected_size: int


class InsertResult(NamedTuple):
    cached_len: int
    handle: Any


class MatchResult(NamedTuple):
    cuda_handle: Any
    host_handle: Any = None


class BasePrefixCache(ABC):
    @abstractmethod
    def lock_handle(self, handle: Any, unlock: bool = False) -> None: ...
    @abstractmethod
    def match_prefix(self, input_ids: torch.Tensor) -> MatchResult: ...
    @abstractmethod
    def insert_prefix(self, input_ids: torch.Tensor, indices: torch.Tensor) -> InsertResult: ...
    @abstractmethod
    def evict(self, size: int) -> torch.Tensor: ...
    @abstractmethod
    def reset(self) -> None: ...
    @property
    @abstractmethod
    def size_info(self) -> SizeInfo: ...
    @abstractmethod
    def check_integrity(self) -> None: ...


class BaseKVCachePool(ABC):
    @abstractmethod
    def k_cache(self, index: int) -> torch.Tensor: ...
    @abstractmethod
    def v_cache(self, index: int) -> torch.Tensor: ...
    @abstractmethod
    def store_kv(self, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor, layer_id: int) -> None: ...
    @property
    @abstractmethod
    def device(self) -> torch.device: ...
    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...
    @property
    @abstractmethod
    def num_layers(self) -> int: ...


@dataclass
class BaseAttnMetadata(ABC):
    @abstractmethod
    def get_last_indices(self, bs: int) -> torch.Tensor: ...


class BaseAttnBackend(ABC):
    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_id: int,
        batch: Batch,
        *,
        window_size: tuple[int, int] = (-1, -1),
        softmax_scale: float | None = None,
    ) -> torch.Tensor: ...
    @abstractmethod
    def prepare_metadata(self, batch: Batch) -> None: ...
    @abstractmethod
    def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None: ...
    @abstractmethod
    def prepare_for_capture(self, batch: Batch) -> None: ...
    @abstractmethod
    def prepare_for_replay(self, batch: Batch) -> None: ...


class Registry(dict[str, Callable[[Any], Any]]):
    def register(self, name: str) -> Callable[[Any], Any]:
        return lambda made: self.setdefault(name, made)


@dataclass(eq=False)
class Req:
    tokens: list[int]
    stop: int
    table_idx: int = -1
    cached_len: int = 0  # tokens that are computed
    device_len: int = 0  # and with those of this step
    handle: Any = None
    hits: int = 0
    pages: int = 0  # entries of its row that have a page

    @property
    def extend_len(self) -> int:
        return self.device_len - self.cached_len

    @property
    def is_prompt(self) -> bool:
        """Whether it has not been computed up to its end before."""
        return len(self.tokens) - self.cached_len > 1 or self.cached_len == self.hits


@dataclass
class Batch:
    reqs: list[Req]
    phase: str
    padded_reqs: list[Req] = field(default_factory=list)
    out_loc: Any = None
    attn_metadata: Any = None
    size = property(lambda self: len(self.reqs))
    padded_size = property(lambda self: len(self.padded_reqs))
    is_prefill = property(lambda self: self.phase == "prefill")


GRAPHS = [1, 2, 4]
"""Sizes of batches that decode by a graph: by what such a batch was prepared for capture with, filled for its replay."""


class MiniScheduler:
    """Free pages, a row of slots for each request, and what runs: prompts first, in chunks that share a budget; then who decodes.

    Args:
        model: of Transformers.
        num_pages: of the pool, beside one for padding.
        page_size: tokens of a page.
        chunk: most tokens of a step with prompts.
        rows: most requests that run.
    """

    def __init__(self, model: Any, num_pages: int, page_size: int, chunk: int, rows: int = 8) -> None:
        kvcache, engine = sys.modules["minisgl.kvcache"], sys.modules["minisgl.engine.engine"]
        self.context: Any = sys.modules["minisgl.core"]
        self.context.page_size = page_size
        self.model, device = model, torch.device("cpu")
        self.prefix = kvcache.SUPPORTED_CACHE_MANAGER["kvdock"](device)  # type: ignore[attr-defined]
        sizes = {"num_kv_heads": model.config.num_key_value_heads, "head_dim": model.config.head_dim}
        config = SimpleNamespace(**sizes, num_layers=model.config.num_hidden_layers)
        self.pool = self.context.kv_cache = engine.create_kvcache_pool(  # type: ignore[attr-defined]
            model_config=config, num_pages=num_pages + 1, page_size=page_size, dtype=model.dtype, device=device
        )
        self.page_size, self.num_pages, self.chunk = page_size, num_pages, chunk
        self.free = (torch.arange(num_pages, dtype=torch.int32) * page_size).flip(0)
        self.table = self.context.page_table = torch.full((rows + 1, 256), -1, dtype=torch.int32)
        self.rows = list(range(rows))
        self.waiting, self.running, self.done = deque[Req](), list[Req](), list[Req]()
        self.evictions = 0
        self.attention = sys.modules["minisgl.attention"].SUPPORTED_ATTENTION_BACKENDS["kvdock"](config)  # type: ignore[attr-defined]
        attend_with(model, [self._layer(number, layer.self_attn) for number, layer in enumerate(model.model.layers)])
        self._capture()

    def _layer(self, number: int, module: Any) -> Callable[..., torch.Tensor]:
        window = getattr(self.model.config, "sliding_window", None)
        how = {"window_size": (-1, -1) if window is None else (window - 1, 0), "softmax_scale": module.scaling}
        # Keys and values have their heads side by side.
        return lambda q, k, v: self.attention.forward(q, k.flatten(1), v.flatten(1), number, self.batch, **how)

    def _capture(self) -> None:
        self.dummy = Req([0], 1, table_idx=len(self.table) - 1, device_len=1)
        self.table[-1] = self.num_pages * self.page_size
        self.attention.init_capture_graph(max_seq_len=self.table.shape[1], bs_list=GRAPHS)
        self.graphs = {}
        for size in GRAPHS:
            batch = Batch([self.dummy] * size, "decode", [self.dummy] * size)
            self.attention.prepare_for_capture(batch)
            self.graphs[size] = batch.attn_metadata

    @property
    def available(self) -> int:
        return self.prefix.size_info.evictable_size + len(self.free) * self.page_size

    def step(self) -> None:
        while self.waiting and self.rows and self._admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        batch = self._schedule()
        prompts = [req.is_prompt for req in batch.reqs]
        for req, token, was_prompt in zip(batch.reqs, self._forward(batch), prompts, strict=True):
            req.cached_len = req.device_len
            if req.cached_len == len(req.tokens):
                req.tokens.append(token)
            if len(req.tokens) == req.stop:
                self.running.remove(req)
                self.done.append(req)
                self._store(req, finished=True)
            elif was_prompt:
                self._store(req, finished=False)

    def _schedule(self) -> Batch:
        left, prompts = self.chunk, list[Req]()
        for req in self.running:
            if req.is_prompt and left:
                req.device_len = min(req.cached_len + left, len(req.tokens))
                left -= req.extend_len
                prompts.append(req)
        if prompts:
            return Batch(prompts, "prefill", prompts)
        for req in self.running:
            req.device_len = len(req.tokens)
        size = next((size for size in GRAPHS if size >= len(self.running)), len(self.running))
        return Batch(list(self.running), "decode", self.running + [self.dummy] * (size - len(self.running)))

    def _forward(self, batch: Batch) -> list[int]:
        for req in batch.reqs:
            self._make_room(req, req.device_len)
        reqs = batch.padded_reqs
        batch.out_loc = torch.cat([self.table[req.table_idx, req.cached_len : req.device_len] for req in reqs])
        self.attention.prepare_metadata(batch)
        last = batch.attn_metadata.get_last_indices(batch.size)
        if not batch.is_prefill and batch.padded_size in self.graphs:
            self.attention.prepare_for_replay(batch)
            batch.attn_metadata = self.graphs[batch.padded_size]
        self.batch = batch
        ids = [token for req in reqs for token in req.tokens[req.cached_len : req.device_len]]
        places = [place for req in reqs for place in range(req.cached_len, req.device_len)]
        return logits_of(self.model, ids, places, last).argmax(-1).tolist()

    def _admit(self, req: Req) -> bool:
        handle = self.prefix.match_prefix(torch.tensor(req.tokens[:-1], dtype=torch.int32)).cuda_handle
        promised = sum(self._whole(one.stop) - one.pages * self.page_size for one in self.running)
        need = self._whole(req.stop) - handle.cached_len + promised
        self.prefix.lock_handle(handle)
        if need > self.available:
            self.prefix.lock_handle(handle, unlock=True)
            return False
        req.table_idx, req.handle, req.cached_len, req.hits = self.rows.pop(), handle, handle.cached_len, handle.cached_len
        req.pages = handle.cached_len // self.page_size
        self.table[req.table_idx] = -1
        self.table[req.table_idx, : req.cached_len] = handle.get_matched_indices()
        return True

    def _whole(self, tokens: int) -> int:
        return -(-tokens // self.page_size) * self.page_size

    def _make_room(self, req: Req, stop: int) -> None:
        need = -(-stop // self.page_size) - req.pages
        if need > len(self.free):
            evicted = self.prefix.evict((need - len(self.free)) * self.page_size)
            self.evictions += len(evicted)
            self._give_back(evicted)
        taken, self.free = self.free[:need], self.free[need:]
        places = slice(req.pages * self.page_size, (req.pages + need) * self.page_size)
        self.table[req.table_idx, places] = (taken[:, None] + torch.arange(self.page_size, dtype=torch.int32)).flatten()
        req.pages += need

    def _give_back(self, slots: torch.Tensor) -> None:
        self.free = torch.cat([self.free, slots[:: self.page_size]])

    def _store(self, req: Req, *, finished: bool) -> None:
        ids = torch.tensor(req.tokens[: req.cached_len], dtype=torch.int32)
        slots = self.table[req.table_idx, : req.cached_len].clone()
        cached, handle = self.prefix.insert_prefix(ids, slots)
        self._give_back(slots[req.handle.cached_len : cached])
        self.prefix.lock_handle(handle)
        self.prefix.lock_handle(req.handle, unlock=True)
        req.handle = handle
        self.table[req.table_idx, : handle.cached_len] = handle.get_matched_indices()  # duplicates are free now
        if finished:
            self._give_back(self.table[req.table_idx, handle.cached_len : req.pages * self.page_size])
            self.prefix.lock_handle(handle, unlock=True)
            self.rows.append(req.table_idx)

    def check(self) -> None:
        """Prove that free and stored pages and those of requests are all pages."""
        self.prefix.check_integrity()
        stored = sum(self.prefix.size_info) // self.page_size
        own = sum(req.pages - req.handle.cached_len // self.page_size for req in self.running)
        assert len(self.free) + stored + own == self.num_pages
        assert len(set(self.free.tolist())) == len(self.free)


def mini_sglang() -> dict[str, ModuleType]:
    """Return the modules of mini-sglang that the adapter uses and patches."""
    base = module_of("base", **{one.__name__: one for one in (BaseCacheHandle, BaseKVCachePool, BasePrefixCache)})
    vars(base).update(InsertResult=InsertResult, MatchResult=MatchResult, SizeInfo=SizeInfo)
    kvcache = module_of("kvcache", base=base, SUPPORTED_CACHE_MANAGER=Registry())
    attn_base = module_of("base", BaseAttnBackend=BaseAttnBackend, BaseAttnMetadata=BaseAttnMetadata)
    attention = module_of("attention", base=attn_base, SUPPORTED_ATTENTION_BACKENDS=Registry())
    engine = module_of("engine", create_kvcache_pool=None)
    core = module_of("core", page_size=1)
    vars(core)["get_global_ctx"] = lambda: core
    return {
        "minisgl": module_of("minisgl", kvcache=kvcache, attention=attention),
        "minisgl__attention": attention,
        "minisgl__attention__base": attn_base,
        "minisgl__kvcache": kvcache,
        "minisgl__kvcache__base": base,
        "minisgl__core": core,
        "minisgl__engine": module_of("engine", engine=engine),
        "minisgl__engine__engine": engine,
        "minisgl__distributed": module_of("distributed", get_tp_info=lambda: SimpleNamespace(size=1, rank=0)),
    }
