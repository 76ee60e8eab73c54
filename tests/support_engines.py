"""Small stand-ins of two engines, with the interfaces that the adapters in `examples/adapters` are written for.

Each has a scheduler, sequences and a model of its own, as modules of the engine's name. The model writes each token's key and
value, and chooses the next token by everything that it reads back: so a slot that holds something else shows in the text.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

VOCABULARY, LAYERS, HEADS, DIM = 50, 2, 2, 4


def key_of(token: int, position: int, layer: int) -> float:
    """Return what stands in all of a token's key; its value is the negative."""
    return 1.0 + token + 64 * position + 16384 * layer


def next_token(keys: Sequence[float]) -> int:
    """Choose the next token by all keys of all layers, in order."""
    total = 7
    for number in keys:
        total = (31 * total + int(number)) % 1_000_003
    return total % VOCABULARY


def without_cache(prompt: Sequence[int], new: int) -> list[int]:
    """Return prompt and text, from nothing but the tokens."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(next_token([key_of(token, place, layer) for layer in range(LAYERS) for place, token in enumerate(tokens)]))
    return tokens


def rows_of(tokens: Sequence[int], start: int, stop: int, layer: int) -> torch.Tensor:
    """Return keys ``[stop - start, HEADS, DIM]`` of tokens."""
    keys = torch.tensor([key_of(tokens[place], place, layer) for place in range(start, stop)], dtype=torch.float64)
    return keys[:, None, None].expand(-1, HEADS, DIM).contiguous()


def read(k_caches: Sequence[torch.Tensor], v_caches: Sequence[torch.Tensor], slots: torch.Tensor) -> int:
    """Read everything at slots, and choose."""
    keys = [cache.flatten(0, 1)[slots.long()] for cache in k_caches]
    for one, value in zip(keys, [cache.flatten(0, 1)[slots.long()] for cache in v_caches], strict=True):
        assert torch.equal(one, -value)
        assert torch.equal(one, one[:, :1, :1].expand_as(one))
    return next_token(torch.stack(keys)[:, :, 0, 0].flatten().tolist())


@contextmanager
def modules(**made: ModuleType) -> Iterator[None]:
    """Let modules of these names (dots as two underscores) be imported."""
    names = {name.replace("__", "."): module for name, module in made.items()}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def module_of(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


# -- nano-vllm: a scheduler asks a block manager, with lists of block ids on its sequences


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

    def schedule(self) -> list[NanoSequence]:
        return self._prompts() or self._decoding()

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
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.k_cache = self.v_cache = torch.tensor([])

    def forward(self, seq: NanoSequence, slots: torch.Tensor) -> None:
        start, stop = seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens
        k = rows_of(seq.token_ids, start, stop, self.layer)
        store = sys.modules["nanovllm.layers.attention"].store_kvcache  # type: ignore[attr-defined]
        store(k, -k, self.k_cache, self.v_cache, slots[start:stop])


class NanoRunner:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.model = torch.nn.ModuleList(NanoAttention(layer) for layer in range(LAYERS))
        self.shape = (2, LAYERS, num_blocks, block_size, HEADS, DIM)
        self.allocate_kv_cache()

    def allocate_kv_cache(self) -> None:
        self.kv_cache = torch.full(self.shape, float("nan"), dtype=torch.float64)
        for number, layer in enumerate(self.model):
            layer.k_cache, layer.v_cache = self.kv_cache[:, number]

    def run(self, batch: Sequence[NanoSequence]) -> list[int]:
        chosen = []
        size = self.shape[3]
        for seq in batch:
            slots = (torch.tensor(seq.block_table)[:, None] * size + torch.arange(size)).flatten().to(torch.int32)
            for layer in self.model:
                layer(seq, slots)
            stop = seq.num_cached_tokens + seq.num_scheduled_tokens
            chosen.append(read([one.k_cache for one in self.model], [one.v_cache for one in self.model], slots[:stop]))
        return chosen


def nano_vllm() -> dict[str, ModuleType]:
    """Return the modules of nano-vllm that the adapter patches."""

    class Runner(NanoRunner):
        pass

    scheduler, runner = module_of("scheduler", BlockManager=None), module_of("model_runner", ModelRunner=Runner)
    attention = module_of("attention", store_kvcache=None)
    return {
        "nanovllm": module_of("nanovllm"),
        "nanovllm__engine": module_of("engine", scheduler=scheduler, model_runner=runner),
        "nanovllm__engine__scheduler": scheduler,
        "nanovllm__engine__model_runner": runner,
        "nanovllm__layers": module_of("layers", attention=attention),
        "nanovllm__layers__attention": attention,
    }


# -- mini-sglang: a scheduler has free pages and a table of slots; a prefix cache says which slots hold a prefix


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


class Registry(dict[str, Callable[[torch.device], BasePrefixCache]]):
    def register(self, name: str) -> Callable[[Any], Any]:
        return lambda made: self.setdefault(name, made)


@dataclass
class Req:
    tokens: list[int]
    stop: int
    row: int = -1
    cached_len: int = 0  # tokens that are computed
    handle: Any = None
    hits: int = 0
    pages: int = 0  # entries of its row that have a page


class MiniScheduler:
    """Free pages, a row of slots for each request, and what runs; prompts in chunks."""

    def __init__(self, num_pages: int, page_size: int, chunk: int, rows: int = 8) -> None:
        kvcache, engine = sys.modules["minisgl.kvcache"], sys.modules["minisgl.engine.engine"]
        sys.modules["minisgl.core"].page_size = page_size  # type: ignore[attr-defined]
        device = torch.device("cpu")
        self.prefix = kvcache.SUPPORTED_CACHE_MANAGER["kvdock"](device)  # type: ignore[attr-defined]
        config = SimpleNamespace(num_kv_heads=HEADS, head_dim=DIM, num_layers=LAYERS)
        self.pool = engine.create_kvcache_pool(  # type: ignore[attr-defined]
            model_config=config, num_pages=num_pages, page_size=page_size, dtype=torch.float64, device=device
        )
        self.page_size, self.num_pages, self.chunk = page_size, num_pages, chunk
        self.free = (torch.arange(num_pages, dtype=torch.int32) * page_size).flip(0)
        self.table = torch.full((rows, 256), -1, dtype=torch.int32)
        self.rows = list(range(rows))
        self.waiting, self.running, self.done = deque[Req](), list[Req](), list[Req]()
        self.evictions = 0

    @property
    def available(self) -> int:
        return self.prefix.size_info.evictable_size + len(self.free) * self.page_size

    def step(self) -> None:
        while self.waiting and self.rows and self._admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        for req in list(self.running):
            start = req.cached_len
            stop = min(start + self.chunk, len(req.tokens))
            self._make_room(req, stop)
            slots = self.table[req.row, :stop]
            for layer in range(LAYERS):
                k = rows_of(req.tokens, start, stop, layer)
                self.pool.store_kv(k.flatten(1), -k, slots[start:], layer)
            req.cached_len = stop
            was_prompt = stop - start > 1 or start < req.hits
            if stop == len(req.tokens):
                numbers = range(self.pool.num_layers)
                chosen = read([self.pool.k_cache(n) for n in numbers], [self.pool.v_cache(n) for n in numbers], slots)
                req.tokens.append(chosen)
            if len(req.tokens) == req.stop:
                self.running.remove(req)
                self.done.append(req)
                self._store(req, finished=True)
            elif was_prompt:
                self._store(req, finished=False)

    def _admit(self, req: Req) -> bool:
        handle = self.prefix.match_prefix(torch.tensor(req.tokens[:-1], dtype=torch.int32)).cuda_handle
        promised = sum(self._whole(one.stop) - one.pages * self.page_size for one in self.running)
        need = self._whole(req.stop) - handle.cached_len + promised
        self.prefix.lock_handle(handle)
        if need > self.available:
            self.prefix.lock_handle(handle, unlock=True)
            return False
        req.row, req.handle, req.cached_len, req.hits = self.rows.pop(), handle, handle.cached_len, handle.cached_len
        req.pages = handle.cached_len // self.page_size
        self.table[req.row] = -1
        self.table[req.row, : req.cached_len] = handle.get_matched_indices()
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
        self.table[req.row, places] = (taken[:, None] + torch.arange(self.page_size, dtype=torch.int32)).flatten()
        req.pages += need

    def _give_back(self, slots: torch.Tensor) -> None:
        self.free = torch.cat([self.free, slots[:: self.page_size]])

    def _store(self, req: Req, *, finished: bool) -> None:
        ids = torch.tensor(req.tokens[: req.cached_len], dtype=torch.int32)
        slots = self.table[req.row, : req.cached_len].clone()
        cached, handle = self.prefix.insert_prefix(ids, slots)
        self._give_back(slots[req.handle.cached_len : cached])
        self.prefix.lock_handle(handle)
        self.prefix.lock_handle(req.handle, unlock=True)
        req.handle = handle
        self.table[req.row, : handle.cached_len] = handle.get_matched_indices()  # duplicates are free now
        if finished:
            self._give_back(self.table[req.row, handle.cached_len : req.pages * self.page_size])
            self.prefix.lock_handle(handle, unlock=True)
            self.rows.append(req.row)

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
    engine = module_of("engine", create_kvcache_pool=None)
    core = module_of("core", page_size=1)
    vars(core)["get_global_ctx"] = lambda: core
    return {
        "minisgl": module_of("minisgl", kvcache=kvcache),
        "minisgl__kvcache": kvcache,
        "minisgl__kvcache__base": base,
        "minisgl__core": core,
        "minisgl__engine": module_of("engine", engine=engine),
        "minisgl__engine__engine": engine,
        "minisgl__distributed": module_of("distributed", get_tp_info=lambda: SimpleNamespace(size=1, rank=0)),
    }
