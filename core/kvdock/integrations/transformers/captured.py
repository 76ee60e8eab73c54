"""Decode steps of a model as graphs of the device: what they stand in for, and when.

::

    model(...)                  Transformers' own, with kvdock's hooks
        model.base_model(...)   tables and token ids are copied to where a graph reads them, and the graph is launched
        the head                Transformers' own, on the hidden states that the graph has left

A graph repeats what was launched when it was recorded, and nothing else. So each step is looked at first. One that may be another is
computed as without graphs: with other arguments, or behind a change of the model, see `kvdock.integrations.transformers.parts`.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from kvdock.captured import CapturedSteps
from kvdock.errors import ArgumentValueError, KVDockError, UnsupportedError
from kvdock.integrations.transformers.compat import CACHE_KEYWORD
from kvdock.integrations.transformers.decoding import Place, check_compiles, check_in_place, decoding_layers, mask_of
from kvdock.integrations.transformers.masks import Pads, asked_pads
from kvdock.integrations.transformers.parts import Parts
from kvdock.integrations.transformers.plain import CACHES, by_name, defaults_of
from kvdock.integrations.transformers.reading import Pass
from kvdock.integrations.transformers.standing import stand_in, step_back
from kvdock.integrations.transformers.state import PagedState
from kvdock.integrations.transformers.switching import restore, switch
from kvdock.integrations.transformers.tables import sent
from kvdock.scheduler import BatchTables, SequenceBatch, TableViews
from kvdock.spec import check_int

__all__ = ["CapturedDecoding", "captured_decoding"]

_CAPTURE = "PagedCacheForTransformers.capture"
_FIX = "use the cache as it is: generate() then launches the kernels of each step one by one"

_KNOWN = frozenset(("input_ids", "position_ids", "attention_mask", "cache_position", "use_cache", "return_dict", *CACHES))
"""Arguments that are looked at, or follow from those."""

_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
"""What a configuration may ask for beside hidden states."""

_TRIAL = ([[0, 1, 2, 3], [1, 2, 3, 1]], [[1, 2], [2, 3]], [[3], [1]])
_TRIAL_MASK = [[0, 1, 1, 1, 1, 1, 1], [1] * 7]
_MASK = "a mask that hides more than padding on the left"
_CLOSE = 1e-3
"""How far logits of the trial may be apart, as a part of their length; more where a dtype is coarser."""


class _AnotherStepError(Exception):
    """A pass is none of the steps that were captured: says why."""


def _nothing() -> None:
    """Be a reference to a batch that is gone."""


class CapturedDecoding:
    """The decode step of a model as graphs, see `PagedCacheForTransformers.capture`.

    Args:
        model: what runs.
        state: of a cache of the model, whose pool is written and read.
        windows: sliding window of each layer, or None.
        batch_sizes: rows that graphs are made for.
        max_length: most tokens of a row, without padding that has no blocks.
        compiled: whether the model's layers are compiled before they are recorded.

    Attributes:
        batch_sizes: the sizes, ascending.
        max_length: the same.
        is_captured: whether there are graphs. Otherwise each step calls the model, on the same tables.
        odd: why the last pass of one token of each row was none of these steps; "" if it was.
    """

    def __init__(
        self, model: Any, state: PagedState, windows: Sequence[int | None], batch_sizes: Sequence[int], max_length: int, *, compiled: bool
    ) -> None:
        inner, pool = model.base_model, state.pool
        self._parts = Parts(inner)
        problem = "no layers below its head" if inner is model else self._parts.problem
        if problem:
            raise _unsupported(model, problem)
        self._inner, self._pool, self._windows, self._group_of = weakref.ref(inner), pool, windows, state.group_of
        self._configs = [config for config, _ in state.reader.configs]
        self._parameters, self._config = defaults_of(type(inner).forward, 1), inner.config
        self._form: tuple[type[Any], str, str]
        self._starts_of: Callable[[], SequenceBatch | None] = _nothing  # whose first tokens these are
        self._starts: Pads
        self._autocast, self.max_length, self.odd = _autocast(pool.device), max_length, ""
        sizes = sorted({check_int(f"{_CAPTURE}: batch_sizes", size, 1) for size in batch_sizes})
        self._forwards = {size: _compiled(type(inner).forward) if compiled else type(inner).forward for size in sizes}
        widths = [-(-max_length // group.block_size) for group in pool.groups]
        tables = BatchTables(state.manager, max(sizes, default=1), widths, device=pool.device)
        self._mask = mask_of(torch.zeros(max(sizes, default=1), device=pool.device))  # graphs read it where it is
        token, position = torch.zeros(2, dtype=torch.int64, device="cpu").unbind()
        with _says_what_failed(model):
            self._steps = CapturedSteps(self._compute, tables, inputs=[token, position], batch_sizes=sizes)
        self.batch_sizes, self.is_captured = self._steps.batch_sizes, self._steps.is_captured

    def __repr__(self) -> str:
        odd = f", not in the last step: {self.odd}" if self.odd else ""
        return f"CapturedDecoding(batch_sizes={self.batch_sizes}, max_length={self.max_length}, is_captured={self.is_captured}{odd})"

    def begin(self, begun: Pass, state: PagedState, told: dict[str, Any]) -> None:
        """Stand in for the model's layers in a pass that has just begun, if it has one token of each row."""
        ids, inner = told.get("input_ids"), self._inner()
        if inner is not None and isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.shape[1] == 1:
            begun.replay = functools.partial(self._replay, state)
            stand_in(inner)

    def end(self, begun: Pass) -> None:
        """Let the layers be called again, when a pass is over."""
        inner = self._inner()
        if begun.replay is not None and inner is not None:
            begun.replay = None
            step_back(inner)

    def check(self, cache: Any, model: Any) -> None:
        """Compute a few tokens with a copy of an empty cache, in such steps and without.

        Raises:
            UnsupportedError: they give something else.
        """
        rows, trial = min(len(_TRIAL_MASK), self.batch_sizes[-1]), copy.deepcopy(cache)
        try:
            with torch.no_grad():
                *_, expected = [_logits(model, trial, ids[:rows]) for ids in _TRIAL]
                trial.truncate(trial.get_seq_length() - 1)
                trial.state.captured = self
                got = _logits(model, trial, _TRIAL[-1][:rows])
        finally:
            trial.reset()
        problem, limit = trial.state.odd or self.odd, max(_CLOSE, 8 * torch.finfo(expected.dtype).eps)
        if problem or not bool((got - expected).float().norm() <= limit * expected.float().norm()):
            raise _unsupported(model, problem or "other logits from a captured step")

    def _compute(self, views: TableViews, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run the model's layers on a token of each row; return hidden states ``[rows, 1, hidden]``."""
        inner: Any = self._inner()
        of_groups = zip(views.block_tables, views.slot_mappings, strict=True)
        places = [Place(self._pool, table, slots[:, None], views.seq_lens) for table, slots in of_groups]
        cache = Cache(layers=decoding_layers(places, self._group_of, self._windows))
        told = {"input_ids": ids[:, None], "position_ids": positions[:, None], "attention_mask": self._mask[: len(ids)], "use_cache": True}
        switch(self._configs)
        try:
            out = self._forwards[len(ids)](inner, **told, **{CACHE_KEYWORD: cache})
        finally:
            restore(self._configs)
        self._form, hidden = _form_of(out, cache)
        return hidden

    def _replay(self, state: PagedState, inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what the model's layers do in a pass."""
        told = by_name(self._parameters, args, kwargs)
        self.odd = self._misfit(inner, state, told)
        if not self.odd:
            try:
                hidden = state.step(len(told["input_ids"]), functools.partial(self._step, told))
            except _AnotherStepError as error:
                self.odd = str(error)
            else:
                kind, of_hidden, of_cache = self._form
                return kind(**{of_hidden: hidden, of_cache: _cache_in(told)})
        return type(inner).forward(inner, *args, **kwargs)

    def _step(self, told: dict[str, Any], batch: SequenceBatch) -> torch.Tensor:
        """Launch a graph for the last token of each row, and look meanwhile whether it is the step that is asked for.

        If it was not, it did no harm: it has written to places that were made for this step, from weights that are there, and the
        same places are written again. Without a graph parts of the model run here, so that the look comes first.

        Raises:
            _AnotherStepError: it is not.
        """
        mask, rows = told.get("attention_mask"), batch.batch_size
        asked = asked_pads(None if mask is None else mask != 0, rows, batch.length)
        if self._starts_of() is not batch or self._starts.size != rows:  # the first step of a batch waits for the device
            self._show_starts(batch, asked())
        if not self.is_captured:
            self._check(told, batch, asked())
        ids, positions = told["input_ids"][:, 0], told["position_ids"][:, 0]
        hidden = self._steps.run(batch.sequences, ids, positions.expand(rows), seq_lens=batch.seq_lens)
        if self.is_captured:
            self._check(told, batch, asked())
        return hidden

    def _show_starts(self, batch: SequenceBatch, pads: Pads | None) -> None:
        """Take from the padding of a mask the first token of each row's blocks that is seen, which stays from step to step."""
        starts = None if pads is None else pads - batch.pads
        if starts is None or (starts < 0).any():
            raise _AnotherStepError(_MASK)
        self._starts_of = _nothing
        shown = np.zeros(self._mask.shape, dtype=np.int32)
        shown[: starts.size, 0, 0, 0] = starts
        self._mask.copy_(sent(shown, self._pool.device))
        self._starts_of, self._starts = weakref.ref(batch), starts

    def _check(self, told: dict[str, Any], batch: SequenceBatch, pads: Pads | None) -> None:
        """Raise unless what takes the host longer to look at says that a step is one of these, too."""
        problem = self._problem(told) or self._parts.changed()
        if not problem and (pads is None or not np.array_equal(pads - batch.pads, self._starts)):
            problem, self._starts_of = _MASK if pads is None else "other padding than in the step before", _nothing
        if problem:
            raise _AnotherStepError(problem)

    def _misfit(self, inner: Any, state: PagedState, told: dict[str, Any]) -> str:
        """Return why no graph may be launched for a pass of one token of each row, or ""."""
        if self._inner() is not inner or getattr(_cache_in(told), "state", None) is not state:
            return "another model, or another cache"
        ids, positions, batch, mask = told.get("input_ids"), told.get("position_ids"), state.batch, told.get("attention_mask")
        rows = len(ids) if isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.shape[1] == 1 else 0
        if (
            batch is None
            or rows != batch.batch_size
            or not isinstance(positions, torch.Tensor)
            or positions.shape not in ((rows, 1), (1, 1))
        ):
            return "no input_ids and position_ids of [rows, 1]"
        if mask is not None and not isinstance(mask, torch.Tensor):
            return "masks that were made already"
        if rows > self.batch_sizes[-1] or batch.length + 1 - int(batch.pads.min()) > self.max_length:
            return f"more than {self.batch_sizes[-1]} rows, or {self.max_length} tokens in one"
        if _autocast(self._pool.device) != self._autocast:
            return "another torch.autocast than when it was captured"
        return self._parts.moved()

    def _problem(self, told: dict[str, Any]) -> str:
        """Return which of the arguments of a pass, or of what a configuration asks for, make it another step, or ""."""
        if told.get("return_dict") is False or getattr(self._config, "return_dict", True) is False:
            return "a tuple is asked for"
        others = (name for name, value in told.items() if name not in _KNOWN and not self._is_usual(name, value))
        asked = next(others, "") or next((name for name in _OUTPUTS if getattr(self._config, name, False)), "")
        return f"{asked} is asked for, or passed" if asked else ""

    def _is_usual(self, name: str, value: Any) -> bool:
        return value is None or value is False or value is self._parameters.get(name)


def captured_decoding(
    cache: Any, model: Any, windows: Sequence[int | None], stored: Sequence[bool], sizes: Sequence[int], most: int | None, *, compiled: bool
) -> CapturedDecoding:
    """Capture the decode step of a cache's model, and try it; see `PagedCacheForTransformers.capture`."""
    state = cache.state
    check_in_place(_CAPTURE, state, stored)
    if compiled:
        check_compiles(_CAPTURE)
    if state.length or state.bound:
        raise ArgumentValueError(_CAPTURE, expected="an empty cache", got=f"one with {state.length} tokens", fix="reset() it first")
    if model.training:
        raise UnsupportedError(_CAPTURE, expected="a model that is not in training", got="one in training", fix="call model.eval()")
    pool = state.pool
    room = min(pool.num_blocks * max(group.block_size for group in pool.groups), pool.spec.max_positions)
    length = room if most is None else check_int(f"{_CAPTURE}: max_length", most, 1)
    made = CapturedDecoding(model, state, windows, sizes, length, compiled=compiled)
    made.check(cache, model)
    return made


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model's forward, compiled for one size of batch."""

    def apart(inner: Any, **told: Any) -> Any:
        return forward(inner, **told)

    # torch.compile keeps what it has made with a function's code, and makes only so many for each: this code is nobody else's.
    own = types.FunctionType(apart.__code__.replace(), apart.__globals__, closure=apart.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=False)


def _form_of(out: Any, cache: Cache) -> tuple[tuple[type[Any], str, str], torch.Tensor]:
    """Return the type of what a model's layers return and the names of hidden states and cache in it, and the hidden states.

    Raises:
        UnsupportedError: it has more than these.
    """
    found = {name: value for name, value in out.items() if value is not None and value is not cache}
    of_cache = next((name for name, value in out.items() if value is cache), None)
    if of_cache is None or len(found) != 1 or not isinstance(hidden := next(iter(found.values())), torch.Tensor):
        got = f"{type(out).__name__} with {', '.join(out)}"
        raise UnsupportedError(_CAPTURE, expected="layers that return hidden states and the cache", got=got, fix=_FIX)
    return (type(out), next(iter(found)), of_cache), hidden


def _cache_in(told: dict[str, Any]) -> Any:
    return next((told[name] for name in CACHES if told.get(name) is not None), None)


def _autocast(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _logits(model: Any, cache: Any, ids: list[list[int]]) -> torch.Tensor:
    """Compute tokens behind those of a trial; return the last logits of each row."""
    start, stop = cache.get_seq_length(), cache.get_seq_length() + len(ids[0])
    mask = torch.tensor([row[:stop] for row in _TRIAL_MASK[: len(ids)]], device=model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:]
    told = {"input_ids": torch.tensor(ids, device=model.device), "attention_mask": mask, "position_ids": positions, "use_cache": True}
    logits: torch.Tensor = model(**told, **{CACHE_KEYWORD: cache}).logits[:, -1]
    return logits


def _unsupported(model: Any, got: str) -> UnsupportedError:
    return UnsupportedError(_CAPTURE, expected=f"a step of {type(model).__name__} that can be recorded and repeated", got=got, fix=_FIX)


@contextmanager
def _says_what_failed(model: Any) -> Iterator[None]:
    """Make errors of a model that is recorded ours: that it waits for the device, for example. A compiler's go on for pages."""
    try:
        yield
    except KVDockError:
        raise
    except Exception as error:
        raise _unsupported(model, f"{type(error).__name__}: {' '.join(str(error).split()[:40])}") from error
