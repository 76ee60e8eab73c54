"""The ops kvdock knows, as data. Adding one is adding an `OpSchema` here; nothing else in core branches on an op. A plugin has an `Op`.

Sizes: NB blocks of ``block`` places each, or NBs and NBd in two pools; Hk, Hv heads and Dk, Dv elements of keys and values; B rows of S
positions; Dw elements of a row of latents, Dc of a latent and Dp of the rotary part behind it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch

from kvdock.errors import ArgumentTypeError
from kvdock.interface import Kernel
from kvdock.ops.attention import PAGED_ATTENTION
from kvdock.ops.calls.writer import source_of
from kvdock.ops.index_values import check_lengths, check_pairs, check_slots
from kvdock.ops.schema import Arg, OpSchema, Relation, Role
from kvdock.spec import COPY_DTYPES, QUANTISED_DTYPES, check_op_words

__all__ = [
    "CATALOG",
    "COPY_BLOCKS",
    "GATHER_PAGED",
    "INDEX_DTYPES",
    "MLA_CACHING",
    "MLA_GATHER",
    "PAGED_CACHING",
    "STATIC_UPDATE",
    "SWAP_BLOCKS",
    "Op",
]

INDEX_DTYPES = (torch.int32, torch.int64)
_CACHE_DTYPES = (*COPY_DTYPES, *QUANTISED_DTYPES)


def _caches(role: Role, k_dims: str = "NB block Hk Dk", v_dims: str = "NB block Hv Dv") -> tuple[Arg, Arg]:
    return Arg("k_cache", role, (k_dims,), _CACHE_DTYPES), Arg("v_cache", role, (v_dims,), _CACHE_DTYPES, same_dtype="k_cache")


_SLOTS = Arg("slot_mapping", Role.TENSOR, ("...",), INDEX_DTYPES)
_SCALES = (  # of quantised caches: per tensor, per head, or per token and head
    Arg("k_scale", Role.TENSOR, ("", "Hk", "... Hk"), (torch.float32,), optional=True, host=True, scale_of="k_cache"),
    Arg("v_scale", Role.TENSOR, ("", "Hv", "... Hv"), (torch.float32,), optional=True, host=True, scale_of="v_cache"),
)


def _check_slots(op: str, pool: str, *, are_read: bool = False) -> Callable[[Mapping[str, Any]], list[str]]:
    def check(args: Mapping[str, Any]) -> list[str]:
        found = check_slots(op, args["slot_mapping"], math.prod(args[pool].shape[:2]))
        return [] if are_read else found  # reading a slot twice is fine

    return check


def _check_static_update(args: Mapping[str, Any]) -> list[str]:
    lengths = args["cache_lengths"]
    values = [lengths] if isinstance(lengths, int) else lengths.flatten().tolist()
    return check_lengths("static_update_", values, args["k"].shape[2], args["k_cache"].shape[2])


PAGED_CACHING = OpSchema(
    "paged_caching_",
    (
        *_caches(Role.MUTATED),
        Arg("k", Role.TENSOR, ("... Hk Dk",), COPY_DTYPES, same_dtype="k_cache"),
        Arg("v", Role.TENSOR, ("... Hv Dv",), COPY_DTYPES, same_dtype="v_cache"),
        _SLOTS,
        *_SCALES,
    ),
    check_values=_check_slots("paged_caching_", "k_cache"),
)

STATIC_UPDATE = OpSchema(
    "static_update_",
    (
        *_caches(Role.MUTATED, "B Hk S Dk", "B Hv S Dv"),
        Arg("k", Role.TENSOR, ("*b Hk *s Dk",), COPY_DTYPES, same_dtype="k_cache"),
        Arg("v", Role.TENSOR, ("*b Hv *s Dv",), COPY_DTYPES, same_dtype="v_cache"),
        Arg("cache_lengths", Role.RUNTIME_INT, ("", "*n"), INDEX_DTYPES),
    ),
    (
        Relation("b <= B", "k", "at most the {B} rows of k_cache", "create the cache with a larger max_batch_size"),
        Relation(
            "n == 1 or n == b",
            "cache_lengths",
            "one length for all rows or one for each of the {b} rows of k",
            "pass a tensor of shape [] or [{b}]",
        ),
    ),
    check_values=_check_static_update,
)

GATHER_PAGED = OpSchema(
    "gather_paged",
    (
        *_caches(Role.TENSOR),
        _SLOTS,
        *_SCALES,
        Arg("k_out", Role.MUTATED, ("... Hk Dk",), COPY_DTYPES, same_dtype="k_cache", returned=True),
        Arg("v_out", Role.MUTATED, ("... Hv Dv",), COPY_DTYPES, same_dtype="v_cache", returned=True),
    ),
    check_values=_check_slots("gather_paged", "k_cache", are_read=True),
)

COPY_BLOCKS = OpSchema(
    "copy_blocks_",
    (*_caches(Role.MUTATED, v_dims="NB vblock Hv Dv"), Arg("block_pairs", Role.TENSOR, ("*N 2",), INDEX_DTYPES, host=True)),
    check_values=lambda args: check_pairs("copy_blocks_", args["block_pairs"], len(args["k_cache"])),
)


SWAP_BLOCKS = OpSchema(
    "swap_blocks_",
    (
        Arg("src_cache", Role.TENSOR, ("NBs block Hk Dk",), _CACHE_DTYPES, host=True),
        Arg("dst_cache", Role.MUTATED, ("NBd block Hk Dk",), _CACHE_DTYPES, same_dtype="src_cache", host=True),
        Arg("block_pairs", Role.TENSOR, ("*N 2",), INDEX_DTYPES, host=True),
    ),
    check_values=lambda args: check_pairs("swap_blocks_", args["block_pairs"], len(args["dst_cache"]), num_sources=len(args["src_cache"])),
    instead="copy blocks inside one pool with kvdock.ops.copy_blocks_",
)


def _latents(role: Role) -> Arg:
    return Arg("kv_cache", role, ("NB block 1 Dw",), _CACHE_DTYPES)  # with a dim for its one head, as `paged_attention` reads it


def _parts(role: Role, suffix: str) -> tuple[Arg, Arg]:
    return (
        Arg(f"kv_c{suffix}", role, ("... Dc",), COPY_DTYPES, same_dtype="kv_cache"),
        Arg(f"k_pe{suffix}", role, ("... Dp",), COPY_DTYPES, same_dtype="kv_cache"),
    )


_LATENT_SCALE = Arg("scale", Role.TENSOR, ("", "..."), (torch.float32,), optional=True, host=True, scale_of="kv_cache")


def _whole_rows(part: str) -> tuple[Relation]:
    fix = "pass the latent first and the rotary part second, as they are cached, or make the cache as wide as both"
    return (Relation("Dw == Dc + Dp", part, "the {Dw} elements of a row of kv_cache, less {Dc} of the latent", fix),)


MLA_CACHING = OpSchema(
    "mla_caching_",
    (_latents(Role.MUTATED), *_parts(Role.TENSOR, ""), _SLOTS, _LATENT_SCALE),
    _whole_rows("k_pe"),
    check_values=_check_slots("mla_caching_", "kv_cache"),
)

MLA_GATHER = OpSchema(
    "mla_gather",
    (_latents(Role.TENSOR), _SLOTS, _LATENT_SCALE, *_parts(Role.MUTATED, "_out")),
    _whole_rows("k_pe_out"),
    check_values=_check_slots("mla_gather", "kv_cache", are_read=True),
)

_OPS = (PAGED_CACHING, STATIC_UPDATE, GATHER_PAGED, COPY_BLOCKS, SWAP_BLOCKS, PAGED_ATTENTION, MLA_CACHING, MLA_GATHER)
CATALOG: Mapping[str, OpSchema] = MappingProxyType({op.name: op for op in _OPS})
"""Every op by name."""


@attrs.frozen
class Op:
    """An op of a plugin's own, which the hook ``kvdock_ops`` returns. It is called, cached, bound and explained as kvdock's own are.

    Args:
        schema: what it takes and writes. Its name begins with that of its plugin, so that no two plugins mean different things by one.
        portable: a kernel of torch operations for any device, which serves what a backend lacks. It asks for no values on a device.
        reference: the meaning, in plain loops: a function of the arguments in the schema's order that writes what the op writes. For
            tests only; the conformance kit compares kernels with it.
        draw: returns good values of what the schema cannot say, given sizes and a generator: see the reference for authors of plugins.
        tolerance: how far a written number may be from the reference's, absolutely and relative to it; 0 means bit for bit.

    Raises:
        ArgumentTypeError: a part of the wrong type.
        ArgumentValueError: a name that kvdock's own ops have, or that the code of a call cannot have; a tensor without sizes or dtypes.
    """

    schema: OpSchema
    portable: Kernel
    reference: Callable[..., object]
    draw: Callable[[Mapping[str, int], random.Random], Mapping[str, object]] | None = None
    tolerance: float = 0.0

    def __attrs_post_init__(self) -> None:
        for part, kind in (("schema", OpSchema), ("portable", Kernel)):
            if not isinstance(getattr(self, part), kind):
                raise ArgumentTypeError(f"Op: {part}", expected=f"a {kind.__name__}", got=repr(getattr(self, part))[:80])
        for part in ("reference", "draw"):
            if not callable(getattr(self, part)) and (part, self.draw) != ("draw", None):
                raise ArgumentTypeError(f"Op: {part}", expected="a function", got=repr(getattr(self, part))[:80])
        check_op_words(self.schema.name, CATALOG, {arg.name: (arg.dims, arg.dtypes) for arg in self.schema.args if arg.is_tensor})
        source_of(self.schema)
