"""Which forward passes read pages, and what is known while one runs.

A pass reads pages where its model's attention can (see `probe`), where there is anything to read, and where nothing was asked for
that only the model's own attention gives. In such a pass a layer of the cache writes, and returns the new keys and values as they
are; kvdock's attention function finds the layer on the keys that it is given. What turns out odd on the way is gathered after all.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import attrs
import torch
from transformers.masking_utils import causal_mask_function

from kvdock.errors import UnsupportedError
from kvdock.integrations.transformers.masks import ODD, Markers, Mask, window_of
from kvdock.integrations.transformers.switching import former_of

__all__ = ["LAYER", "Check", "Pass", "Reader"]

LAYER = "_kvdock_layer"
"""Attribute of keys that names the layer that handed them over."""


class _Layer(Protocol):
    """What is known here of a layer of the cache."""

    index: int


@attrs.define(eq=False)
class Check:
    """What a trial of a model's attention finds, see `probe`.

    Args:
        problems: for each layer of the pool what is against it; "" where it reads pages, None where it was not seen to attend.
        configs: by id the configurations that its attention and its masks go by.
    """

    problems: list[str | None]
    configs: dict[int, Any] = attrs.Factory(dict)

    def note(self, index: int, problem: str) -> None:
        """Note how a layer attended; what was against it once stays."""
        self.problems[index] = self.problems[index] or problem


@attrs.frozen(eq=False)
class Reader:
    """Whether and how a model's attention reads pages.

    Args:
        model: the model, weakly.
        configs: configurations to switch, each with the attention that it named when it was tried.
        why: why nothing is read on pages; "" if it is.
        problems: for each layer of the pool why it gathers even so, or "".
        check: set while it is tried.
    """

    model: weakref.ref[Any]
    configs: tuple[tuple[Any, str], ...] = ()
    why: str = ""
    problems: tuple[str, ...] = ()
    check: Check | None = None

    def why_not(self, model: Any, told: dict[str, Any]) -> str:
        """Return why a pass gathers; "" if it reads pages.

        Args:
            model: what runs.
            told: arguments of the pass, by name.
        """
        if self.why:
            return self.why
        is_known = self.model() is model
        if not is_known:
            return "the cache was made for another model"
        if any(former_of(config) != name for config, name in self.configs):
            return "the model's attention was changed since"
        if torch.is_grad_enabled():
            return "gradients are recorded: wrap the call in torch.no_grad()"
        if model.training:
            return "the model is in training"
        if _wants_weights(model, told):
            return "attention weights are asked for"
        mask = told.get("attention_mask")
        return "" if mask is None or getattr(mask, "ndim", 0) == 2 else "an attention_mask that is not [rows, tokens]"


def _wants_weights(model: Any, told: dict[str, Any]) -> bool:
    asked = told.get("output_attentions")
    return bool(getattr(model.config, "output_attentions", False) if asked is None else asked)


@attrs.define(eq=False)
class Pass:
    """A forward pass that reads pages.

    Args:
        model: what runs.
        reader: how its attention reads.
        length: tokens of each row before the pass.
        markers: what stands for masks.
        thread: which thread runs it.
        masks: by the address of what stands for it, the masks that were asked for.
        unread: the layer that has written and whose new tokens nobody has attended to yet.
        replay: what stands in for the model's layers, with their arguments; None where they are called.
    """

    model: Any
    reader: Reader
    length: int
    markers: Markers
    thread: int = attrs.Factory(threading.get_ident)
    masks: dict[int, Mask] = attrs.Factory(dict)
    unread: _Layer | None = None
    replay: Callable[..., Any] | None = None

    def mask_for(self, arguments: dict[str, Any]) -> torch.Tensor | None:
        """Return what stands for a mask that Transformers asks for; None if it is one to be made as usual."""
        window, stop = window_of(arguments.get("mask_function", causal_mask_function)), self.length + arguments["q_length"]
        reach = arguments["kv_length"] + arguments.get("kv_offset", 0)
        if window == ODD or reach != stop or arguments.get("q_offset", self.length) != self.length:
            return None
        marker = self.markers.for_mask(window, arguments.get("attention_mask"), arguments["batch_size"], stop)
        if marker is None:
            return None
        self.masks[marker.tensor.data_ptr()] = Mask(window, marker.pads, arguments, marker.tensor)
        return marker.tensor

    def mask_of(self, given: Any) -> Mask | None:
        """Return the mask that an attention function is given; None if it is none of this pass."""
        return self.masks.get(given.data_ptr()) if isinstance(given, torch.Tensor) else None

    def hand_over(self, layer: _Layer, keys: torch.Tensor) -> None:
        """Let the attention function find a layer, which has written, on its new keys."""
        self.check_read()
        setattr(keys, LAYER, layer)
        self.unread = layer

    def check_read(self) -> None:
        """Raise if a layer's new tokens were attended to by something that knows nothing of the others.

        Raises:
            UnsupportedError: they were.
        """
        layer, self.unread = self.unread, None
        if layer is not None:
            raise UnsupportedError(
                f"PagedCacheForTransformers: layer {layer.index} of {type(self.model).__name__}",
                expected="attention by Transformers' attention interface, on the keys that the cache returns",
                got="an attention of its own, or one on other keys",
                fix="make the cache with attention='gather', and reset() this one",
            )
