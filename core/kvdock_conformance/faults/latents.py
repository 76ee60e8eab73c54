"""Faults of `mla_caching_` and `mla_gather`: those of any op that goes by slots, whose keys are latents, and some of rows in two parts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs
import torch

from kvdock_conformance.faults.families import faults_of, of_one_projection
from kvdock_conformance.faults.fault import Args, BackendCall, Fault, Faults, FaultyCall
from kvdock_conformance.faults.moves import Move, by_slots
from kvdock_conformance.faults.ops import CallSeed, never_nothing
from kvdock_conformance.faults.places import as_keys
from kvdock_conformance.faults.tensors import bits, restrided
from kvdock_conformance.requirements.latents import ASKED

__all__ = ["FAULTS", "LATENT_READ", "LATENT_WRITE"]

_PAIR = {"kv_c": "k", "k_pe": "v", "kv_c_out": "k_out", "k_pe_out": "v_out"}


def _as_pair(run: BackendCall, args: Args) -> tuple[BackendCall, Args]:
    """Return a call of latents as one of keys and values of one head."""
    rank, pool = next(args[name].shape[-1] for name in ("kv_c", "kv_c_out") if name in args), args["kv_cache"]
    rows = {pair: args[name].unsqueeze(-2) for name, pair in _PAIR.items() if name in args}

    def run_pair(changed: Args) -> None:
        own = {name: changed[pair].squeeze(-2) for name, pair in _PAIR.items() if pair in changed}
        run({**args, **own, "slot_mapping": changed["slot_mapping"]})

    return run_pair, {"k_cache": pool[..., :rank], "v_cache": pool[..., rank:], **rows, "slot_mapping": args["slot_mapping"]}


_ROLES = " ".join(role for role, _, _ in ASKED)
LATENT_WRITE = by_slots("mla_caching_", "mla", _ROLES, (("k", "k_cache"), ("v", "v_cache")), {}, seen=_as_pair)
LATENT_READ = by_slots("mla_gather", "mlaread", _ROLES, (("k_cache", "k_out"), ("v_cache", "v_out")), {}, seen=_as_pair)

_OF_TWO_POOLS = ("values-by-the-strides-of-keys", "values-below-keys-left", "values-inside-keys-left", "values-of-other-sizes-left")
"""Faults that a pool for both parts cannot have."""


def _of_family(move: Move) -> list[Fault]:
    """Return the faults that any op that goes by slots can have. No part of a row of two is dense, whatever steps of a size of 1 say."""
    every = {fault.name.removeprefix(f"{move.prefix}-"): fault for fault in faults_of(move)}
    of_rows = {"steps-of-one-matter": attrs.evolve(every["steps-of-one-matter"], killers=(move.killer("rows"),))}
    return [fault for name, fault in (every | of_rows).items() if name not in _OF_TWO_POOLS]


FAULTS = Faults()


def _ids(move: Move, roles: str) -> list[str]:
    return [move.killer(role) for role in roles.split()]


def _fault(move: Move, name: str, sentence: str, roles: str) -> Callable[[FaultyCall], FaultyCall]:
    return FAULTS.call(move.op, f"{move.prefix}-{name}", sentence, *_ids(move, roles))


for _move in (LATENT_WRITE, LATENT_READ):
    FAULTS += _of_family(_move)
    _seed = CallSeed(_move.op, never_nothing)
    FAULTS.append(
        Fault(f"{_move.prefix}-works-without-tokens", "A call without tokens changes a byte.", _move.op, (_move.killer("nothing"),), _seed)
    )


@_fault(LATENT_WRITE, "rotary-part-in-front", "The rotary part is written first, and the latent behind it.", "first unlike dims")
def _in_front(run: BackendCall, args: Args) -> None:
    run(args)
    block, offset = LATENT_WRITE.places(_as_pair(run, args)[1]).to
    pool, rope = bits(args["kv_cache"]), args["k_pe"].shape[-1]
    pool[block, offset, 0] = pool[block, offset, 0].roll(rope, -1)


@_fault(LATENT_WRITE, "rotary-part-by-the-steps-of-latents", "Rotary parts are read in steps as long as those of latents.", "first unlike")
def _one_step(run: BackendCall, args: Args) -> None:
    kv_c, k_pe = args["kv_c"], args["k_pe"]
    reach = sum((size - 1) * step for size, step in zip(k_pe.shape, (*kv_c.stride()[:-1], 1), strict=True))
    room = k_pe.untyped_storage().nbytes() // k_pe.element_size() - k_pe.storage_offset()
    run({**args, "k_pe": restrided(k_pe, (*kv_c.stride()[:-1], 1)) if reach < room else torch.zeros_like(k_pe)})


@_fault(LATENT_WRITE, "parts-swapped-when-equal", "Where both parts have as many elements, one is taken for the other.", "first batch")
def _swapped(run: BackendCall, args: Args) -> None:
    equal = args["kv_c"].shape == args["k_pe"].shape
    run({**args, "kv_c": args["k_pe"], "k_pe": args["kv_c"]} if equal else args)


@_fault(LATENT_WRITE, "last-block-left", "What goes to the last block is left.", "ends")
def _last_block(run: BackendCall, args: Args) -> None:
    slots, (blocks, block) = args["slot_mapping"], args["kv_cache"].shape[:2]
    run({**args, "slot_mapping": torch.where((slots // block == blocks - 1) & (slots < blocks * block), -1, slots)})


@FAULTS.plan(
    LATENT_WRITE.op,
    "mla-known-step-in-whole-words",
    "Behind three calls like it, the rotary part of one token begins at a multiple of 4 bytes.",
    *_ids(LATENT_WRITE, "repeated"),
)
def _in_whole_words() -> FaultyCall:
    steps: list[int] = []

    def call(run: BackendCall, args: Args) -> None:
        run(args)
        steps.extend([args["slot_mapping"].numel()] * (args["slot_mapping"].numel() == 1))
        block, offset = LATENT_WRITE.places(_as_pair(run, args)[1]).to
        if len(steps) > 3 and args["kv_c"].shape[-1] * args["kv_c"].element_size() % 4:
            row = bits(args["kv_cache"])[block, offset, 0]
            bits(args["kv_cache"])[block, offset, 0] = row.roll(1, -1)

    return call


@FAULTS.plan(
    LATENT_WRITE.op,
    "mla-known-padding-of-minus-one",
    "Behind three calls like it, the slot of one token is taken for padding where it is -1 alone, and else for its remainder.",
    *_ids(LATENT_WRITE, "repeated"),
)
def _known_padding() -> FaultyCall:
    steps: list[int] = []

    def call(run: BackendCall, args: Args) -> None:
        slots, (blocks, block) = args["slot_mapping"], args["kv_cache"].shape[:2]
        steps.extend([1] * (slots.numel() == 1))
        run({**args, "slot_mapping": slots % (blocks * block) if len(steps) > 3 and slots.numel() == 1 and int(slots) < -1 else slots})

    return call


@FAULTS.plan(
    LATENT_WRITE.op,
    "mla-known-parts-together",
    "Behind three calls like it, the rotary part of one token is read behind its latent, where that of the first call was.",
    *_ids(LATENT_WRITE, "meeting"),
)
def _known_parts() -> FaultyCall:
    together: list[bool] = []

    def call(run: BackendCall, args: Args) -> None:
        kv_c, k_pe, (rank, rope) = args["kv_c"], args["k_pe"], (args["kv_c"].shape[-1], args["k_pe"].shape[-1])
        if args["slot_mapping"].numel() == 1:
            together.append(k_pe.data_ptr() == kv_c.data_ptr() + kv_c.nbytes)
            if len(together) > 3 and together[0] and not together[-1]:
                has_room = kv_c.storage_offset() + rank + rope <= kv_c.untyped_storage().nbytes() // kv_c.element_size()
                behind = kv_c.as_strided(k_pe.shape, k_pe.stride(), kv_c.storage_offset() + rank) if has_room else torch.zeros_like(k_pe)
                args = {**args, "k_pe": behind}
        run(args)

    return call


@_fault(LATENT_READ, "joint-padding-cleared-by-half", "Where both parts lie in one row, padding is cleared in the latent alone.", "meeting")
def _cleared_by_half(run: BackendCall, args: Args) -> None:
    kv_c, k_pe, padding = args["kv_c_out"], args["k_pe_out"], args["slot_mapping"] < 0
    before = k_pe.clone()
    run(args)
    if k_pe.data_ptr() == kv_c.data_ptr() + kv_c.shape[-1] * kv_c.element_size():
        k_pe[padding] = before[padding]


_sentence = "A rotary part right behind the first latent is gone through in the steps of latents."
_fault(LATENT_WRITE, "steps-of-one-projection", _sentence, "rows")(lambda run, args: of_one_projection(LATENT_WRITE, *_as_pair(run, args)))


_sentence = "Rotary parts at the address of latents, and of their shape, are taken to be the latents."
_fault(LATENT_WRITE, "values-at-the-address-of-keys", _sentence, "rows")(lambda run, args: as_keys(LATENT_WRITE, *_as_pair(run, args)))


def _bare_error(move: Move, run: BackendCall, args: Args) -> None:
    """Raise an error of another class where a long call has a slot beyond the pool."""
    slots = args["slot_mapping"]
    if slots.numel() > 512 and int(slots.max()) >= move.limit(_as_pair(run, args)[1]):
        raise IndexError(f"slot {int(slots.max())} is out of range")
    run(args)


def _as_floats(move: Move, run: BackendCall, args: Args) -> None:
    slots, limit = args["slot_mapping"], move.limit(_as_pair(run, args)[1])
    run({**args, "slot_mapping": torch.where(slots < limit, slots.float().to(slots.dtype), slots)})


for _move in (LATENT_WRITE, LATENT_READ):
    _fault(_move, "slots-as-floats", "Slots go through float32.", "parts")(functools.partial(_as_floats, _move))
    _sentence = "Of many slots, one beyond the pool raises an error that does not say how to fix it."
    _fault(_move, "error-of-many-is-bare", _sentence, "beyond")(functools.partial(_bare_error, _move))


@_fault(LATENT_WRITE, "blocks-written-back", "The blocks of a call are read, and written back whole.", "threads")
def _written_back(run: BackendCall, args: Args) -> None:
    slots, pool = args["slot_mapping"], args["kv_cache"]
    blocks, own = (slots[(slots >= 0) & (slots < len(pool) * pool.shape[1])] // pool.shape[1]).unique(), pool.clone()
    run({**args, "kv_cache": own})
    pool[blocks] = own[blocks]


@_fault(LATENT_WRITE, "rows-joined-first", "Both parts of all rows are joined before they are written.", "scratch")
def _joined_first(run: BackendCall, args: Args) -> None:
    rank, joined = args["kv_c"].shape[-1], torch.cat([args["kv_c"], args["k_pe"]], -1)
    run({**args, "kv_c": joined[..., :rank], "k_pe": joined[..., rank:]})


@_fault(LATENT_READ, "slots-through-one-buffer", "Slots go through a buffer of the process.", "threads")
def _one_buffer(run: BackendCall, args: Args) -> None:
    slots = args["slot_mapping"]
    buffer = _SLOTS.setdefault((slots.shape, slots.dtype, slots.device), torch.empty_like(slots))
    run({**args, "slot_mapping": buffer.copy_(slots)})


_SLOTS: dict[object, torch.Tensor] = {}


@_fault(LATENT_READ, "rows-read-whole-first", "Rows are read whole, and then their parts.", "scratch")
def _whole_first(run: BackendCall, args: Args) -> None:
    run(args)
    pool = args["kv_cache"]
    pool.new_empty((*args["kv_c_out"].shape[:-1], pool.shape[-1]))


@_fault(LATENT_READ, "rotary-part-one-early", "The rotary part begins at the last element of the latent.", "first unlike dims")
def _one_early(run: BackendCall, args: Args) -> None:
    run(args)
    places, rank = LATENT_READ.places(_as_pair(run, args)[1]), args["kv_c_out"].shape[-1]
    block, offset = places.source
    bits(args["k_pe_out"])[places.to] = bits(args["kv_cache"])[block, offset, 0, rank - 1 : -1]


@_fault(LATENT_READ, "parts-swapped-when-equal", "Where both parts have as many elements, one is taken for the other.", "first batch")
def _read_swapped(run: BackendCall, args: Args) -> None:
    equal = args["kv_c_out"].shape == args["k_pe_out"].shape
    run({**args, "kv_c_out": args["k_pe_out"], "k_pe_out": args["kv_c_out"]} if equal else args)
