"""`paged_attention` on the host whatever a user has set: a default device, a default dtype, lower precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import kvdock
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock.ops.validate import validate
from opskit.targets import HAS_CPU_BACKEND


@contextlib.contextmanager
def another_default_dtype() -> Any:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a default device": lambda: torch.device("meta"),
    "a default dtype": another_default_dtype,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}
BACKENDS = ["portable", *(["cpu"] if HAS_CPU_BACKEND else [])]


def arguments(counts: list[int] | None) -> dict[str, Any]:
    """Return a batch of two sequences in float32, of 21 and 7 tokens in blocks of 4."""
    made = torch.Generator().manual_seed(1)
    k_cache, v_cache = torch.randn(2, 9, 4, 2, 16, generator=made)
    table = torch.tensor([[3, 0, 8, 1, 5, 2], [7, 4, -1, -1, -1, -1]], dtype=torch.int32)
    queries = {} if counts is None else {"cu_query_lens": torch.tensor([0, counts[0], sum(counts)]), "max_query_len": max(counts)}
    q = torch.randn(2 if counts is None else sum(counts), 4, 16, generator=made)
    return {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": table, "seq_lens": torch.tensor([21, 7]), **queries}


@pytest.mark.parametrize("options", [{}, {"window": 5, "softcap": 2.0}], ids=["plain", "window and cap"])
@pytest.mark.parametrize("counts", [None, [5, 2]], ids=["decode", "prefill"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_what_they_are_without(backend: str, setting: str, counts: list[int] | None, options: dict[str, Any]) -> None:
    args = arguments(counts) | options
    with kvdock.use_backend(backend):
        wanted = kvdock.ops.paged_attention(**args, return_lse=True)
        out = torch.empty_like(args["q"])
        with SETTINGS[setting]():
            lse = kvdock.ops.paged_attention(**args, out=out, return_lse=True)[1]
    torch.testing.assert_close((out, lse), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_without_blocks_sees_nothing(backend: str, setting: str) -> None:
    args = arguments(None)
    args |= {"block_table": torch.zeros(2, 0, dtype=torch.int32), "seq_lens": torch.zeros(2, dtype=torch.int64)}
    out = torch.ones_like(args["q"])
    with kvdock.use_backend(backend), SETTINGS[setting]():
        lse = kvdock.ops.paged_attention(**args, out=out, return_lse=True)[1]
    assert not out.any()
    assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_portable_plan_says_what_it_takes(dtype: torch.dtype) -> None:
    args = {name: value.to(dtype) if value.is_floating_point() else value for name, value in arguments(None).items()}
    schema = kvdock.runtime.default().dispatcher.op("paged_attention").schema
    values = {**args, "max_query_len": 1, "causal": True, "out": torch.empty_like(args["q"])}
    request = validate(schema, tuple(values.get(name) for name in schema.arg_names))
    plan = PORTABLE_KERNELS["paged_attention"].prepare(request)
    assert plan.workspace_bytes == {torch.bfloat16: 192 << 20, torch.float64: 384 << 20}[dtype]
