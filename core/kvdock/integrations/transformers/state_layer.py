"""The layers of a cache: with keys and values on pages, with states, with both, or with nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from kvdock.integrations.transformers.compat import DUMMY_LAYER
from kvdock.integrations.transformers.layer import PagedLayer
from kvdock.integrations.transformers.measure import Measurement
from kvdock.integrations.transformers.state import PagedState
from kvdock.integrations.transformers.states import StateLayer

__all__ = ["PagedStateLayer", "layers_of"]


def layers_of(state: PagedState, found: Measurement) -> Iterator[Any]:
    """Yield a layer for each of a model's."""
    paged = count()
    for stored, states in zip(found.stored, found.states, strict=True):
        index = next(paged) if stored else -1
        if stored:
            window = found.windows[index]
            yield PagedStateLayer(state, index, window, states) if states else PagedLayer(state, index, window)
        else:
            yield StateLayer(states) if states else DUMMY_LAYER()


class PagedStateLayer(StateLayer, PagedLayer):  # type: ignore[no-untyped-call, override]  # as Transformers' own, of two of its bases
    """A layer with keys and values on pages, and states.

    Args:
        state: as in `PagedLayer`.
        index: the same.
        window: the same.
        number_of_states: as in `StateLayer`.
    """

    is_compileable = False
    device: Any = None  # of the states, once there are any: the base assigns both
    dtype: Any = None

    def __init__(self, state: PagedState, index: int, window: int | None, number_of_states: int) -> None:
        PagedLayer.__init__(self, state, index, window)
        StateLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Make room for states; keys and values have theirs."""
        if kwargs:
            StateLayer.lazy_initialization(self, **kwargs)

    reset = PagedLayer.reset
    crop = PagedLayer.crop  # type: ignore[assignment]  # it takes any arguments
    reorder_cache = PagedLayer.reorder_cache
    offload = PagedLayer.offload
    prefetch = PagedLayer.prefetch
    get_max_length = PagedLayer.get_max_length
    __repr__ = PagedLayer.__repr__
    __deepcopy__ = PagedLayer.__deepcopy__
