"""Reading what `PagedCacheForTransformers.bind` is given, where prefixes are reused.

Keys and values may be reused where everything that they depend on is known: token ids, their positions, and the namespace,
which stands for the weights. So what else could change them is refused, and so is padding that would change positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.prefix.inputs import namespace_key
from kvdock.prefix.interface import Namespace

__all__ = ["ADAPTERS", "Prompts", "check_not_held", "check_use", "on_host", "read_ids", "read_prompts"]

_BIND = "PagedCacheForTransformers.bind"

_NEGATIVE = ("negative_prompt_ids", "negative_prompt_attention_mask")  # which generate() computes in a cache of its own
_HARMLESS = ("input_ids", "attention_mask", "eos_token_id", "pad_token_id", "bos_token_id", *_NEGATIVE)
"""Arguments that may be tensors."""

ADAPTERS = "adapter_names"
"""PEFT's argument for the adapter of each row."""


@attrs.frozen(eq=False)
class Prompts:
    """A batch of prompts on the host.

    Args:
        ids: token ids, padding included, int64 ``[rows, length]``.
        pads: tokens of padding on the left of each row, int64 ``[rows]``.
        namespace: with whom prefixes are shared.
        stops: token ids that end a sequence; may be empty.
    """

    ids: npt.NDArray[np.int64]
    pads: npt.NDArray[np.int64]
    namespace: Namespace
    stops: npt.NDArray[np.int64]

    @property
    def length(self) -> int:
        """Tokens of each row, padding included."""
        return int(self.ids.shape[1])

    @property
    def tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return int(self.ids.size - self.pads.sum())

    @property
    def is_padded(self) -> bool:
        """Whether any row has padding."""
        return bool(self.pads.any())

    def row(self, index: int) -> npt.NDArray[np.int64]:
        """Return the tokens of a row without padding; a view."""
        tokens: npt.NDArray[np.int64] = self.ids[index, self.pads[index] :]
        return tokens


def read_prompts(inputs: Mapping[str, Any], namespace: Namespace, generation: Any) -> tuple[Prompts, torch.Tensor]:
    """Read the arguments of a ``generate`` call.

    Args:
        inputs: the arguments, without the cache.
        namespace: with whom prefixes are shared.
        generation: the model's ``GenerationConfig``, for the token ids that ``inputs`` does not name; or None.

    Returns:
        the prompts, and the attention mask to pass on, ``[rows, length]``.

    Raises:
        ArgumentTypeError: ids that are no integers, a namespace that is none.
        ArgumentValueError: no ``input_ids`` of two dimensions, a mask that is not 0s on the left and 1s behind them, padding
            without a mask, or something else on which keys and values may depend.
    """
    namespace_key(f"{_BIND}: namespace", namespace)
    _refuse_what_else_counts(inputs, namespace)
    ids = read_ids(f"{_BIND}: input_ids", inputs.get("input_ids"))
    stops, padding = (_token_ids(name, inputs, generation) for name in ("eos_token_id", "pad_token_id"))
    mask = inputs.get("attention_mask")
    if mask is None:
        if not np.isin(padding, stops).any() and np.isin(ids, padding).any():  # generate() would mask them, by the same rule
            raise ArgumentValueError(
                f"{_BIND}: attention_mask",
                expected="one, since input_ids has the padding token",
                got="none",
                fix="pass what the tokenizer returned: bind(**tokenizer(texts, padding=True, return_tensors='pt'))",
            )
        mask = torch.ones(ids.shape, dtype=torch.long, device=getattr(inputs["input_ids"], "device", None))
    return Prompts(ids, _pads(mask, ids.shape), namespace, stops), mask


def check_use(inputs: Mapping[str, Any]) -> None:
    """Check that a call is to use a cache.

    Raises:
        ArgumentValueError: it says ``use_cache=False``.
    """
    if inputs.get("use_cache") is False:
        raise ArgumentValueError(
            f"{_BIND}: use_cache", expected="True, or none", got=False, fix="leave it out; or call generate() without this cache"
        )


def check_not_held(inputs: Mapping[str, Any], held: int) -> None:
    """Check that something is left to compute of prompts, where there is no prefix cache.

    Raises:
        ArgumentValueError: the cache holds as many tokens as ``input_ids`` has, and those are all that there are.
    """
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if ids is not None and held and ids.shape[1] <= held and (mask is None or mask.shape[1] == ids.shape[1]):
        raise ArgumentValueError(
            f"{_BIND}: input_ids",
            expected=f"more than the {held} tokens that the cache holds",
            got=f"{ids.shape[1]} tokens in all",
            fix=f"keep at least one token to compute: cache.truncate({ids.shape[1] - 1}); or cache.reset() for another text",
        )


def read_ids(subject: str, ids: Any) -> npt.NDArray[np.int64]:
    """Return token ids as an array of the caller's own, ``[rows, length]`` with at least one of each.

    Raises:
        ArgumentTypeError: they are no integers.
        ArgumentValueError: they do not have that shape.
    """
    found = on_host(ids)
    if ids is None or found.ndim != 2 or not found.size:
        got = "none" if ids is None else f"shape {found.shape}"
        raise ArgumentValueError(subject, expected="token ids of shape [rows, length]", got=got, fix="pass the ids of whole sequences")
    if found.dtype.kind not in "iu":
        raise ArgumentTypeError(subject, expected="integers", got=found.dtype)
    return found.astype(np.int64)


def on_host(values: Any) -> npt.NDArray[Any]:
    """Return a tensor, an array or lists as an array, which may alias them; lists of several lengths as one of objects."""
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy()
    try:
        return np.asarray(values)
    except ValueError:
        return np.asarray(values, dtype=object)


def _pads(mask: Any, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return how many 0s each row of a mask begins with."""
    found = on_host(mask)
    if found.shape != shape:
        raise ArgumentValueError(
            f"{_BIND}: attention_mask",
            expected=f"shape {shape}, as input_ids",
            got=f"shape {found.shape}",
            fix="pass whole prompts: what of them is cached is found by their ids",
        )
    is_token = found != 0
    pads: npt.NDArray[np.int64] = shape[1] - is_token.sum(axis=1)
    if (is_token != (np.arange(shape[1]) >= pads[:, None])).any():
        raise ArgumentValueError(
            f"{_BIND}: attention_mask",
            expected="padding on the left only",
            got="0s behind or among the tokens of a row",
            fix="tokenize with padding_side='left'",
        )
    return pads


def _token_ids(name: str, inputs: Mapping[str, Any], generation: Any) -> npt.NDArray[np.int64]:
    """Return the token ids that an argument names, or else the configuration of the call, or else that of the model."""
    config = inputs.get("generation_config") or generation
    value = inputs[name] if inputs.get(name) is not None else getattr(config, name, None)
    return np.atleast_1d(on_host([] if value is None else value).astype(np.int64))


def _refuse_what_else_counts(inputs: Mapping[str, Any], namespace: Namespace) -> None:
    """Refuse what may change keys and values beside token ids: other tensors, and adapters without a namespace of their own.

    A namespace cannot stand for tensors: they belong to tokens, and a model that gets them without their tokens, since those are
    cached, is wrong or refuses them.
    """
    tensors = [name for name, value in inputs.items() if name not in _HARMLESS and _has_arrays(value)]
    if tensors:
        raise ArgumentValueError(
            f"{_BIND}: {tensors[0]}",
            expected="no tensors but input_ids and attention_mask, since keys and values would depend on more than token ids",
            got=", ".join(tensors),
            fix="make a cache without prefix= for these inputs: for_model(model, conf)",
        )
    adapters = sorted(set(map(str, inputs.get(ADAPTERS) or ())))
    if len(adapters) > bool(namespace):
        raise ArgumentValueError(
            f"{_BIND}: {ADAPTERS}",
            expected="one adapter for all rows, and a namespace for it",
            got=f"{', '.join(adapters)} in namespace {namespace}",
            fix=f"bind the rows of one adapter at a time, with namespace=('adapter', {adapters[0]!r})",
        )


def _has_arrays(value: Any) -> bool:
    """Return whether a value is a tensor or an array, or a list or dict that has one."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return any(map(_has_arrays, value)) if isinstance(value, list | tuple) else isinstance(value, torch.Tensor | np.ndarray)
