"""Bad input of `paged_caching_`: which error, its whole text, and that nothing was written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvdock
from opskit import SINGLE, Geometry, Memory, Target, check
from opskit.bad_input import Args, Bad, check_refused, inside

TYPE = kvdock.ArgumentTypeError
G = Geometry()


def good(memory: Memory) -> Args:
    """Return arguments that are accepted."""
    k_cache, v_cache = G.pools(memory)
    k, v = G.tokens(memory, [3])
    return {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "slot_mapping": memory.index([4, -1, 23])}


BAD = {
    "k on another device": Bad(
        'k: expected a tensor on {device}, where k_cache is, got a tensor on meta. Fix: k.to("{device}")',
        lambda a: {"k": a.k.to("meta")},
    ),
    "v_cache on another device": Bad(
        'v_cache: expected a tensor on {device}, where k_cache is, got a tensor on meta. Fix: v_cache.to("{device}")',
        lambda a: {"v_cache": a.v_cache.to("meta")},
    ),
    "slots on another device": Bad(
        'slot_mapping: expected a tensor on {device}, where k_cache is, got a tensor on meta. Fix: slot_mapping.to("{device}")',
        lambda a: {"slot_mapping": a.slot_mapping.to("meta")},
    ),
    "k of another dtype": Bad(
        "k: expected torch.bfloat16, the dtype of k_cache, got torch.float32; bits are never reinterpreted. Fix: "
        "k.to(torch.bfloat16), or create the cache in torch.float32",
        lambda a: {"k": a.k.float()},
        TYPE,
    ),
    "v of another dtype": Bad(
        "v: expected torch.bfloat16, the dtype of v_cache, got torch.float16; bits are never reinterpreted. Fix: "
        "v.to(torch.bfloat16), or create the cache in torch.float16",
        lambda a: {"v": a.v.half()},
        TYPE,
    ),
    "v_cache of another dtype": Bad(
        "v_cache: expected torch.bfloat16, the dtype of k_cache, got torch.float16; bits are never reinterpreted. Fix: "
        "v_cache.to(torch.bfloat16), or create the cache in torch.float16",
        lambda a: {"v_cache": a.v_cache.half()},
        TYPE,
    ),
    "k of integers": Bad(
        "k: expected one of torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, got torch.int16. "
        "Fix: k.to(torch.bfloat16), if that keeps its meaning",
        lambda a: {"k": a.k.view(torch.int16)},
        TYPE,
    ),
    "slots of int16": Bad(
        "slot_mapping: expected one of torch.int32, torch.int64, got torch.int16. Fix: slot_mapping.to(torch.int64), if "
        "that keeps its meaning",
        lambda a: {"slot_mapping": a.slot_mapping.short()},
        TYPE,
    ),
    "slots of uint8": Bad(
        "slot_mapping: expected one of torch.int32, torch.int64, got torch.uint8. Fix: slot_mapping.to(torch.int64), if "
        "that keeps its meaning",
        lambda a: {"slot_mapping": a.slot_mapping.byte()},
        TYPE,
    ),
    "slots of floats": Bad(
        "slot_mapping: expected one of torch.int32, torch.int64, got torch.float32. Fix: slot_mapping.to(torch.int64), "
        "if that keeps its meaning",
        lambda a: {"slot_mapping": a.slot_mapping.float()},
        TYPE,
    ),
    "slots of bools": Bad(
        "slot_mapping: expected one of torch.int32, torch.int64, got torch.bool. Fix: slot_mapping.to(torch.int64), if "
        "that keeps its meaning",
        lambda a: {"slot_mapping": a.slot_mapping > 0},
        TYPE,
    ),
    "slots as a list": Bad(
        "slot_mapping: expected a torch.Tensor, got list [4, -1, 23]. Fix: convert it with torch.as_tensor",
        lambda _: {"slot_mapping": [4, -1, 23]},
        TYPE,
    ),
    "k as an array": Bad(
        "k: expected a torch.Tensor, got ndarray array([0.]). Fix: convert it with torch.as_tensor",
        lambda _: {"k": np.zeros(1)},
        TYPE,
    ),
    "no k_cache": Bad(
        "k_cache: expected a torch.Tensor, got NoneType None. Fix: convert it with torch.as_tensor",
        lambda _: {"k_cache": None},
        TYPE,
    ),
    "a sparse k": Bad(
        "k: expected a dense tensor with strides, got torch.sparse_coo. Fix: k.to_dense()",
        lambda a: {"k": a.k.to_sparse()},
        TYPE,
    ),
    "a scale that is a number": Bad(
        "k_scale: expected a torch.Tensor, got float 1.0. Fix: convert it with torch.as_tensor",
        lambda _: {"k_scale": 1.0},
        TYPE,
    ),
    "a cache of rank 3": Bad(
        "k_cache: expected shape [NB, block, Hk, Dk], got shape [4, 2, 8]. Fix: check the order of dimensions and of arguments",
        lambda a: {"k_cache": a.k_cache[0]},
    ),
    "k as 2-D rows": Bad(
        "k: expected shape [T, Hk=2, Dk=8] or [B, S, Hk=2, Dk=8] to agree with k_cache, got shape [3, 16]. "
        "Fix: check the order of dimensions and of arguments",
        lambda a: {"k": a.k.flatten(1)},
    ),
    "k of rank 5": Bad(
        "k: expected shape [T, Hk=2, Dk=8] or [B, S, Hk=2, Dk=8] to agree with k_cache, got shape [1, 1, 3, "
        "2, 8]. Fix: check the order of dimensions and of arguments",
        lambda a: {"k": a.k[None, None]},
    ),
    "slots of rank 0": Bad(
        "slot_mapping: expected shape [T=3] to agree with k, got shape []. Fix: check the order of dimensions and of arguments",
        lambda a: {"slot_mapping": a.slot_mapping[0]},
    ),
    "slots of rank 3": Bad(
        "slot_mapping: expected shape [T=3] to agree with k, got shape [1, 1, 3]. Fix: check the order of dimensions and of arguments",
        lambda a: {"slot_mapping": a.slot_mapping[None, None]},
    ),
    "fewer slots than tokens": Bad(
        "slot_mapping: expected shape [T=3] to agree with k, got shape [2]. Fix: check the order of dimensions and of arguments",
        lambda a: {"slot_mapping": a.slot_mapping[:2]},
    ),
    "more slots than tokens": Bad(
        "slot_mapping: expected shape [T=3] to agree with k, got shape [6]. Fix: check the order of dimensions and of arguments",
        lambda a: {"slot_mapping": a.slot_mapping.repeat(2)},
    ),
    "no slots for some tokens": Bad(
        "slot_mapping: expected shape [T=3] to agree with k, got shape [0]. Fix: check the order of dimensions and of arguments",
        lambda a: {"slot_mapping": a.slot_mapping[:0]},
    ),
    "slots [3, 1] for tokens [3]": Bad(
        "slot_mapping: expected shape [T=3] to agree with k, got shape [3, 1]. Fix: check the order of dimensions and of arguments",
        lambda a: {"slot_mapping": a.slot_mapping[:, None]},
    ),
    "slots [3] for tokens [1, 3]": Bad(
        "slot_mapping: expected shape [B=1, S=3] to agree with k, got shape [3]. Fix: check the order of dimensions and of arguments",
        lambda a: {"k": a.k[None], "v": a.v[None]},
    ),
    "slots [3, 2] for tokens [3]": Bad(
        "slot_mapping: expected shape [T=3] to agree with k, got shape [3, 2]. Fix: check the order of dimensions and of arguments",
        lambda a: {"slot_mapping": a.slot_mapping[:, None].expand(3, 2)},
    ),
    "values [3, 1] for keys [3]": Bad(
        "v: expected shape [T=3, Hv=2, Dv=8] to agree with k, v_cache, got shape [3, 1, 2, 8]. "
        "Fix: check the order of dimensions and of arguments",
        lambda a: {"v": a.v[:, None]},
    ),
    "fewer values than keys": Bad(
        "v: expected shape [T=3, Hv=2, Dv=8] to agree with k, v_cache, got shape [2, 2, 8]. Fix: check the order of "
        "dimensions and of arguments",
        lambda a: {"v": a.v[:2]},
    ),
    "k of fewer heads": Bad(
        "k: expected shape [T, Hk=2, Dk=8] to agree with k_cache, got shape [3, 1, 8]. Fix: check the order of dimensions and of arguments",
        lambda a: {"k": a.k[:, :1]},
    ),
    "k of a smaller dim": Bad(
        "k: expected shape [T, Hk=2, Dk=8] to agree with k_cache, got shape [3, 2, 4]. Fix: check the order of dimensions and of arguments",
        lambda a: {"k": a.k[..., :4]},
    ),
    "k with heads before tokens": Bad(
        "k: expected shape [T, Hk=2, Dk=8] to agree with k_cache, got shape [2, 3, 8]. Fix: check the order of dimensions and of arguments",
        lambda a: {"k": a.k.transpose(0, 1)},
    ),
    "v_cache of fewer blocks": Bad(
        "v_cache: expected shape [NB=6, block=4, Hv, Dv] to agree with k_cache, got shape [5, 4, 2, 8]. Fix: check the "
        "order of dimensions and of arguments",
        lambda a: {"v_cache": a.v_cache[:5]},
    ),
    "v_cache of smaller blocks": Bad(
        "v_cache: expected shape [NB=6, block=4, Hv, Dv] to agree with k_cache, got shape [6, 3, 2, 8]. Fix: check the "
        "order of dimensions and of arguments",
        lambda a: {"v_cache": a.v_cache[:, :3]},
    ),
    "a cache without heads": Bad(
        "k_cache: expected shape [NB, block, Hk, Dk] with no size 0, got shape [6, 4, 0, 8]. Fix: check the order of "
        "dimensions and of arguments",
        lambda a: {"k_cache": a.k_cache[:, :, :0]},
    ),
    "a cache without places": Bad(
        "k_cache: expected shape [NB, block, Hk, Dk] with no size 0, got shape [6, 0, 2, 8]. Fix: check the order of "
        "dimensions and of arguments",
        lambda a: {"k_cache": a.k_cache[:, :0]},
    ),
    "a cache without dims": Bad(
        "k_cache: expected shape [NB, block, Hk, Dk] with no size 0, got shape [6, 4, 2, 0]. Fix: check the order of "
        "dimensions and of arguments",
        lambda a: {"k_cache": a.k_cache[..., :0]},
    ),
    "k with an inner stride": Bad(
        "k: expected an innermost stride of 1, got strides [32, 16, 2] for shape [3, 2, 8]. Fix: k.contiguous()",
        lambda a: {"k": a.k.repeat(1, 1, 2)[..., ::2]},
    ),
    "v transposed": Bad(
        "v: expected an innermost stride of 1, got strides [16, 1, 2] for shape [3, 2, 8]. Fix: v.contiguous()",
        lambda a: {"v": a.v.transpose(1, 2).contiguous().transpose(1, 2)},
    ),
    "k expanded in its dim": Bad(
        "k: expected an innermost stride of 1, got strides [16, 8, 0] for shape [3, 2, 8]. Fix: k.contiguous()",
        lambda a: {"k": a.k[..., :1].expand(3, 2, 8)},
    ),
    "a cache with an inner stride": Bad(
        "k_cache: expected an innermost stride of 1, got strides [128, 32, 16, 2] for shape [6, 4, 2, 8]. Fix: k_cache.contiguous()",
        lambda a: {"k_cache": a.k_cache.repeat(1, 1, 1, 2)[..., ::2]},
    ),
    "a cache that overlaps itself": Bad(
        "v_cache: expected a destination in which every place has memory of its own, got strides [0, 16, 8, 1] for shape "
        "[6, 4, 2, 8]. Fix: pass a real tensor rather than one made by expand or as_strided",
        lambda a: {"v_cache": a.v_cache[:1].expand(6, 4, 2, 8)},
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
    "k within k_cache": Bad(
        "k: expected memory outside k_cache, which is written, got address * within k_cache from *. Fix: k.clone()",
        lambda a: {"k": inside(a.k_cache, a.k, 64)},
    ),
    "k within v_cache": Bad(
        "k: expected memory outside v_cache, which is written, got address * within v_cache from *. Fix: k.clone()",
        lambda a: {"k": inside(a.v_cache, a.k, 0)},
    ),
    "v within k_cache": Bad(
        "v: expected memory outside k_cache, which is written, got address * within k_cache from *. Fix: v.clone()",
        lambda a: {"v": inside(a.k_cache, a.v, 64)},
    ),
    "k over the first element": Bad(
        "k: expected memory outside k_cache, which is written, got address * within k_cache from *. Fix: k.clone()",
        lambda a: {"k": inside(a.k_cache, a.k, -47)},
    ),
    "k over the last element": Bad(
        "k: expected memory outside k_cache, which is written, got address * within k_cache from *. Fix: k.clone()",
        lambda a: {"k": inside(a.k_cache, a.k, 383)},
    ),
    "slots within v_cache": Bad(
        "slot_mapping: expected memory outside v_cache, which is written, got address * within v_cache from *. Fix: slot_mapping.clone()",
        lambda a: {"slot_mapping": a.v_cache.flatten()[:12].view(torch.int64)},
    ),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("target", SINGLE, indirect=True)
def test_paged_caching_refuses(target: Target, bad: Bad) -> None:
    check_refused(target, "paged_caching_", good, bad)


@pytest.mark.parametrize("target", SINGLE, indirect=True)
@pytest.mark.parametrize("count", [1, 5])
def test_sources_that_touch_the_cache_are_accepted(target: Target, memory: Memory, count: int) -> None:
    """The last byte before a pool and the first behind it are not the pool's."""
    around = memory.tensor(G.dtype, (24 + 2 * count, 2, 8))
    k_cache, v_cache = around[count:-count].view(6, 4, 2, 8), G.pools(memory)[1]
    slots = memory.index([0, 23, 5, 8, 9][:count])
    check(target, memory, "paged_caching_", k_cache, v_cache, around[:count], around[-count:], slots)
    check(target, memory, "gather_paged", k_cache, v_cache, slots, around[:count], around[-count:])


@pytest.mark.parametrize("target", SINGLE, indirect=True)
def test_overlap_is_found_to_the_element_with_a_plan_that_is_there(target: Target) -> None:
    """Rows of one element, so that every address has one class: one plan serves all calls that are accepted."""
    g, memory = Geometry.even(1, 1), Memory(target.device)
    around = memory.tensor(g.dtype, (40,))
    k_cache, v_cache, v, slots = around[8:32].view(g.k_shape), g.pools(memory)[1], g.tokens(memory, [3])[1], memory.index([0, 23, 5])
    for start in range(38):
        k = around[start : start + 3].view(3, 1, 1)
        if start + 3 <= 8 or start >= 32:
            check(target, memory, "paged_caching_", k_cache, v_cache, k, v, slots)
            continue
        before = memory.copy()
        with pytest.raises(kvdock.ArgumentValueError, match=r"paged_caching_: k: expected memory outside k_cache"):
            kvdock.ops.paged_caching_(k_cache, v_cache, k, v, slots)
        before.assert_same(f"start={start}")
