"""Whether a model's attention can read pages: tried on a few tokens, in a pool of its own.

The configuration does not tell. A model may have an attention that is not Transformers', turn the cached keys into others, or make
masks of its own. So rows with and without padding go through it in three passes, several tokens at a time and one; each layer's
attention is computed both ways, and compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from kvdock.errors import ArgumentValueError, UnsupportedError
from kvdock.integrations.transformers.compat import CACHE_KEYWORD
from kvdock.integrations.transformers.measure import Measurement, input_device
from kvdock.integrations.transformers.reading import Check, Reader
from kvdock.integrations.transformers.switching import configs_of, former_of

__all__ = ["check_choice", "chosen_reader", "reader_of"]

_IDS = ([[0, 1, 2, 3], [1, 2, 3, 1]], [[1, 2], [2, 3]], [[3], [1]])
_MASK = [[0, 1, 1, 1, 1, 1, 1], [1] * 7]

_KNOWN: weakref.WeakKeyDictionary[Any, tuple[list[str], Reader]] = weakref.WeakKeyDictionary()
"""By model what was found, and the attention that its configurations named."""


def check_choice(subject: str, attention: object) -> None:
    """Raise unless it is one of the three ways in which attention can get keys and values."""
    if attention not in ("auto", "pages", "gather"):
        raise ArgumentValueError(f"{subject}: attention", expected="'auto', 'pages' or 'gather'", got=repr(attention))


def chosen_reader(subject: str, model: Any, attention: str, find: Callable[[], Reader]) -> Reader:
    """Return the reader for what a user chose.

    Raises:
        UnsupportedError: pages were, and a layer cannot read them.
    """
    if attention == "gather":
        return _gathering(model, "as chosen")
    reader = find()
    problem = reader.why or next(filter(None, reader.problems), "")
    if attention == "pages" and problem:
        fix = "leave attention= out: then what can read pages does, and the rest gathers"
        raise UnsupportedError(f"{subject}: attention", expected="a model whose layers can all read pages", got=problem, fix=fix)
    return reader


def _gathering(model: Any, why: str) -> Reader:
    """Return a reader that reads nothing on pages."""
    return Reader(weakref.ref(model), why=why)


def reader_of(model: Any, found: Measurement, make: Callable[[int, int, Reader], Any]) -> Reader:
    """Try whether a model's attention can read pages. What was found is kept as long as the model lives.

    Args:
        model: what runs, whose cache was measured.
        found: the measurement.
        make: makes a cache for the model, with a pool for so many rows of so many tokens, and a reader.
    """
    names = [former_of(config) for config in configs_of(model)]
    known = _KNOWN.get(model)
    if known is None or known[0] != names:
        known = _KNOWN[model] = names, _tried(model, found, make)
    return known[1]


def _tried(model: Any, found: Measurement, make: Callable[[int, int, Reader], Any]) -> Reader:
    check = Check([None] * len(found.spec.layers))
    configs = [(config, former_of(config)) for config in configs_of(model)]
    try:
        got = _run(model, make(len(_MASK), len(_MASK[0]), Reader(weakref.ref(model), tuple(configs), check=check)))
        expected = _run(model, DynamicCache(config=model.config))
    except UnsupportedError as error:
        return _gathering(model, f"{type(model).__name__} has {error.got}")
    except Exception as error:  # noqa: BLE001 - whatever a model does not like about pages, or about padding
        return _gathering(model, f"a trial of {type(model).__name__} on pages failed: {type(error).__name__}: {error}")
    return _judged(model, check, configs, torch.equal(expected, got))


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Let nothing drop out: a cache may be made for a model that is still in training."""
    training = [part for part in model.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _judged(model: Any, check: Check, configs: list[tuple[Any, str]], same: bool) -> Reader:
    problems = tuple("an attention of its own" if problem is None else problem for problem in check.problems)
    if not same:
        return _gathering(model, f"{type(model).__name__} gives other logits when its attention is found by its name")
    if all(problems):
        return _gathering(model, f"{type(model).__name__} has {problems[0]}")
    return Reader(weakref.ref(model), tuple(pair for pair in configs if id(pair[0]) in check.configs), problems=problems)


def _run(model: Any, cache: Any) -> torch.Tensor:
    """Run the tokens of the trial; return the last logits."""
    device, length = input_device(model), 0
    for ids in _IDS:
        length += len(ids[0])
        mask = [row[:length] for row in _MASK]
        told = {name: torch.tensor(value, device=device) for name, value in (("input_ids", ids), ("attention_mask", mask))}
        with torch.no_grad(), _evaluating(model):
            output = model(**told, use_cache=True, **{CACHE_KEYWORD: cache})
    logits: torch.Tensor = output.logits
    return logits
