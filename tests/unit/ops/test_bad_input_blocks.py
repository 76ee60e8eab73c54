"""Bad input of `gather_paged` and `copy_blocks_`: which error, its whole text, and that nothing was written."""

from __future__ import annotations

import pytest
import torch

import kvdock
from opskit import SINGLE, Geometry, Memory, Target
from opskit.bad_input import Args, Bad, check_refused

TYPE = kvdock.ArgumentTypeError
G = Geometry()


def good_gather(memory: Memory) -> Args:
    """Return arguments that are accepted."""
    k_cache, v_cache = G.pools(memory)
    return {"k_cache": k_cache, "v_cache": v_cache, "slot_mapping": memory.index([4, -1, 23]), "out": G.tokens(memory, [3])}


def good_copy(memory: Memory) -> Args:
    """Return arguments that are accepted."""
    k_cache, v_cache = G.pools(memory)
    return {"k_cache": k_cache, "v_cache": v_cache, "block_pairs": memory.index([[0, 5], [3, 2]])}


def outs_that_share_memory(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two outputs of three tokens, the second one element behind the first."""
    memory = cache.new_zeros(3 * 2 * 8 + 1)
    return memory[:-1].view(3, 2, 8), memory[1:].view(3, 2, 8)


BAD_GATHER = {
    "out on another device": Bad(
        'k_out: expected a tensor on {device}, where k_cache is, got a tensor on meta. Fix: k_out.to("{device}")',
        lambda a: {"out": (a.out[0].to("meta"), a.out[1])},
    ),
    "out of another dtype": Bad(
        "v_out: expected torch.bfloat16, the dtype of v_cache, got torch.float32; bits are never reinterpreted. Fix: "
        "v_out.to(torch.bfloat16), or create the cache in torch.float32",
        lambda a: {"out": (a.out[0], a.out[1].float())},
        TYPE,
    ),
    "out of fewer tokens": Bad(
        "k_out: expected shape [T=3, Hk=2, Dk=8] to agree with k_cache, slot_mapping, got shape [2, 2, 8]. Fix: "
        "check the order of dimensions and of arguments",
        lambda a: {"out": (a.out[0][:2], a.out[1])},
    ),
    "out of a smaller dim": Bad(
        "v_out: expected shape [T=3, Hv=2, Dv=8] to agree with slot_mapping, v_cache, got shape [3, 2, 4]. Fix: "
        "check the order of dimensions and of arguments",
        lambda a: {"out": (a.out[0], a.out[1][..., :4])},
    ),
    "out with an inner stride": Bad(
        "k_out: expected an innermost stride of 1, got strides [32, 16, 2] for shape [3, 2, 8]. Fix: k_out.contiguous()",
        lambda a: {"out": (a.out[0].repeat(1, 1, 2)[..., ::2], a.out[1])},
    ),
    "out within the cache": Bad(
        "k_cache: expected memory outside k_out, which is written, got address * within k_out from *. Fix: pass two "
        "tensors for k_out and k_cache",
        lambda a: {"out": (a.k_cache[0, :3], a.out[1])},
    ),
    "out in the place of the slots": Bad(
        "v_out: expected a destination in which every place has memory of its own, got strides [0, 0, 1] for shape [3, "
        "2, 8]. Fix: pass a real tensor rather than one made by expand or as_strided",
        lambda a: {"out": (a.out[0], a.slot_mapping.view(G.dtype)[:8].expand(3, 2, 8))},
    ),
    "outs that share memory": Bad(
        "v_out: expected memory outside k_out, which is written, got address * within k_out from *. Fix: pass two "
        "tensors for k_out and v_out",
        lambda a: {"out": outs_that_share_memory(a.k_cache)},
    ),
    "out that is one tensor": Bad(
        "out: expected a pair (k, v) of tensors, got Tensor. Fix: pass both, or None",
        lambda a: {"out": a.out[0]},
        TYPE,
    ),
    "out of three": Bad(
        "out: expected a pair (k, v) of tensors, got tuple. Fix: pass both, or None",
        lambda a: {"out": (*a.out, None)},
        TYPE,
    ),
    "out without values": Bad(
        "v_out: expected a torch.Tensor, got NoneType None. Fix: convert it with torch.as_tensor",
        lambda a: {"out": (a.out[0], None)},
        TYPE,
    ),
    "slots of rank 3": Bad(
        "slot_mapping: expected shape [T] or [B, S], got shape [1, 1, 3]. Fix: check the order of dimensions and of arguments",
        lambda a: {"slot_mapping": a.slot_mapping[None, None]},
    ),
    "slots of floats, without out": Bad(
        "slot_mapping: expected one of torch.int32, torch.int64, got torch.float32. Fix: slot_mapping.to(torch.int64), "
        "if that keeps its meaning",
        lambda a: {"slot_mapping": a.slot_mapping.float(), "out": None},
        TYPE,
    ),
    "slots as a list, without out": Bad(
        "slot_mapping: expected a torch.Tensor, got list [1, 2]. Fix: convert it with torch.as_tensor",
        lambda _: {"slot_mapping": [1, 2], "out": None},
        TYPE,
    ),
    "no cache, without out": Bad(
        "k_cache: expected a torch.Tensor, got NoneType None. Fix: convert it with torch.as_tensor",
        lambda _: {"k_cache": None, "out": None},
        TYPE,
    ),
    "a cache of rank 2, without out": Bad(
        "k_cache: expected shape [NB, block, Hk, Dk], got shape [2, 8]. Fix: check the order of dimensions and of arguments",
        lambda a: {"k_cache": a.k_cache[0, 0], "out": None},
    ),
}

BAD_COPY = {
    "triples": Bad(
        "block_pairs: expected shape [N, 2], got shape [2, 3]. Fix: check the order of dimensions and of arguments",
        lambda a: {"block_pairs": a.block_pairs.repeat(1, 2)[:, :3]},
    ),
    "a flat list": Bad(
        "block_pairs: expected shape [N, 2], got shape [2]. Fix: check the order of dimensions and of arguments",
        lambda _: {"block_pairs": [0, 5]},
    ),
    "a number": Bad(
        "block_pairs: expected shape [N, 2], got shape []. Fix: check the order of dimensions and of arguments",
        lambda _: {"block_pairs": 3},
    ),
    "ragged lists": Bad(
        "block_pairs: expected [N, 2] integers (src, dst), got [(0, 5), (1,)]. Fix: pass a list of pairs, or an integer "
        "array or tensor of shape [N, 2]",
        lambda _: {"block_pairs": [(0, 5), (1,)]},
    ),
    "words": Bad(
        "block_pairs: expected [N, 2] integers (src, dst), got [('a', 'b')]. Fix: pass a list of pairs, or an integer "
        "array or tensor of shape [N, 2]",
        lambda _: {"block_pairs": [("a", "b")]},
        TYPE,
    ),
    "nothing": Bad(
        "block_pairs: expected [N, 2] integers (src, dst), got None. Fix: pass a list of pairs, or an integer array or "
        "tensor of shape [N, 2]",
        lambda _: {"block_pairs": None},
        TYPE,
    ),
    "integers beyond 64 bits": Bad(
        "block_pairs: expected [N, 2] integers (src, dst), got [(0, 1208925819614629174706176)]. Fix: pass a list of "
        "pairs, or an integer array or tensor of shape [N, 2]",
        lambda _: {"block_pairs": [(0, 2**80)]},
        TYPE,
    ),
    "floats": Bad(
        "block_pairs: expected one of torch.int32, torch.int64, got torch.float64. Fix: block_pairs.to(torch.int64), if "
        "that keeps its meaning",
        lambda a: {"block_pairs": a.block_pairs.double()},
        TYPE,
    ),
    "floats in a list": Bad(
        "block_pairs: expected [N, 2] integers (src, dst), got [(0.0, 5.0)]. Fix: pass a list of pairs, or an integer "
        "array or tensor of shape [N, 2]",
        lambda _: {"block_pairs": [(0.0, 5.0)]},
        TYPE,
    ),
    "pairs on another device": Bad(
        'block_pairs: expected a tensor on {device}, where k_cache is, got a tensor on meta. Fix: block_pairs.to("{device}")',
        lambda a: {"block_pairs": a.block_pairs.to("meta")},
    ),
    "pairs with an inner stride": Bad(
        "block_pairs: expected an innermost stride of 1, got strides [1, 2] for shape [2, 2]. Fix: block_pairs.contiguous()",
        lambda a: {"block_pairs": a.block_pairs.T.contiguous().T},
    ),
    "pairs within the cache": Bad(
        "block_pairs: expected memory outside k_cache, which is written, got address * within k_cache from *. Fix: block_pairs.clone()",
        lambda a: {"block_pairs": a.k_cache.flatten()[:16].view(torch.int64).view(2, 2)},
    ),
    "v_cache of fewer blocks": Bad(
        "v_cache: expected shape [NB=6, vblock, Hv, Dv] to agree with k_cache, got shape [5, 4, 2, 8]. Fix: check the "
        "order of dimensions and of arguments",
        lambda a: {"v_cache": a.v_cache[:5]},
    ),
    "v_cache of another dtype": Bad(
        "v_cache: expected torch.bfloat16, the dtype of k_cache, got torch.float16; bits are never reinterpreted. Fix: "
        "v_cache.to(torch.bfloat16), or create the cache in torch.float16",
        lambda a: {"v_cache": a.v_cache.half()},
        TYPE,
    ),
    "caches that share memory": Bad(
        "v_cache: expected memory outside k_cache, which is written, got address * within k_cache from *. Fix: pass two "
        "tensors for k_cache and v_cache",
        lambda a: {"k_cache": a.k_cache[:-1], "v_cache": a.k_cache[1:]},
    ),
    "one cache for both": Bad(
        "v_cache: expected memory outside k_cache, which is written, got address * within k_cache from *. Fix: pass two "
        "tensors for k_cache and v_cache",
        lambda a: {"v_cache": a.k_cache},
    ),
    "a cache that overlaps itself": Bad(
        "k_cache: expected a destination in which every place has memory of its own, got strides [64, 0, 8, 1] for shape "
        "[6, 4, 2, 8]. Fix: pass a real tensor rather than one made by expand or as_strided",
        lambda a: {"k_cache": a.k_cache[:, :1].expand(6, 4, 2, 8)},
    ),
}


@pytest.mark.parametrize("bad", BAD_GATHER.values(), ids=BAD_GATHER)
@pytest.mark.parametrize("target", SINGLE, indirect=True)
def test_gather_paged_refuses(target: Target, bad: Bad) -> None:
    check_refused(target, "gather_paged", good_gather, bad)


@pytest.mark.parametrize("bad", BAD_COPY.values(), ids=BAD_COPY)
@pytest.mark.parametrize("target", SINGLE, indirect=True)
def test_copy_blocks_refuses(target: Target, bad: Bad) -> None:
    check_refused(target, "copy_blocks_", good_copy, bad)
