"""Calls whose tensors begin at addresses of every kind: multiples of their element's size, and of no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvdock_conformance.cases.drawing import ITEMSIZE
from kvdock_conformance.requirement import Case

__all__ = ["PLACES", "at_any_address"]

PLACES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "an odd address": (1, 0),
        "an even address in an odd storage": (1, 31),
        "an even place of an odd storage": (0, 1),
    }
)
"""How many elements further on a tensor begins, and its storage. Only a storage in host memory can be anywhere."""


def at_any_address(case: Case, names: Sequence[str] = ()) -> Iterator[Case]:
    """Yield a case of one call with each of its tensors, or of those named, at addresses of each kind, and with all of them there."""
    args = case.data["calls"][0]["args"]
    every = [name for name, spec in args.items() if isinstance(spec, Mapping) and (name in names or not names)]
    for text, place in PLACES.items():
        for name, chosen in {**{name: [name] for name in every}, "all": every}.items():
            yield Case(f"{case.name}, {name} at {text}".lstrip(", "), _moved(case.data, {args[one]["arena"] for one in chosen}, place))


def _moved(data: Mapping[str, Any], arenas: set[int], place: tuple[int, int]) -> dict[str, Any]:
    """Return a case with some of its arenas, and all that lies in them, elsewhere."""
    (call,) = data["calls"]
    specs = [spec for spec in call["args"].values() if isinstance(spec, Mapping)]
    (further, shift), size = place, {spec["arena"]: ITEMSIZE[spec["dtype"]] for spec in specs}

    def moved(spec: Any) -> Any:
        is_there = isinstance(spec, Mapping) and spec["arena"] in arenas
        return {**spec, "offset": spec["offset"] + further * size[spec["arena"]]} if is_there else spec

    there = [
        {**arena, "bytes": arena["bytes"] + further * size[at], **({"shift": shift * size[at]} if shift else {})} if at in arenas else arena
        for at, arena in enumerate(data["arenas"])
    ]
    calls = [{**call, "args": {name: moved(spec) for name, spec in call["args"].items()}}]
    more = {"places": [moved(spec) for spec in data["places"]]} if "places" in data else {}
    return {**data, "arenas": there, "calls": calls, **more}
