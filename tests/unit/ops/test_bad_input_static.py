"""Bad input of `static_update_`: which error, its whole text, and that nothing was written."""

from __future__ import annotations

import pytest
import torch

import kvdock
from opskit import SINGLE, Geometry, Memory, Target
from opskit.bad_input import Args, Bad, check_refused

TYPE = kvdock.ArgumentTypeError
G = Geometry()


def good(memory: Memory) -> Args:
    """Return arguments that are accepted: 4 of 6 rows, 3 new positions, of 10."""
    shapes = {"k_cache": (6, 2, 10, 8), "v_cache": (6, 2, 10, 8), "k": (4, 2, 3, 8), "v": (4, 2, 3, 8)}
    tensors = {name: memory.tensor(G.dtype, shape) for name, shape in shapes.items()}
    return {**tensors, "cache_lengths": memory.index([0, 7, 2, 1])}


BAD = {
    "k on another device": Bad(
        'k: expected a tensor on {device}, where k_cache is, got a tensor on meta. Fix: k.to("{device}")',
        lambda a: {"k": a.k.to("meta")},
    ),
    "lengths on another device": Bad(
        'cache_lengths: expected a tensor on {device}, where k_cache is, got a tensor on meta. Fix: cache_lengths.to("{device}")',
        lambda a: {"cache_lengths": a.cache_lengths.to("meta")},
    ),
    "k of another dtype": Bad(
        "k: expected torch.bfloat16, the dtype of k_cache, got torch.float16; bits are never reinterpreted. Fix: "
        "k.to(torch.bfloat16), or create the cache in torch.float16",
        lambda a: {"k": a.k.half()},
        TYPE,
    ),
    "lengths of floats": Bad(
        "cache_lengths: expected one of torch.int32, torch.int64, got torch.float32. Fix: cache_lengths.to(torch.int64), "
        "if that keeps its meaning",
        lambda a: {"cache_lengths": a.cache_lengths.float()},
        TYPE,
    ),
    "a float length": Bad(
        "cache_lengths: expected an int or a torch.Tensor, got float 4.0. Fix: convert it with torch.as_tensor",
        lambda _: {"cache_lengths": 4.0},
        TYPE,
    ),
    "a bool length": Bad(
        "cache_lengths: expected an int or a torch.Tensor, got bool True. Fix: convert it with torch.as_tensor",
        lambda _: {"cache_lengths": True},
        TYPE,
    ),
    "no length": Bad(
        "cache_lengths: expected an int or a torch.Tensor, got NoneType None. Fix: convert it with torch.as_tensor",
        lambda _: {"cache_lengths": None},
        TYPE,
    ),
    "lengths as a list": Bad(
        "cache_lengths: expected an int or a torch.Tensor, got list [0, 7, 2, 1]. Fix: convert it with torch.as_tensor",
        lambda _: {"cache_lengths": [0, 7, 2, 1]},
        TYPE,
    ),
    "fewer lengths than rows": Bad(
        "cache_lengths: expected one length for all rows or one for each of the 4 rows of k, got shape [3]. Fix: pass a "
        "tensor of shape [] or [4]",
        lambda a: {"cache_lengths": a.cache_lengths[:3]},
    ),
    "a length for each row of the cache": Bad(
        "cache_lengths: expected one length for all rows or one for each of the 4 rows of k, got shape [6]. Fix: pass a "
        "tensor of shape [] or [4]",
        lambda a: {"cache_lengths": a.cache_lengths.repeat(2)[:6]},
    ),
    "no lengths at all": Bad(
        "cache_lengths: expected one length for all rows or one for each of the 4 rows of k, got shape [0]. Fix: pass a "
        "tensor of shape [] or [4]",
        lambda a: {"cache_lengths": a.cache_lengths[:0]},
    ),
    "lengths of rank 2": Bad(
        "cache_lengths: expected shape [] or [n], got shape [4, 1]. Fix: check the order of dimensions and of arguments",
        lambda a: {"cache_lengths": a.cache_lengths[:, None]},
    ),
    "more rows than allocated": Bad(
        "k: expected at most the 6 rows of k_cache, got shape [8, 2, 3, 8]. Fix: create the cache with a larger max_batch_size",
        lambda a: {"k": a.k.repeat(2, 1, 1, 1), "v": a.v.repeat(2, 1, 1, 1), "cache_lengths": 0},
    ),
    "more rows, and lengths for them": Bad(
        "k: expected at most the 6 rows of k_cache, got shape [8, 2, 3, 8]. Fix: create the cache with a larger max_batch_size",
        lambda a: {"k": a.k.repeat(2, 1, 1, 1), "v": a.v.repeat(2, 1, 1, 1), "cache_lengths": a.cache_lengths.repeat(2)},
    ),
    "v of fewer rows": Bad(
        "v: expected shape [b=4, Hv=2, s=3, Dv=8] to agree with k, v_cache, got shape [3, 2, 3, 8]. Fix: check the order "
        "of dimensions and of arguments",
        lambda a: {"v": a.v[:3]},
    ),
    "v of fewer positions": Bad(
        "v: expected shape [b=4, Hv=2, s=3, Dv=8] to agree with k, v_cache, got shape [4, 2, 2, 8]. Fix: check the order "
        "of dimensions and of arguments",
        lambda a: {"v": a.v[:, :, :2]},
    ),
    "v of fewer heads": Bad(
        "v: expected shape [b=4, Hv=2, s=3, Dv=8] to agree with k, v_cache, got shape [4, 1, 3, 8]. Fix: check the order "
        "of dimensions and of arguments",
        lambda a: {"v": a.v[:, :1]},
    ),
    "v_cache of another length": Bad(
        "v_cache: expected shape [B=6, Hv, S=10, Dv] to agree with k_cache, got shape [6, 2, 9, 8]. Fix: check the order "
        "of dimensions and of arguments",
        lambda a: {"v_cache": a.v_cache[:, :, :9]},
    ),
    "v_cache of fewer rows": Bad(
        "v_cache: expected shape [B=6, Hv, S=10, Dv] to agree with k_cache, got shape [5, 2, 10, 8]. Fix: check the "
        "order of dimensions and of arguments",
        lambda a: {"v_cache": a.v_cache[:5]},
    ),
    "k of a smaller dim": Bad(
        "k: expected shape [b, Hk=2, s, Dk=8] to agree with k_cache, got shape [4, 2, 3, 4]. Fix: check the order of "
        "dimensions and of arguments",
        lambda a: {"k": a.k[..., :4]},
    ),
    "k with positions before heads": Bad(
        "k: expected shape [b, Hk=2, s, Dk=8] to agree with k_cache, got shape [4, 3, 2, 8]. Fix: check the order of "
        "dimensions and of arguments",
        lambda a: {"k": a.k.transpose(1, 2)},
    ),
    "k of rank 3": Bad(
        "k: expected shape [b, Hk=2, s, Dk=8] to agree with k_cache, got shape [2, 3, 8]. Fix: check the order of "
        "dimensions and of arguments",
        lambda a: {"k": a.k[0]},
    ),
    "k with an inner stride": Bad(
        "k: expected an innermost stride of 1, got strides [96, 48, 16, 2] for shape [4, 2, 3, 8]. Fix: k.contiguous()",
        lambda a: {"k": a.k.repeat(1, 1, 1, 2)[..., ::2]},
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
        lambda a: {"k": a.k_cache[:4, :, :3]},
    ),
    "v within v_cache": Bad(
        "v: expected memory outside v_cache, which is written, got address * within v_cache from *. Fix: v.clone()",
        lambda a: {"v": a.v_cache[2:, :, 7:]},
    ),
    "lengths within k_cache": Bad(
        "cache_lengths: expected memory outside k_cache, which is written, got address * within k_cache from *. Fix: cache_lengths.clone()",
        lambda a: {"cache_lengths": a.k_cache.flatten()[:16].view(torch.int64)},
    ),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("target", SINGLE, indirect=True)
def test_static_update_refuses(target: Target, bad: Bad) -> None:
    check_refused(target, "static_update_", good, bad)
