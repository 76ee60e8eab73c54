"""Calls that repeat the one before but for addresses and index values, and such as do not in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from kvdock_conformance.cases.drawing import Drawing, call
from kvdock_conformance.cases.every_op import OPS, OpCall
from kvdock_conformance.cases.layouts import Geometry, Pair
from kvdock_conformance.requirement import Case

__all__ = ["repeats"]

_SMALL = Geometry(num_blocks=8, block=8)
_INDICES: Mapping[str, tuple[str, tuple[int, ...]]] = MappingProxyType(
    {
        "paged_caching_": ("slot_mapping", (5, 0, 63, 7)),
        "gather_paged": ("slot_mapping", (5, 0, 63, 5)),
        "static_update_": ("cache_lengths", (4, 0, 4, 1, 2, 3, 0, 4)),
        "copy_blocks_": ("block_pairs", (0, 1, 2, 3, 4, 5, 0, 7)),
    }
)
"""By op: the argument that holds indices, and some with the first place and the last."""
_PADDED: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"paged_caching_": (5, -1, 63, -7), "gather_paged": (-7, 0, -1, 5), "copy_blocks_": (0, 1, 2, 3, -1, 5, 6, -1)}
)
"""By op: indices with padding, where there is any."""


def repeats() -> Iterator[Case]:
    """Yield, for each op, calls on the same caches, and calls on caches of their own."""
    for op in OPS:
        for text, is_shared in (("the same caches", True), ("caches of their own", False)):
            drawing = Drawing()
            caches = OpCall(op, tokens=4, geometry=_SMALL).caches(drawing)
            yield Case(f"{op}, {text}", drawing.case(*_calls(op, drawing, caches if is_shared else None)))


def _calls(op: str, drawing: Drawing, caches: Pair | None) -> Iterator[dict[str, Any]]:
    """Yield calls that are remembered, and between them those that look like them and are not."""
    first, (name, good) = OpCall(op, tokens=4, geometry=_SMALL), _INDICES[op]

    def made(seed: int, *, past: int = 0, index: dict[str, Any] | None = None, **other: Any) -> dict[str, Any]:
        args: dict[str, Any] = attrs.evolve(first, seed=seed, **other).arguments(drawing, caches)
        rows = {key: _moved(drawing, args[key], past) for key in ("k", "v", "k_out", "v_out") if key in args}
        changed: Any = attrs.evolve(args[name], **(index or {}))
        return call(op, **(args | rows | {name: changed}))

    yield from (made(seed) for seed in range(4))
    yield made(4, index={"values": good})
    yield made(5)
    if op in _PADDED:
        yield made(5, index={"values": _PADDED[op]})
    yield made(6, index={"dtype": "int32"})
    yield made(7, past=2)
    yield from (made(seed) for seed in range(8, 10))
    yield from (made(10, source=source) for source in ("padded heads", "padded heads", "contiguous"))
    yield from (made(seed, tokens=2) for seed in range(11, 14))
    yield from (made(seed) for seed in range(14, 17))


def _moved(drawing: Drawing, view: Any, past: int) -> Any:
    """Return a tensor of rows so many bytes further on."""
    if past:
        drawing.arenas[view.arena]["bytes"] += past
    return attrs.evolve(view, offset=view.offset + past)
