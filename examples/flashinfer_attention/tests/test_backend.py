"""What people read: whether the backend is there, and which requests FlashInfer does not serve. Needs no FlashInfer and no GPU."""

import importlib.util
from typing import Any

import pytest
import torch

import kvdock
from kvdock.plugin import Priority, ProbeState, Request, TensorMeta
from kvdock_flashinfer.backend import FlashInferBackend
from kvdock_flashinfer.reasons import reasons

HAS_FLASHINFER = importlib.util.find_spec("flashinfer") is not None
DEVICE = torch.device("cuda", 0)


def test_kvdock_says_whether_it_is_there() -> None:
    """As `kvdock backends` and `kvdock explain` list it, on whatever machine this is."""
    candidates = kvdock.runtime.default().registry.candidates(torch.device("cuda", 0))
    (item,) = [item for item in candidates if item.name == "flashinfer"]
    if torch.version.cuda is None:
        assert item.reason == f"ABSENT: torch {torch.__version__} is built without CUDA"
    elif not torch.cuda.is_available():
        assert not item.claims
    elif not HAS_FLASHINFER:
        assert item.reason.startswith("UNUSABLE: ")
        assert "and FlashInfer is not installed. Fix: pip install flashinfer-python" in item.reason
    else:
        assert item.reason == f"claims cuda:0 with priority {int(Priority.SPECIALISED)}"


def test_the_host_is_not_its_device() -> None:
    found = kvdock.runtime.default().dispatcher.explain(
        "copy_blocks_", (torch.zeros(2, 2, 1, 1), torch.zeros(2, 2, 1, 1), torch.zeros(0, 2).int())
    )
    assert found.backend == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available() or HAS_FLASHINFER, reason="needs a GPU, and no FlashInfer")
def test_without_flashinfer_it_is_unusable_on_a_gpu() -> None:
    assert FlashInferBackend().probe().state is ProbeState.UNUSABLE


def pool(
    dim: int = 128, *, heads: int = 8, block: int = 16, blocks: int = 64, dtype: torch.dtype = torch.bfloat16, **other: Any
) -> TensorMeta:
    """Return a pool in NHD order, with other properties where they are given."""
    strides = (block * heads * dim, heads * dim, dim, 1)
    return TensorMeta(dtype, (blocks, block, heads, dim), other.get("strides", strides), other.get("alignment", 16))


def request(**other: Any) -> Request:
    """Return a request that FlashInfer serves, with other arguments where they are given."""
    dtype = other.pop("dtype", torch.bfloat16)
    new = TensorMeta(dtype, (None, 32, 128), None, 16)
    index = TensorMeta(torch.int32, (None,), None, 4)
    absent = dict.fromkeys(("cu_query_lens", "starts", "sinks", "k_scale", "v_scale", "scale", "window", "softcap", "lse"))
    tensors = {"q": new, "k_cache": pool(dtype=dtype), "v_cache": pool(dtype=dtype), "block_table": index, "seq_lens": index, "out": new}
    return Request("paged_attention", DEVICE, {**absent, **tensors, "max_query_len": 1, "causal": True, **other})


HND = (16 * 8 * 128, 128, 16 * 128, 1)
PAGE_FIRST = (32 * 16 * 8 * 128, 8 * 128, 128, 1)


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"dtype": torch.float16},
        {"k_cache": pool(strides=HND), "v_cache": pool(strides=HND)},
        {"k_cache": pool(strides=PAGE_FIRST), "v_cache": pool(strides=PAGE_FIRST)},
        {"k_cache": pool(64), "v_cache": pool(64)},
        {"k_cache": pool(block=5), "v_cache": pool(block=5)},
        {"window": 100, "softcap": 20.0, "scale": 0.3},
        {"causal": False},
        {"causal": False, "window": 100},
        {"cu_query_lens": TensorMeta(torch.int32, (None,), None, 4), "window": 100},
        {"out": TensorMeta(torch.bfloat16, (None, 32, 128), None, 2), "lse": TensorMeta(torch.float32, (None, 32), None, 4)},
    ],
    ids=["NHD", "float16", "HND", "page first", "64", "blocks of 5", "window and cap", "not causal", "one query", "queries", "odd output"],
)
def test_what_it_serves(other: dict[str, Any]) -> None:
    assert reasons(request(**other), (9, 0)) == []


LSE = TensorMeta(torch.float32, (None, 32), None, 4)
ODD = TensorMeta(torch.bfloat16, (None, 32, 128), None, 8)
MANY = TensorMeta(torch.int32, (None,), None, 4)
GAP = (16 * 8 * 128 + 64, 8 * 128, 128, 1)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"dtype": torch.float32}, "q: FlashInfer computes torch.float16 and torch.bfloat16, not torch.float32"),
        ({"k_cache": pool(96), "v_cache": pool(96)}, "compiled for 64, 128, 256 elements of keys and of values, not 96 and 96"),
        ({"k_cache": pool(256), "v_cache": pool(128)}, "not 256 and 128"),
        ({"lse": LSE, "softcap": 20.0}, "lse: FlashInfer approximates the tanh of a soft cap"),
        ({"sinks": TensorMeta(torch.float32, (32,), (1,), 4)}, "sinks: FlashInfer's wrappers take none"),
        ({"starts": MANY}, "starts: FlashInfer's wrappers take none"),
        ({"causal": False, "window": 100, "cu_query_lens": MANY}, "without causal there are keys behind it"),
        ({"v_cache": pool(strides=HND)}, "v_cache: FlashInfer reads keys and values at the same steps"),
        ({"q": ODD}, "q: FlashInfer reads 16 bytes at a time, and rows begin at multiples of 8"),
        ({"k_cache": pool(alignment=2)}, "k_cache: FlashInfer reads 16 bytes at a time, and rows begin at multiples of 2"),
        ({"k_cache": pool(block=1), "v_cache": pool(block=1)}, "blocks of several tokens"),
        ({"k_cache": pool(strides=GAP), "v_cache": pool(strides=GAP)}, "whole tokens apart"),
        ({"k_cache": pool(blocks=2**27), "v_cache": pool(blocks=2**27)}, "counts tokens in 32 bits"),
    ],
)
def test_what_it_does_not_serve_and_why(other: dict[str, Any], reason: str) -> None:
    assert [reason in text for text in reasons(request(**other), (9, 0))].count(True) == 1


def test_old_gpus() -> None:
    assert reasons(request(), (7, 5)) == ["FlashInfer's tensor-core kernels need compute capability 8.0, not 7.5"]


def test_sums_are_exact_on_hopper_only() -> None:
    assert reasons(request(lse=LSE), (9, 0)) == []
    for capability in ((8, 0), (10, 0)):
        (reason,) = reasons(request(lse=LSE), capability)
        assert reason.endswith("sum weights that were rounded to 16 bits")
        assert reasons(request(), capability) == []
