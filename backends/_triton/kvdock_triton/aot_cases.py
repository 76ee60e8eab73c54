"""What `kvdock_triton.aot` compiles: requests as core would make them, for every op and every variant of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from kvdock.plugin import HOST_INT, Request, TensorMeta
from kvdock_triton import attention_specs, copy_blocks, gather_paged, paged_caching, static_update, swap_blocks
from kvdock_triton.launch import KernelSpec
from kvdock_triton.support import row_bytes
from kvdock_triton.tuning import Tuning

__all__ = ["GEOMETRIES", "LATENTS", "USUAL", "Case", "Geometry", "all_cases"]

_ROWS = 4096
_BLOCKS, _BLOCK_SIZE = 64, 16


@attrs.frozen
class Geometry:
    """Heads and their lengths: of keys, and of values where they differ."""

    heads: int
    k_dim: int
    v_dim: int

    def __str__(self) -> str:
        return f"{self.heads}x{self.k_dim}" + (f"/{self.v_dim}" if self.v_dim != self.k_dim else "")


USUAL = Geometry(8, 128, 128)
"""The geometry that tiles are tuned on, and that is compiled in every alignment class."""

GEOMETRIES = (USUAL, Geometry(3, 64, 64), Geometry(1, 64, 64), Geometry(64, 128, 128), Geometry(4, 192, 128), Geometry(8, 46, 46))
"""All have 16 bytes of alignment but the last: rows of 46 elements of 2 bytes allow 4. One head is what a rank may hold."""

_DTYPE = torch.bfloat16


@attrs.frozen
class Case:
    """One kernel to compile.

    Args:
        kernel: name of the op.
        variant: what distinguishes it, for people.
        alignment: its alignment class in bytes: how wide all its accesses to data should be.
        spec: given tiles, returns what to compile.
        computes: whether it computes, instead of moving bits: what it stores is its own, and it may need more registers than there are.
    """

    kernel: str
    variant: str
    alignment: int
    spec: Callable[[Tuning], KernelSpec]
    computes: bool = False


def _pool(geometry: Geometry, name: str, alignment: int, hnd: bool = False) -> TensorMeta:
    """Return a paged cache, its blocks ordered by slots and then heads, or the other way round (``hnd``)."""
    heads, dim = geometry.heads, geometry.k_dim if name == "k" else geometry.v_dim
    inner = (dim, _BLOCK_SIZE * dim) if hnd else (heads * dim, dim)
    return TensorMeta(_DTYPE, (_BLOCKS, _BLOCK_SIZE, heads, dim), (_BLOCK_SIZE * heads * dim, *inner, 1), alignment)


def _static_pool(geometry: Geometry, name: str, alignment: int) -> TensorMeta:
    """Return a static cache."""
    heads, dim = geometry.heads, geometry.k_dim if name == "k" else geometry.v_dim
    return TensorMeta(_DTYPE, (8, heads, _ROWS, dim), (heads * _ROWS * dim, _ROWS * dim, dim, 1), alignment)


def _rows(geometry: Geometry, name: str, alignment: int, lead: int) -> TensorMeta:
    """Return rows of tokens with ``lead`` run-time dimensions before heads."""
    dim = geometry.k_dim if name == "k" else geometry.v_dim
    return TensorMeta(_DTYPE, (*[None] * lead, geometry.heads, dim), None, alignment)


def _new(geometry: Geometry, name: str, alignment: int) -> TensorMeta:
    """Return new keys or values of `static_update_`: ``[b, heads, s, dim]``."""
    return TensorMeta(_DTYPE, (None, geometry.heads, None, geometry.k_dim if name == "k" else geometry.v_dim), None, alignment)


def _index(*shape: int | None, dtype: torch.dtype = torch.int64) -> TensorMeta:
    """Return an index tensor."""
    return TensorMeta(dtype, shape, None, dtype.itemsize)


def _request(op: str, **args: Any) -> Request:
    """Return a request."""
    return Request(op, torch.device("cpu"), args)


def _paged_spec(request: Request, number: int) -> Callable[[Tuning], KernelSpec]:
    """Return what makes one of the two specs of `paged_caching_`."""
    return lambda tuning: paged_caching.specs_for(request, tuning)[number]


def _paged(geometry: Geometry, alignment: int, lead: int, hnd: bool, index: torch.dtype) -> list[Case]:
    """Return both kernels of `paged_caching_`: for keys and values out of one projection, and for tensors of their own."""
    request = _request(
        "paged_caching_",
        **{f"{name}_cache": _pool(geometry, name, alignment, hnd) for name in ("k", "v")},
        **{name: _rows(geometry, name, alignment, lead) for name in ("k", "v")},
        slot_mapping=_index(*[None] * lead, dtype=index),
        k_scale=None,
        v_scale=None,
    )
    order, slots = "HND" if hnd else "NHD", str(index).removeprefix("torch.")
    return [
        Case(
            "paged_caching_",
            f"{name} {geometry} {order} {lead}-D {slots} align {alignment}",
            alignment,
            _paged_spec(request, number),
        )
        for number, name in enumerate(("fused", "separate"))
    ]


def _static(geometry: Geometry, alignment: int, from_tensor: bool) -> Case:
    """Return `static_update_`, with lengths on the device or one length of the host."""
    request = _request(
        "static_update_",
        **{f"{name}_cache": _static_pool(geometry, name, alignment) for name in ("k", "v")},
        **{name: _new(geometry, name, alignment) for name in ("k", "v")},
        cache_lengths=_index(None) if from_tensor else HOST_INT,
    )
    return Case(
        "static_update_",
        f"{geometry} lengths {'int64' if from_tensor else 'host'} align {alignment}",
        alignment,
        lambda tuning: static_update.spec_for(request, tuning.static.for_rows(row_bytes(request, heads_at=1))),
    )


def _gather(geometry: Geometry, alignment: int, lead: int, hnd: bool) -> Case:
    """Return `gather_paged`."""
    request = _request(
        "gather_paged",
        **{f"{name}_cache": _pool(geometry, name, alignment, hnd) for name in ("k", "v")},
        slot_mapping=_index(*[None] * lead),
        k_scale=None,
        v_scale=None,
        **{f"{name}_out": _rows(geometry, name, alignment, lead) for name in ("k", "v")},
    )
    return Case(
        "gather_paged",
        f"{geometry} {'HND' if hnd else 'NHD'} {lead}-D align {alignment}",
        alignment,
        lambda tuning: gather_paged.spec_for(request, tuning.gather.for_rows(row_bytes(request))),
    )


def _copy_spec(request: Request, number: int) -> Callable[[Tuning], KernelSpec]:
    """Return what makes one of the two specs of `copy_blocks_`."""
    return lambda tuning: copy_blocks.specs_for(request, tuning.copy)[number]


def _copy(geometry: Geometry, alignment: int, hnd: bool) -> list[Case]:
    """Return both kernels of `copy_blocks_`: for pairs in a tensor, and for a few that are passed by value."""
    request = _request(
        "copy_blocks_",
        **{f"{name}_cache": _pool(geometry, name, alignment, hnd) for name in ("k", "v")},
        block_pairs=_index(None, 2),
    )
    name = f"{geometry} {'HND' if hnd else 'NHD'} align {alignment}"
    return [
        Case("copy_blocks_", f"{pairs} {name}", alignment, _copy_spec(request, number)) for number, pairs in enumerate(("tensor", "few"))
    ]


def _swap(geometry: Geometry, alignment: int, hnd: bool) -> Case:
    """Return `swap_blocks_`: of one layer, to host memory in the other order of heads (``hnd``), or of many layers to page-first blocks."""
    source, to = _pool(geometry, "k", alignment), attrs.evolve(_pool(geometry, "k", alignment, hnd), is_on_host=True)
    if not hnd:
        run = _BLOCK_SIZE * geometry.heads * geometry.k_dim
        shape = (_BLOCKS, 32, 1, run)
        source = attrs.evolve(source, shape=shape, strides=(run, _BLOCKS * run, 0, 1))
        to = attrs.evolve(to, shape=shape, strides=(32 * run, run, 0, 1))
    request = _request("swap_blocks_", src_cache=source, dst_cache=to, block_pairs=_index(None, 2))
    name = f"{geometry} {'NHD to HND' if hnd else 'all layers to page first'} align {alignment}"
    return Case("swap_blocks_", name, alignment, lambda tuning: swap_blocks.spec_for(request, tuning.swap))


_PLAIN: dict[str, Any] = {"causal": True, "window": None, "softcap": None, "scale": None}


def _attention_request(geometry: Geometry, dtype: torch.dtype, every_option: bool, group: int = 4) -> Request:
    """Return a request for attention from some query heads for each of the cache."""
    alignment = 16 if geometry.k_dim % 8 == 0 else 4
    pools = {f"{name}_cache": attrs.evolve(_pool(geometry, name, alignment), dtype=dtype) for name in ("k", "v")}
    q, out = (TensorMeta(dtype, (None, group * geometry.heads, dim), None, alignment) for dim in (geometry.k_dim, geometry.v_dim))
    indices = {"block_table": _index(None, None, dtype=torch.int32), "seq_lens": _index(None), "cu_query_lens": _index(None)}
    more: dict[str, Any] = dict.fromkeys(("starts", "sinks", "lse"))
    if every_option:
        sinks, lse = (TensorMeta(torch.float32, (size, group * geometry.heads)[-rank:], None, 4) for rank, size in ((1, None), (2, None)))
        more = {"starts": _index(None), "sinks": sinks, "lse": lse, "window": 1000, "softcap": 30.0}
    return _request("paged_attention", **pools, q=q, out=out, **indices, **_PLAIN | more)


def _attention(geometry: Geometry, dtype: torch.dtype = _DTYPE, every_option: bool = False) -> list[Case]:
    """Return the kernels of `paged_attention`: for few queries of each sequence, for any number, and what joins splits."""
    request = _attention_request(geometry, dtype, every_option)
    specs: dict[str, Callable[[Tuning], KernelSpec]] = {
        "decode": lambda tuning: attention_specs.attend_spec(request, tuning.decode, False, early=tuning.early),
        "prefill": lambda tuning: attention_specs.attend_spec(request, attention_specs.prefill_tile(request, tuning), True),
        "join": lambda tuning: attention_specs.join_spec(request),
        "join of decode": lambda tuning: attention_specs.join_few_spec(
            request, attention_specs.attend_spec(request, tuning.decode, False), tuning.early
        ),
    }
    alignment, options = request.tensor("q").alignment, ", every option" if every_option else ""
    variant = f"{geometry} {str(dtype).removeprefix('torch.')}{options} align {alignment}"
    return [Case("paged_attention", f"{name} {variant}", alignment, spec, True) for name, spec in specs.items()]


LATENTS = Geometry(1, 576, 512)
"""Keys of 512 elements of a latent and 64 of its rotary part; the latents are the values."""


def _latent_attention(group: int) -> list[Case]:
    """Return attention to latents: where they are values too, and in the geometry of a cache of both apart."""
    request = _attention_request(LATENTS, _DTYPE, False, group)
    v_cache = attrs.evolve(request.tensor("v_cache"), strides=request.tensor("k_cache").strides)
    request = attrs.evolve(request, args={**request.args, "v_cache": v_cache})
    specs: dict[str, Callable[[Tuning], KernelSpec]] = {
        "decode": lambda tuning: attention_specs.attend_spec(request, tuning.decode, False, True),
        "prefill": lambda tuning: attention_specs.attend_spec(request, tuning.prefill, True, True),
        "decode, read twice": lambda tuning: attention_specs.attend_spec(request, tuning.decode, False),
        "prefill, read twice": lambda tuning: attention_specs.attend_spec(request, tuning.prefill, True),
        "join": lambda tuning: attention_specs.join_spec(request),
    }
    return [Case("paged_attention", f"{name} {LATENTS}, {group} query heads, align 16", 16, spec, True) for name, spec in specs.items()]


def _latent_moves() -> list[Case]:
    """Return what moves latents and rotary parts: the kernels for keys and values on the two parts of a pool."""
    dims = {"k": LATENTS.v_dim, "v": LATENTS.k_dim - LATENTS.v_dim}
    pool = _pool(LATENTS, "k", 16)
    caches = {f"{name}_cache": attrs.evolve(pool, shape=(*pool.shape[:3], dim)) for name, dim in dims.items()}
    rows = {name: TensorMeta(_DTYPE, (None, 1, dim), None, 16) for name, dim in dims.items()}
    write = _request("mla_caching_", **caches, **rows, slot_mapping=_index(None), k_scale=None, v_scale=None)
    outs = {f"{name}_out": row for name, row in rows.items()}
    read = _request("mla_gather", **caches, slot_mapping=_index(None), k_scale=None, v_scale=None, **outs)
    names = enumerate(("fused", "separate"))
    return [
        *(Case("paged_caching_", f"{name} of latents 512+64 align 16", 16, _paged_spec(write, number)) for number, name in names),
        Case("gather_paged", "latents 512+64 align 16", 16, lambda t: gather_paged.spec_for(read, t.gather.for_rows(row_bytes(read)))),
    ]


def _attention_cases() -> list[Case]:
    """Return what attention is compiled for: usual heads with and without options, and others."""
    others = [Geometry(4, 192, 128), Geometry(4, 256, 256), Geometry(8, 46, 46), Geometry(3, 64, 64)]
    cases = [*_attention(USUAL), *_attention(USUAL, every_option=True), *_attention(USUAL, torch.float32)]
    cases += [case for geometry in others for case in _attention(geometry)]
    return [*cases, *_latent_moves(), *(case for group in (16, 128) for case in _latent_attention(group))]


def _geometry_cases(geometry: Geometry) -> list[Case]:
    """Return every variant of one geometry in its own alignment class."""
    alignment = 16 if geometry.k_dim % 8 == 0 else 4
    both = (False, True)
    cases = [case for lead in (1, 2) for hnd in both for case in _paged(geometry, alignment, lead, hnd, torch.int64)]
    cases += [_static(geometry, alignment, from_tensor) for from_tensor in both]
    cases += [_gather(geometry, alignment, lead, hnd) for lead in (1, 2) for hnd in both]
    cases += [case for hnd in both for case in _copy(geometry, alignment, hnd)]
    return [*cases, *(_swap(geometry, alignment, hnd) for hnd in both)]


def _alignment_cases(alignment: int) -> list[Case]:
    """Return every op in a lower alignment class."""
    cases = [case for lead in (1, 2) for case in _paged(USUAL, alignment, lead, False, torch.int64)]
    cases += [_static(USUAL, alignment, False), _static(USUAL, alignment, True)]
    cases += [_gather(USUAL, alignment, lead, False) for lead in (1, 2)]
    return [*cases, *_copy(USUAL, alignment, False), _swap(USUAL, alignment, True)]


def _quick_cases() -> list[Case]:
    """Return one variant of each kernel, in the aligned class."""
    cases = _paged(USUAL, 16, 1, False, torch.int64)
    return [
        *cases,
        _static(USUAL, 16, True),
        _gather(USUAL, 16, 1, False),
        *_copy(USUAL, 16, False),
        _swap(USUAL, 16, False),
        *_attention(USUAL)[:2],
    ]


def all_cases(quick: bool = False) -> Sequence[Case]:
    """Return what to compile: everything, or (``quick``) one aligned variant of each kernel."""
    if quick:
        return _quick_cases()
    cases = [case for geometry in GEOMETRIES for case in _geometry_cases(geometry)]
    cases += [case for alignment in (8, 4, 2) for case in _alignment_cases(alignment)]
    return [*cases, *_paged(USUAL, 16, 1, False, torch.int32), *_attention_cases()]
