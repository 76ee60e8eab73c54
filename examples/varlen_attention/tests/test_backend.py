"""What people read: whether the backend is there, and which requests `varlen_attn` does not serve. Runs without a GPU."""

import inspect
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

import kvdock
from kvdock.plugin import Priority, Request, TensorMeta
from kvdock_varlen.implementation import lacking
from kvdock_varlen.reasons import reasons

HAS_BLOCKS = "block_table" in inspect.signature(varlen.varlen_attn).parameters


def test_kvdock_says_whether_it_is_there() -> None:
    """As `kvdock backends` and `kvdock explain` list it, on whatever machine this is."""
    candidates = kvdock.runtime.default().registry.candidates(torch.device("cuda", 0))
    (item,) = [item for item in candidates if item.name == "varlen"]
    if torch.version.cuda is None:
        assert item.reason == f"ABSENT: torch {torch.__version__} is built without CUDA"
    elif not torch.cuda.is_available():
        assert not item.claims
    elif lacking():
        assert item.reason.startswith("UNUSABLE: ")
        assert item.reason.endswith(lacking())
    else:
        assert item.reason == f"claims cuda:0 with priority {int(Priority.SPECIALISED)}"


def test_the_host_is_not_its_device() -> None:
    args = (torch.zeros(2, 2, 1, 1), torch.zeros(2, 2, 1, 1), torch.zeros(0, 2).int())
    assert kvdock.runtime.default().dispatcher.explain("copy_blocks_", args).backend == "cpu"


@pytest.mark.skipif(HAS_BLOCKS, reason="torch 2.13 and newer take a block table")
def test_a_torch_without_block_tables() -> None:
    assert "takes no block table. Fix: install torch 2.13 or newer" in lacking()


@pytest.mark.skipif(not HAS_BLOCKS, reason="needs torch 2.13")
def test_torchs_own_flash_attention_reads_no_blocks() -> None:
    assert torch.nn.attention.current_flash_attention_impl() is None
    assert lacking().startswith("torch's own flash attention (FA2) reads no blocks, FA3 and FA4 do. Fix: ")


def pool(dim: int = 128, *, block: int = 16, dtype: torch.dtype = torch.bfloat16, **other: Any) -> TensorMeta:
    """Return a pool in NHD order, with other properties where they are given."""
    strides = (block * 8 * dim, 8 * dim, dim, 1)
    return TensorMeta(dtype, (64, block, 8, dim), other.get("strides", strides), other.get("alignment", 16))


def request(**other: Any) -> Request:
    """Return a request that `varlen_attn` serves, with other arguments where they are given."""
    dtype = other.pop("dtype", torch.bfloat16)
    new, index = TensorMeta(dtype, (None, 32, 128), None, 16), TensorMeta(torch.int32, (None,), None, 4)
    absent = dict.fromkeys(("cu_query_lens", "starts", "sinks", "k_scale", "v_scale", "scale", "window", "softcap", "lse"))
    tensors = {"q": new, "k_cache": pool(dtype=dtype), "v_cache": pool(dtype=dtype), "block_table": index, "seq_lens": index, "out": new}
    return Request("paged_attention", torch.device("cuda", 0), {**absent, **tensors, "max_query_len": 1, "causal": True, **other})


HND = (16 * 8 * 128, 128, 16 * 128, 1)
PAGE_FIRST = (32 * 16 * 8 * 128, 8 * 128, 128, 1)


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"dtype": torch.float16},
        {"k_cache": pool(strides=HND), "v_cache": pool(strides=HND)},
        {"k_cache": pool(strides=PAGE_FIRST), "v_cache": pool(strides=HND)},
        {"k_cache": pool(96), "v_cache": pool(96)},
        {"k_cache": pool(block=5), "v_cache": pool(block=5)},
        {"window": 100, "scale": 0.3, "causal": False},
    ],
    ids=["NHD", "float16", "HND", "page first", "96", "blocks of 5", "window, not causal"],
)
def test_what_it_serves(other: dict[str, Any]) -> None:
    assert reasons(request(**other), (9, 0), "FA3") == []
    assert reasons(request(**other), (10, 0), "FA4") == []


INDEX = TensorMeta(torch.int32, (None,), None, 4)
ODD = TensorMeta(torch.bfloat16, (None, 32, 128), None, 8)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"dtype": torch.float32}, "q: varlen_attn computes torch.float16 and torch.bfloat16, not torch.float32"),
        ({"k_cache": pool(100), "v_cache": pool(100)}, "a multiple of 8 elements up to 256 of keys and as many of values, not 100 and 100"),
        ({"k_cache": pool(256), "v_cache": pool(128)}, "not 256 and 128"),
        ({"k_cache": pool(264), "v_cache": pool(264)}, "not 264 and 264"),
        ({"sinks": TensorMeta(torch.float32, (32,), (1,), 4)}, "sinks: varlen_attn takes none"),
        ({"starts": INDEX}, "starts: varlen_attn takes none"),
        ({"softcap": 20.0}, "softcap: varlen_attn takes none"),
        ({"k_cache": pool(block=64), "v_cache": pool(block=64)}, "of blocks of more than 63 tokens, here 64"),
        (
            {"q": TensorMeta(torch.bfloat16, (None, 32, 128), None, 8)},
            "q: its kernels take 16 bytes at a time, and rows begin at multiples of 8",
        ),
        ({"out": ODD}, "out: its kernels take 16 bytes at a time, and rows begin at multiples of 8"),
        ({"v_cache": pool(alignment=2)}, "v_cache: its kernels take 16 bytes at a time, and rows begin at multiples of 2"),
    ],
)
def test_what_it_does_not_serve_and_why(other: dict[str, Any], reason: str) -> None:
    assert [reason in text for text in reasons(request(**other), (9, 0), "FA3")].count(True) == 1


@pytest.mark.parametrize(
    ("active", "capability", "reason"),
    [
        (None, (9, 0), "FA2 reads blocks on no GPU, not on 9.0"),
        ("FA3", (8, 0), "FA3 reads blocks on GPUs of compute capability 9.x, not on 8.0"),
        ("FA4", (9, 0), "FA4 reads blocks on GPUs of compute capability 10.x, not on 9.0"),
    ],
)
def test_which_flash_attention_reads_blocks_where(active: str | None, capability: tuple[int, int], reason: str) -> None:
    assert reasons(request(), capability, active) == [reason]


@pytest.mark.skipif(not HAS_BLOCKS, reason="needs torch 2.13")
@pytest.mark.parametrize(
    ("causal", "window", "expected"),
    [(True, None, (-1, 0)), (False, None, (-1, -1)), (True, 5, (4, 0)), (False, 5, (4, -1)), (True, 1, (0, 0))],
)
def test_windows_count_the_querys_own_key(causal: bool, window: int | None, expected: tuple[int, int]) -> None:
    from kvdock_varlen.paged_attention import window_size

    assert window_size(causal, window) == expected
