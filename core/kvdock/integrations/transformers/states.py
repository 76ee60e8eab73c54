"""Layers that keep a state: a convolution's last inputs, a recurrent state. They are Transformers' own, beside the pool.

A state is changed in place, by the model or by its kernels, so it cannot be taken back: a pass that fails behind the first layer leaves
states that fit to nothing. Room in the pool is made before (`PagedState.reserve`), so that a full pool is no such failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvdock.errors import ArgumentValueError, UnsupportedError

__all__ = ["BOTH", "STATES", "StateLayer", "StateLayers", "held", "named"]

BOTH: tuple[type, ...] = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)
"""Transformers' own layers with keys, values and states."""

STATES: tuple[type, ...] = (LinearAttentionLayer, *BOTH)
"""All of its layers with states."""

_KINDS = {"conv": "conv_states", "recurrent": "recurrent_states"}
"""What a file calls states, and what a layer calls the dict of them."""


def named(layer: Any) -> dict[str, torch.Tensor]:
    """Return the states of a layer by name, ``"conv.0"`` the first of convolutions, ``"recurrent.0"`` the first recurrence."""
    return {f"{kind}.{key}": of[key] for kind, name in _KINDS.items() for of, key in held(layer) if of is getattr(layer, name, None)}


def held(layer: Any) -> Iterator[tuple[dict[int, torch.Tensor], int]]:
    """Yield where each state that there is lies: a dict of a layer and a key in it; nothing of layers without."""
    for of in (getattr(layer, name, {}) for name in _KINDS.values()):
        yield from [(of, key) for key, state in of.items() if state is not None]


class StateLayer(LinearAttentionLayer):
    """A layer with states only: Transformers' own, with what a whole cache needs of it.

    Args:
        number_of_states: how many convolutions and recurrences a layer has.
    """

    def __init__(self, number_of_states: int = 1) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Make room for states, which passes inside and outside of `torch.inference_mode` can change."""
        with torch.inference_mode(mode=False):
            LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    def clear(self) -> None:
        """Forget the states, and how many rows they have."""
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)

    @classmethod
    def of_row(cls, number_of_states: int, states: Mapping[str, torch.Tensor], device: torch.device) -> StateLayer:
        """Return a layer with the states of one row, by `named` without the row's dimension; what `row` returned and a file had."""
        made = cls(number_of_states)
        with torch.inference_mode(mode=False):
            for name, state in states.items():
                kind, key = name.split(".")
                row = state[None].to(device)
                if kind == "conv":
                    made.update_conv_state(row, state_idx=int(key), conv_kernel_size=row.shape[-1])
                else:
                    made.update_recurrent_state(row, state_idx=int(key))
        return made

    def select(self, rows: torch.Tensor) -> None:
        """Make row ``rows[i]`` the new row i."""
        with torch.inference_mode(mode=False):
            for of, key in held(self):
                of[key] = of[key].detach().index_select(0, rows.to(of[key].device))

    def row(self, row: int) -> StateLayer:
        """Return a layer with the states of one row, as they are without a record of what was before."""
        made = StateLayer(self.number_of_states)
        made.become(self)
        made.select(torch.tensor([row], device="cpu"))
        made.record_past = False
        for key, size in self.conv_kernel_size.items():
            if size is not None:  # while inputs are recorded there may be more columns, and at the beginning fewer
                state: Any = made.conv_states[key]
                made.conv_states[key] = torch.nn.functional.pad(state, (max(size - state.shape[-1], 0), 0))[..., -size:].contiguous()
        return made

    def join(self, rows: Sequence[StateLayer]) -> None:
        """Have the states of layers of one row each, one behind the other."""
        self.become(rows[0])
        with torch.inference_mode(mode=False):
            for name in ("conv_states", "recurrent_states"):
                of = getattr(self, name)
                for key in [key for key, state in of.items() if state is not None]:
                    of[key] = torch.cat([getattr(row, name)[key] for row in rows])

    def become(self, other: StateLayer) -> None:
        """Have the states of another, as copies of one's own."""
        for name, value in vars(other).items():
            if name in _KEPT:
                setattr(self, name, dict(value) if isinstance(value, dict) else value)
        with torch.inference_mode(mode=False):
            for of, key in held(self):
                of[key] = of[key].detach().clone()

    def can_cut(self, tokens: int) -> bool:
        """Whether the last tokens can be taken back: the last inputs of convolutions, as long as they are recorded."""
        if any(self.is_recurrent_states_initialized.values()) or not self.record_past:
            return False
        # More columns than a convolution reads are there only while it is recorded what was before.
        sizes: dict[int, Any] = self.conv_kernel_size
        return all(of[key].shape[-1] - tokens >= sizes[key] for of, key in held(self))

    def cut(self, tokens: int) -> None:
        """Take the last tokens back, see `can_cut`; 0 lets go of what is recorded."""
        if self.record_past:
            LinearAttentionLayer.crop(self, -tokens)


_KEPT = frozenset(vars(LinearAttentionLayer()))
"""What a layer knows of its states."""


class StateLayers:
    """All layers of a cache with states.

    Args:
        layers: those of the cache that are `StateLayer`.

    Attributes:
        is_torn: whether a pass failed that had changed states.
    """

    def __init__(self, layers: Sequence[StateLayer] = ()) -> None:
        self._layers = tuple(layers)
        self.is_torn = False

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(of[key].nbytes for layer in self._layers for of, key in held(layer))

    def check(self, what: str) -> None:
        """Raise if states fit to nothing any more.

        Raises:
            ArgumentValueError: a pass has failed that had changed some.
        """
        if self.is_torn:
            raise ArgumentValueError(
                f"PagedCacheForTransformers: {what}",
                expected="states of all tokens, in all layers",
                got="those that a forward pass which failed has left, and states cannot be taken back",
                fix="reset() the cache, and compute the tokens anew",
            )

    def tear(self, written: int) -> None:
        """Note that a pass has failed which may have changed states.

        Args:
            written: most tokens that a layer with keys has now. Without any the states are forgotten, as if there had been no pass.
        """
        if written:
            self.is_torn = bool(self._layers)
        else:
            self.clear()

    def check_cut(self, tokens: int) -> None:
        """Raise unless the last tokens can be taken back.

        Raises:
            UnsupportedError: some layer cannot.
        """
        strange = next((layer for layer in self._layers if not layer.can_cut(tokens)), None) if tokens else None
        if strange is not None:
            recurrent = any(strange.is_recurrent_states_initialized.values())
            raise UnsupportedError(
                "PagedCacheForTransformers.truncate",
                expected="layers that can take tokens back",
                got="a recurrent state" if recurrent else f"a convolution of which no inputs before the last {tokens} are recorded",
                fix="reset() the cache, or copy.deepcopy() it before the tokens that are to be taken back",
            )

    def cut(self, tokens: int) -> None:
        """Take the last tokens back, see `check_cut`."""
        for layer in self._layers:
            layer.cut(tokens)

    def select(self, rows: Sequence[int]) -> None:
        """Make row ``rows[i]`` the new row i."""
        chosen = torch.tensor(rows, device="cpu")
        for layer in self._layers:
            layer.select(chosen)

    def become(self, other: StateLayers) -> None:
        """Have the states of another cache of the same model."""
        self.is_torn = other.is_torn
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            mine.become(theirs)

    def row(self, row: int) -> StateLayers:
        """Return the states of one row, in layers of their own."""
        return StateLayers([layer.row(row) for layer in self._layers])

    def named(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yield the states of each layer, see `named`."""
        yield from map(named, self._layers)

    def join(self, rows: Sequence[StateLayers]) -> None:
        """Have the states of rows, see `row`; none forgets all."""
        self.clear()
        for at, layer in enumerate(self._layers if rows else ()):
            layer.join([row._layers[at] for row in rows])

    def clear(self) -> None:
        """Forget all states."""
        self.is_torn = False
        for layer in self._layers:
            layer.clear()
