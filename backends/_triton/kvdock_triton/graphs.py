"""Steps as graphs of the device: recorded once, launched as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

__all__ = ["WARM_UPS", "captured", "has_graphs"]

WARM_UPS = 2
"""How often a step runs before it is recorded: the first call compiles and prepares, and libraries settle what they chose in the second."""


@attrs.frozen(eq=False)
class _Replay:
    """A graph, and what the step returned while it was recorded; the step's own tensors are in the graph's memory."""

    graph: Any
    result: Any

    def __call__(self) -> Any:
        """Launch it on the current stream."""
        self.graph.replay()
        return self.result


def has_graphs(module: Any) -> bool:
    """Whether torch's module for a kind of device, such as `torch.cuda`, has all that `captured` uses."""
    return all(hasattr(module, name) for name in ("CUDAGraph", "Stream", "current_stream", "graph", "graph_pool_handle", "stream"))


def captured(module: Any, steps: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """Record a graph of each step on the current device, all in one pool of memory.

    All warm up first, on a stream of their own, and are recorded from another: what cuBLAS keeps for a stream to work in is then
    taken from the graphs' memory. Elsewhere it would be freed under them, by `torch.compile` before each graph that it records.
    What one step needs beside its result is free for the next, so that the largest decides how much memory there is.

    Args:
        module: torch's module for the devices.
        steps: the one that takes the most memory first.
    """
    here, side, memory = module.current_stream(), module.Stream(), module.graph_pool_handle()
    recorder = module.Stream()
    side.wait_stream(here)
    with module.stream(side):
        for step in steps:
            for _ in range(WARM_UPS):
                step()
    here.wait_stream(side)
    with module.stream(here):  # torch leaves the stream as it is where a step cannot be recorded
        try:
            return [_record(module, step, memory, recorder) for step in steps]
        except BaseException:
            # Torch (up to 2.13) leaves its random numbers as they are while one records, and then refuses to draw any.
            _record(module, lambda: torch.zeros((), device=here.device), module.graph_pool_handle(), module.Stream())
            raise


def _record(module: Any, step: Callable[[], Any], memory: Any, stream: Any) -> _Replay:
    graph = module.CUDAGraph()
    # Other threads, such as one that loads or pins memory, go on meanwhile: what they do is not this stream's.
    with module.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
        result = step()
    return _Replay(graph, result)
