"""What ``generate`` sees."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, SupportsIndex

import attrs
import numpy as np
import torch
from transformers.cache_utils import Cache

import kvdock
from kvdock.cache.paged_config import PagedKVCacheConfig
from kvdock.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from kvdock.files.interface import Loaded, Saved
from kvdock.integrations.transformers.bound import Bound
from kvdock.integrations.transformers.captured import CapturedDecoding, captured_decoding
from kvdock.integrations.transformers.checkpoints import Checkpoints
from kvdock.integrations.transformers.commit import committable, computed_rows, publish
from kvdock.integrations.transformers.compat import CACHE_KEYWORD, CROPS_TO_LENGTH
from kvdock.integrations.transformers.decoding import PagedDecoding, check_in_place
from kvdock.integrations.transformers.explanation import CacheExplanation, explained
from kvdock.integrations.transformers.files import load_prefixes, save_prefixes
from kvdock.integrations.transformers.hook import what_runs
from kvdock.integrations.transformers.measure import Measurement, measure
from kvdock.integrations.transformers.probe import check_choice, chosen_reader, reader_of
from kvdock.integrations.transformers.prompts import ADAPTERS, check_not_held, check_use, read_prompts
from kvdock.integrations.transformers.reading import Reader
from kvdock.integrations.transformers.reuse import PrefixReuse
from kvdock.integrations.transformers.sharing import sharing_of
from kvdock.integrations.transformers.state import PagedState
from kvdock.integrations.transformers.state_layer import layers_of
from kvdock.integrations.transformers.states import StateLayer, StateLayers
from kvdock.integrations.transformers.usage import CacheUsage, usage_of
from kvdock.integrations.transformers.watch import HookWatch
from kvdock.prefix.factory import prefix_cache_of_pool
from kvdock.prefix.interface import Namespace, PrefixCache
from kvdock.rank import RankInfo
from kvdock.scheduler import CacheManager, Tier
from kvdock.tiers.host import bound_tiers

__all__ = ["CacheUsage", "PagedCacheForTransformers"]

_FOR_MODEL = "PagedCacheForTransformers.for_model"


class PagedCacheForTransformers(Cache):
    """A Transformers cache whose keys and values are in the blocks of one pool.

    It gives the tokens that ``DynamicCache`` gives, in greedy decoding, sampling, beam search, assisted decoding and chunked
    prefill, and takes blocks as sequences grow. Make one with `for_model`. It can be used by one ``generate`` call after another:
    `reset` it for a new conversation, or keep it and pass the longer prompt.

    Copies: `copy.deepcopy`, Transformers' way to go on from one prefix several times, and `copy.copy` give a cache in the same pool that
    shares blocks until one of the two writes; neither ever writes into what the other has. `pickle` raises `UnsupportedError`.

    With a prefix cache (``for_model(..., prefix="radix")``) what was computed once is used by all later calls whose prompts
    begin with the same tokens, in any row and any order::

        out = model.generate(**cache.bind(**inputs), max_new_tokens=64)   # computes what is not cached of inputs
        cache.commit(out)                                                 # lets it be found from now on

    * `bind` begins a new batch: the rows of the last one are released, and for each new row as much is taken from the
      prefix cache as all rows have. `commit` is optional; what is not committed is gone with the next `bind`.
    * Whole blocks are stored, so a prefix is found up to a multiple of the block size. Padding on the left of the rows of a batch
      needs no blocks, and may have any length: all rows go on at one place, that of the row that has found least. Where that
      is in the middle of a cached block of another row, that row gets a copy of it.
    * ``generate`` repeats prompts for beams and for several results before it computes them. To compute a prompt once, let it
      be computed first: ``cache.commit(model.generate(**cache.bind(**inputs), max_new_tokens=1))``; each beam then computes
      what is left of a block. Of beams only the prompts are stored.
    * A forward pass by hand returns logits of what is not cached only. Over rows with padding it gets the positions and the mask
      that ``generate`` would pass, unless it has its own.
    * When the pool is full, the prefixes that were used least recently make room, never those of a batch that is there.
    * `usage` says how many tokens were cached; `prefix` is the prefix cache, to be looked at. `forget_prefixes` empties it, and
      must be called when the weights of the model change. Adapters and tenants have a namespace each, see `bind`.
    * What can be shared is measured, see `kvdock.integrations.transformers.sharing`: rotary embeddings that change with the length
      (``dynamic``, ``longrope``) give other keys beyond the length that a model was first trained for, so longer batches find
      nothing, and of what is generated the tokens up to there are stored. A few models count padding as tokens whatever they
      are told; of their batches only rows without padding are shared.
    * Logits may differ in their last bits from those without reuse: matrices of another shape are multiplied in another order.

    Threads: a pool, with all the caches in it, belongs to one thread at a time. Between forward passes another thread may
    go on; a forward pass in another thread at the same time is refused with `WrongThreadError`. A thread that calls `prefix`
    itself must also call its ``hand_over``.
    """

    def __init__(self, state: PagedState, found: Measurement, reuse: PrefixReuse | None, watch: HookWatch) -> None:
        self.state = state
        self._found = found
        self._reuse = reuse
        self._watch = watch
        layers = list(layers_of(state, found))
        state.states = StateLayers([layer for layer in layers if isinstance(layer, StateLayer)])
        super().__init__(layers=layers)

    def __repr__(self) -> str:
        state = self.state
        return (
            f"PagedCacheForTransformers(layers={len(self)}, batch_size={state.batch_size}, length={state.length}, "
            f"attention={self.explain()}, captured={state.captured}, pool={state.manager})"
        )

    @classmethod
    def for_model(
        cls,
        model: Any,
        conf: PagedKVCacheConfig,
        prefix: str | PrefixCache | None = None,
        *,
        attention: str = "auto",
        state_bytes: int | None = None,
        tiers: Sequence[Tier] = (),
        **options: Any,
    ) -> PagedCacheForTransformers:
        """Make a cache for a model, with a pool on its device.

        One token is run through the model, to measure what it hands to a cache; a few more, to see whether its attention can read
        pages, and with ``prefix`` what can be shared. The model gets forward hooks that make each pass fit to what is cached, see
        `kvdock.integrations.transformers.hook`; between passes with a paged cache all else of it is as it was.

        Args:
            model: a decoder-only ``PreTrainedModel``.
            conf: size of the pool and of its blocks. Where all layers keep all tokens they hold ``num_blocks * block_size`` tokens of
                all rows together. Layers with sliding windows let go of what no later token reads, and have blocks of their own in
                the pool, see `kvdock.plan_blocks`; with ``keep_all=True`` they keep it.
            prefix: how prefixes are reused over calls: ``"radix"``, ``"naive"`` (not at all), or the name that a plugin gave its
                prefix cache, see `kvdock.create_prefix_cache`; or an empty prefix cache of the same block size, for this cache
                alone. None leaves the last tokens in the cache instead of looking them up.
            attention: ``"pages"``: the model's attention reads keys and values where they lie. ``"gather"``: they are gathered for the
                model's own attention. ``"auto"``: pages where the model allows it, see `attention`.
            state_bytes: of a model with states, most bytes of those that are kept behind prefixes, beside the pool; by default a
                quarter of the pool's, and at least those of 4 prefixes.
            tiers: with ``prefix``, where blocks go that are evicted, such as ``[kvdock.HostTier(4 << 30)]``: they are bound to the pool,
                and what a prompt finds there is brought back.
            options: what else a prefix cache made by name takes, such as ``policy="lfu"``.

        Raises:
            UnsupportedError: the model keeps something else than keys and values of one dtype on one device (linear
                attention, convolutions, cross-attention, layers on several devices, ...). With ``prefix`` also where keys and
                values depend on later tokens. With ``attention="pages"`` also where a layer cannot read pages; says why.
            CapacityError: the memory in ``conf`` holds not even one block.
            ArgumentValueError: no prefix cache has that name; or one that is not empty, or of another block size. Or ``attention`` is
                none of the three; or ``state_bytes`` is less than one prefix needs.
            ArgumentTypeError: ``prefix`` is something else, or options that the prefix cache does not take.
        """
        check_choice(_FOR_MODEL, attention)
        if prefix is None and (options or tiers):
            got = ", ".join([*options, *(["tiers"] if tiers else [])])
            raise ArgumentTypeError(_FOR_MODEL, expected="no options and no tiers without prefix=", got=got)
        model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped: it would trace it without the hook
        found, runs = measure(model), what_runs(model)
        pool = kvdock.create_cache(found.spec, conf, RankInfo(found.device))
        block_size = math.lcm(*(group.block_size for group in pool.groups))  # in which blocks of all groups end together
        name = "naive" if prefix is None else prefix
        made = prefix_cache_of_pool(_FOR_MODEL, name, num_blocks=pool.num_blocks, block_size=block_size, options=options)
        manager = CacheManager(pool.num_blocks, prefix=made, groups=pool.groups, tiers=bound_tiers(_FOR_MODEL, tiers, pool))
        room = _room_for_states(state_bytes, found.state_group.nbytes, pool.nbytes)
        kept = Checkpoints(block_size, room, found) if any(found.states) else None
        reuse = PrefixReuse(manager, getattr(model, "generation_config", None), sharing_of(runs), kept) if prefix is not None else None

        def trial(rows: int, tokens: int, reader: Reader) -> PagedCacheForTransformers:
            blocks = rows * sum(-(-tokens // block_size) * block_size // group.block_size for group in pool.groups)
            small = attrs.evolve(conf, num_blocks=blocks, max_kv_memory_bytes=None)
            tried = kvdock.create_cache(found.spec, small, RankInfo(found.device))
            state = PagedState(tried, CacheManager(tried.num_blocks, groups=tried.groups), reader)
            return cls(state, found, None, HookWatch(runs, tried))

        reader = chosen_reader(_FOR_MODEL, runs, attention, lambda: reader_of(runs, found, trial))
        return cls(PagedState(pool, manager, reader), found, reuse, HookWatch(runs, pool))

    def bind(self, *, namespace: Namespace = (), **inputs: Any) -> dict[str, Any]:
        """Return the arguments of a ``generate`` or ``forward`` call together with this cache.

        The keyword for a cache is ``cache`` from Transformers 5.24 on and ``past_key_values`` before; this takes the right one.
        With a prefix cache this begins a new batch, for one ``generate`` call. The first pass leaves out the tokens that are
        cached. An attention mask is added if there is none.

        Args:
            namespace: with whom prefixes are shared, such as ``("tenant", "a")`` or ``("adapter", "b")``; others are not seen. It is
                not passed on, and without a prefix cache it changes nothing.
            inputs: ``input_ids`` and ``attention_mask`` as the tokenizer returns them, ``[rows, length]``, and any others.

        Raises:
            ArgumentValueError: without a prefix cache, the cache already holds the whole prompt, so that there is no token to
                compute, and Transformers itself would feed the prompt a second time. With one, padding that is not on the
                left, or inputs whose keys and values depend on more than token ids; see `read_prompts`. Nothing was changed.
            OutOfBlocksError: with a prefix cache, the prompts do not fit. The cache is empty then.
        """
        check_use(inputs)
        inputs["use_cache"] = True  # whatever the model's configuration says
        if self._reuse:
            return self._bind_prefix(self._reuse, namespace, inputs)
        check_not_held(inputs, self.get_seq_length())
        return {**inputs, CACHE_KEYWORD: self}

    def commit(self, out: Any) -> None:
        """Let what was computed since `bind` be found by later ones, in whole blocks.

        Args:
            out: what ``generate`` returned, ids ``[rows, length]`` or an output with ``sequences``; or the ids of a loop of one's
                own. Each row begins with its prompt as it was bound. The last token need not be computed.

        Raises:
            ArgumentValueError: without `bind` before, twice, after prompts were cut or prefixes forgotten; with other rows, prompts
                or lengths than the cache computed; or where it was computed with another mask, other positions, or from
                something else than token ids. Nothing was changed.
            UnsupportedError: there is no prefix cache.
        """
        reuse = self._needed("commit")
        self.state.check_whole("commit")
        bound = committable(self.state.bound, reuse.epoch)
        if self.state.batch:
            publish(self.state, self.state.batch, computed_rows(bound, self.state.batch, out))
        if reuse.checkpoints is not None:
            reuse.checkpoints.store(bound.prompts, bound.kept)
        bound.close("one that is committed")

    @property
    def attention(self) -> str:
        """How attention gets keys and values: ``"pages"``, where they lie, or ``"gather"``.

        Where the cache reads pages, a pass gathers even so if gradients are recorded, the model is in training, attention weights are
        asked for, or the mask is none of padding on the left; and latents are expanded for so many new tokens that it is less work.
        `explain` and `repr` name the reason for what gathers.
        """
        return self.explain().attention

    def explain(self) -> CacheExplanation:
        """Return how attention gets keys and values, and why: of the cache, of each layer, and of the last pass."""
        return explained(self.state)

    def decoding(self, new_tokens: int, attention_mask: torch.Tensor | None = None) -> PagedDecoding:
        """Make room for steps of one token each, so that a step is one graph of `torch.compile`, whatever the length.

        For example, behind a pass over the prompts::

            step = torch.compile(model, fullgraph=True)
            with cache.decoding(64) as steps:
                for _ in range(64):
                    logits = step(input_ids=tokens, **steps.next()).logits  # tokens: [rows, 1]

        Behind the ``with`` block the cache has the tokens of these steps, and can go on by other ways. They are not stored by `commit`.

        Args:
            new_tokens: most steps, at least 1.
            attention_mask: of the tokens that are there, ``[rows, length]``; by default nothing is hidden.

        Raises:
            ArgumentValueError: the cache is empty, or the mask hides more than padding on the left.
            OutOfBlocksError: the pool has no room for so many. Nothing was changed.
            UnsupportedError: attention does not read pages in all layers; layers share another's keys; Transformers before 5.24.
        """
        check_in_place("PagedCacheForTransformers.decoding", self.state, self._found.stored)
        return PagedDecoding(self.state, self._found.windows, new_tokens, attention_mask)

    def capture(
        self, batch_sizes: Sequence[int] = (1, 2, 4, 8, 16), max_length: int | None = None, *, compiled: bool = False
    ) -> CapturedDecoding:
        """Make the model's decode step a graph of the device; `generate` and forward passes with this cache use it from now on.

        For example::

            cache = PagedCacheForTransformers.for_model(model, conf)
            cache.capture(batch_sizes=(1, 4, 16), max_length=8192)
            out = model.generate(**cache.bind(**inputs), max_new_tokens=64)

        A pass of one token of each row then launches one graph instead of each layer's kernels; a batch is padded to the next of
        ``batch_sizes``. Prompts, several tokens at a time, larger batches and longer rows are computed as before, and so is what may
        be another step than the one that was recorded: other arguments, `torch.autocast`, hooks, adapters, weights that were moved.
        `captured` says why the last step was. What weights hold may change. On a device that captures nothing, the same code runs
        without a graph.

        The model's layers run once for each size, on padding; a backend that captures runs them twice more to warm up, and once to
        record. Then a few steps are compared with those without. All graphs share the memory that the largest needs.

        Args:
            batch_sizes: rows that graphs are made for, each at least 1.
            max_length: most tokens of a row, without padding that has no blocks; by default what the pool and the model hold.
            compiled: whether `torch.compile` joins the kernels of the model's layers first. That takes tens of seconds for each
                size, and a step becomes quicker the smaller the batch is. It needs Transformers 5.24.

        Raises:
            UnsupportedError: attention does not read pages in all layers; the model is in training; it has parts that are
                neither Transformers' nor torch's, such as adapters, or hooks on parts; its layers wait for the device, as some
                mixtures of experts do, or give something else when they are recorded. Says why; the cache is as it was.
            ArgumentValueError: the cache is not empty; no size, or one below 1.
            OutOfBlocksError: the pool has no room for the tokens that it is tried on.
        """
        model = self.state.reader.model()
        if model is None:
            raise UnsupportedError("PagedCacheForTransformers.capture", expected="the model of the cache", got="one that is gone")
        self.state.captured = None
        self.state.captured = made = captured_decoding(
            self, model, self._found.windows, self._found.stored, batch_sizes, max_length, compiled=compiled
        )
        return made

    @property
    def captured(self) -> CapturedDecoding | None:
        """The decode step as graphs, see `capture`; None without."""
        found = self.state.captured
        return found if isinstance(found, CapturedDecoding) else None

    @property
    def prefix(self) -> PrefixCache | None:
        """The prefix cache, or None; to look at, see `forget_prefixes`."""
        return self.state.manager.prefix if self._reuse else None

    def forget_prefixes(self) -> None:
        """Forget all prefixes, in every namespace, as after a change of the model's weights.

        Batches that are there stay, and cannot be committed any more.

        Raises:
            UnsupportedError: there is no prefix cache.
        """
        reuse = self._needed("forget_prefixes")
        with self.state.change():
            reuse.forget()

    def save(self, path: str | os.PathLike[str], input_ids: Any = None, *, namespace: Namespace = (), **options: Any) -> Saved:
        """Save prefixes that are committed to a file, for a process to come; see `kvdock.files`.

        Args:
            path: where to.
            input_ids: of one prompt, ``[length]`` or ``[1, length]``, whose blocks are saved; None for all that is cached.
            namespace: where it was bound.
            options: ``model``, ``max_file_bytes`` and ``progress``, as of `kvdock.files.save_prefix`. A ``model`` is well worth giving.

        Raises:
            UnsupportedError: there is no prefix cache.
            KVDockError: as `kvdock.files.save_prefix` and `kvdock.files.save_pool`.
        """
        return save_prefixes(self._needed("save"), self.state, path, input_ids, namespace, options)

    def load(self, path: str | os.PathLike[str], **options: Any) -> Loaded:
        """Load what `save` saved, of one prompt or of all, so that `bind` finds it.

        Args:
            path: the file.
            options: ``model`` and ``progress``, as of `kvdock.files.load_prefix`.

        Raises:
            UnsupportedError: there is no prefix cache.
            KVDockError: as `kvdock.files.load_prefix`.
        """
        return load_prefixes(self._needed("load"), self.state, path, options)

    @property
    def usage(self) -> CacheUsage:
        """What this cache holds now."""
        kept = self._reuse.checkpoints if self._reuse else None
        return usage_of(self.state, 0 if kept is None else kept.nbytes)

    @property
    def batch_size(self) -> int:
        """Rows of the sequences that the cache holds, or -1 without any."""
        return self.state.batch_size if self.state.length else -1

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens of every row, and release the blocks behind them.

        What sliding windows have left behind is there as long as nobody wants its room, so that a pass can be undone before the next.

        Raises:
            IndexRangeError: there are fewer; or a window has let go of what the next token needs. Nothing was changed.
        """
        self.state.truncate(length)

    def crop(self, tokens_to_remove: SupportsIndex) -> None:
        """Remove the last ``-tokens_to_remove`` tokens, as the installed version of Transformers means it.

        Args:
            tokens_to_remove: zero or negative; before Transformers 5.16 a positive number is the length to keep.

        Raises:
            ArgumentValueError: it is positive, from Transformers 5.16 on. Nothing was changed.
        """
        length, change = self.state.length, operator.index(tokens_to_remove)  # some versions pass a tensor
        if change <= 0:
            self.truncate(max(length + change, 0))
        elif CROPS_TO_LENGTH:
            self.truncate(min(length, change))
        else:
            raise ArgumentValueError(
                "PagedCacheForTransformers.crop: tokens_to_remove",
                expected="zero or a negative number of tokens",
                got=change,
                fix=f"crop({-change}) to remove so many, truncate({change}) to keep so many",
            )

    def reset(self) -> None:
        """Release all blocks. The cache is empty then, for a batch of any size. What is in a prefix cache stays there."""
        self.state.truncate(0)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row ``beam_idx[i]`` the new row i; rows that go on from one share its blocks.

        Raises:
            IndexRangeError: a row that does not exist. Nothing was changed.
        """
        if self._has_rows:
            self.state.select(beam_idx.cpu().numpy())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times; the copies share its blocks."""
        if self._has_rows:
            self.state.select(np.repeat(np.arange(self.state.batch_size), repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only some rows.

        Args:
            indices: row numbers, or a mask of booleans over the rows; one dimension.
        """
        if self._has_rows:
            self.state.select(np.arange(self.state.batch_size)[indices.cpu().numpy()])

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]:
        """Yield keys, values and window of each layer, as Transformers' own cache does; keys and values are gathered anew."""
        for layer in self.layers:
            window = getattr(layer, "window", None)
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            yield keys, values, None if window is None else torch.tensor(window)

    def __copy__(self) -> PagedCacheForTransformers:
        return self.__deepcopy__({})

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "PagedCacheForTransformers",
            expected="a copy in this process, by copy.deepcopy",
            got="a request to pickle it",
            fix="pickle the token ids, and let another cache compute them",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCacheForTransformers:
        """Return a cache that goes on from here in the same pool. No key or value is copied before one of the two writes."""
        copied = type(self)(self.state.fork(), self._found, self._reuse, self._watch)
        copied.state.states.become(self.state.states)
        memo[id(self)] = copied
        return copied

    @property
    def _has_rows(self) -> bool:
        """Whether rows mean anything: there are tokens, or prompts that were bound."""
        return bool(self.state.length or self.state.bound)

    def _bind_prefix(self, reuse: PrefixReuse, namespace: Namespace, inputs: dict[str, Any]) -> dict[str, Any]:
        prompts, mask = read_prompts(inputs, namespace, reuse.generation)
        self.state.truncate(0)
        # With adapter_names PEFT adds hooks for the call, so that a change of hooks says nothing.
        hooks = None if inputs.get(ADAPTERS) else self._watch.hooks
        with self.state.change():
            begun = reuse.begin(prompts)
            batch = begun.batch
            bound = Bound(prompts, batch.length, reuse.epoch, np.arange(batch.batch_size), reuse.sharing, hooks, places=begun.places)
            self.state.begin_with(bound, batch)
            self.state.states.join(begun.states)
        positions = {"position_ids": (mask.cumsum(dim=-1) - 1).clamp(min=0)} if reuse.sharing.own_positions else {}
        return {**inputs, "attention_mask": mask, **positions, CACHE_KEYWORD: self}

    def _needed(self, method: str) -> PrefixReuse:
        """Return what reuses prefixes, or raise if nothing does."""
        if self._reuse is None:
            fix = "make the cache with for_model(..., prefix='radix')"
            raise UnsupportedError(f"PagedCacheForTransformers.{method}", expected="a prefix cache", got="none", fix=fix)
        return self._reuse


def _room_for_states(given: int | None, nbytes: int, pool_bytes: int) -> int:
    """Return how many bytes of states are kept behind prefixes at most, where one has so many."""
    if given is None:
        return max(pool_bytes // 4, 4 * nbytes)
    expected, fix = f"at least {nbytes}, the bytes of one prefix", "leave it out, or make the cache without prefix="
    if not isinstance(given, int) or given < nbytes:
        raise ArgumentValueError(f"{_FOR_MODEL}: state_bytes", expected=expected, got=given, fix=fix)
    return given
