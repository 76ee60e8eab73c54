"""Calls on quantised pools, with scales in every form that the ops take."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import attrs

from kvdock_conformance.cases.addresses import at_any_address
from kvdock_conformance.cases.drawing import Drawing, Values, View, call
from kvdock_conformance.cases.layouts import POOLS, SOURCES, Geometry
from kvdock_conformance.cases.numbers import finite
from kvdock_conformance.cases.paged import Gather, shuffled
from kvdock_conformance.requirement import Case

__all__ = ["FORMS", "QUANTISED", "finite_bytes", "reads", "scales", "writes"]

QUANTISED = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int8")
"""Dtypes that are stored as ``x / scale``."""

_SCALES = (0x3DCCCCCD, 0x3D4CCCCD, 0x3E800000, 0x40400000, 0x3B03126F)
"""0.1, 0.05, 0.25, 3 and 0.002."""
_NAMES = ("k_scale", "v_scale")
FORMS = ("for each head", "for each token and head", "in host memory", "for each token and head, side by side")
_TOKENS = 13
_SPECIAL: Mapping[str, Sequence[int]] = MappingProxyType(
    {
        "zeros": (0, -0x8000),
        "beyond every range": (0x7F80, -0x0080, 0x7F7F, -0x0081),  # infinities, and the largest finite numbers
        "halves": (0x3F00, 0x3FC0, 0x4020, 0x40D0, 0x42FD, 0x42FF, -0x4100, -0x4040, -0x3FE0, -0x3F30, -0x3D03, -0x3D01),
    }
)
"""Bits of bfloat16: 0.5, 1.5, 2.5, 6.5, 126.5, 127.5 and their negatives are the halves."""


_SHARP = 0x3F751EB8
"""0.9575: the quotients of `_sharp_halves` by it lie halfway between two that are stored, and their products with 1 / 0.9575 do not."""


def _sharp_halves() -> list[int]:
    """Return bits of float32 of halves times 0.9575."""
    (scale,) = struct.unpack("f", struct.pack("I", _SHARP))
    return [struct.unpack("i", struct.pack("f", (number + 0.5) * scale))[0] for number in range(4, 32)]


def scales(drawing: Drawing, form: str, lead: tuple[int, ...], heads: Sequence[int]) -> tuple[View, View]:
    """Return scales of keys and of values, which differ; side by side they are parts of one tensor."""
    if form.endswith("side by side"):
        both = drawing.tensor("float32", (*lead, sum(heads)))
        k, v = both.slice(len(lead), 0, heads[0]), both.slice(len(lead), heads[0], sum(heads))
        return attrs.evolve(k, values=_SCALES), attrs.evolve(v, values=_SCALES[::-1])
    k, v = (
        drawing.tensor(
            "float32",
            {"for each head": (count,), "for each token and head": (*lead, count)}.get(form, ()),
            values=values,
            host=form == "in host memory",
        )
        for count, values in zip(heads, (_SCALES, _SCALES[::-1]), strict=True)
    )
    return k, v


def writes() -> Iterator[Case]:
    """Yield writes into quantised caches: numbers within their range and beyond it, scales in every form, padding."""
    for dtype in QUANTISED:
        for k_dtype in ("bfloat16", "float32"):
            yield _write(f"{dtype} from {k_dtype}", dtype, k_dtype)
        for form in FORMS:
            yield _write(f"{dtype}, a scale {form}", dtype, form=form)
        for name, bits in _SPECIAL.items():
            yield _write(f"{dtype}, {name}", dtype, values=bits, scale=[0x3F800000])
        yield _write(f"{dtype}, sharp halves", dtype, "float32", values=_sharp_halves(), scale=[_SHARP])
        by_head = _write(dtype, dtype, form="for each head")
        yield from (_with_other_scales(by_head), *at_any_address(by_head, _NAMES))
        yield _write(f"{dtype}, padding", dtype, form="for each token and head", slots=[3, -1, 5, 0, -7, 23])


def _write(
    name: str,
    dtype: str,
    k_dtype: str = "bfloat16",
    *,
    form: str = "",
    values: Values | None = None,
    scale: Sequence[int] | None = None,
    slots: Sequence[int] | None = None,
) -> Case:
    drawing, lead = Drawing(), (_TOKENS if slots is None else len(slots),)
    sizes = Geometry(dtype=dtype)
    k_cache, v_cache = POOLS["nhd"](drawing, sizes)
    sources = SOURCES["contiguous"](drawing, attrs.evolve(sizes, dtype=k_dtype), lead)
    k, v = (attrs.evolve(x, values=finite(k_dtype) if values is None else values) for x in sources)
    index = drawing.tensor("int64", lead, values=shuffled(sizes.capacity) if slots is None else slots)
    k_scale, v_scale = (x if scale is None else attrs.evolve(x, values=scale) for x in scales(drawing, form, lead, (sizes.hk, sizes.hv)))
    args = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "slot_mapping": index, "k_scale": k_scale, "v_scale": v_scale}
    return Case(name, drawing.case(call("paged_caching_", **args)))


def _with_other_scales(case: Case) -> Case:
    """Return a case's call several times, on the same pools, with each scale in turn from elsewhere."""
    (first,), arenas = case.data["calls"], [*case.data["arenas"]]
    calls = [first, first]
    for name in _NAMES:
        scale = first["args"][name]
        other = {**scale, "arena": len(arenas), "values": scale["values"][::-1]}
        arenas.append(arenas[scale["arena"]])
        calls += [{**first, "args": {**first["args"], name: other}}, first]
    return Case(f"{case.name}, each scale in turn from elsewhere", {**case.data, "arenas": arenas, "calls": calls})


def reads() -> Iterator[Case]:
    """Yield reads of quantised pools into float32, where the product of element and scale is rounded once."""
    for dtype in QUANTISED:
        yield _read(dtype, dtype)
        for form in FORMS:
            yield _read(f"{dtype}, a scale {form}", dtype, form=form)
        by_head = _read(dtype, dtype, form="for each head")
        yield from (_with_other_scales(by_head), *at_any_address(by_head, _NAMES))
        yield _read(f"{dtype}, padding", dtype, form="for each token and head", slots=[3, -1, 5, 0, -7, 23])


def finite_bytes() -> list[int]:
    """Return bytes that stand for finite numbers in every format."""
    # Bytes up to 0x7b: larger ones are NaN or infinite in e4m3fn or e5m2, and what becomes of a NaN's payload is left open. So is
    # that of -0 where it is the one NaN.
    return [byte - 128 * sign for byte in range(1, 0x7C) for sign in (0, 1)] + [0]


def _read(name: str, dtype: str, *, form: str = "", slots: Sequence[int] | None = None) -> Case:
    drawing, gather = Drawing(), Gather("", slots, geometry=Geometry(dtype=dtype), values=finite_bytes())
    args = gather.args(drawing, gather.pools(drawing))
    outputs = {name: drawing.tensor("float32", (*gather.leading, 2, 8)) for name in ("k_out", "v_out")}
    k_scale, v_scale = scales(drawing, form, gather.leading, (2, 2))
    return Case(name, drawing.case(call("gather_paged", **{**args, **outputs, "k_scale": k_scale, "v_scale": v_scale})))
