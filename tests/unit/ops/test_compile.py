"""`torch.compile` comes later: until then a traced call says so, whatever the backend, and writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kvdock
from opskit import Geometry, Memory, active, runtime_of
from support_plugins import InProcessBackend

G = Geometry()


def calls(memory: Memory) -> dict[str, Callable[[torch.Tensor], Any]]:
    """Return a call of each op in which something was computed by what is compiled."""
    pools, (k, v), slots = G.pools(memory), G.tokens(memory, [3]), memory.index([1, 2, 3])
    static = [memory.tensor(G.dtype, (2, 2, size, 8)) for size in (9, 9, 3, 3)]
    return {
        "paged_caching_": lambda x: kvdock.ops.paged_caching_(*pools, k * x, v, slots),
        "gather_paged": lambda x: kvdock.ops.gather_paged(*pools, slots * x.int()),
        "static_update_": lambda x: kvdock.ops.static_update_(*static[:2], static[2] * x, static[3], 4),
        "copy_blocks_": lambda x: kvdock.ops.copy_blocks_(*pools, [(0, 1)]),
    }


OPS = list(calls(Memory()))


@pytest.fixture(autouse=True)
def on_portable_kernels() -> Iterator[None]:
    with active(runtime_of(InProcessBackend("plain", claims=("cpu",), devices=("cpu",)))):
        yield


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_traced_call_says_that_it_cannot_be(op: str, fullgraph: bool) -> None:
    """With ``fullgraph=True`` Dynamo wraps the message; without it, the op's own error arrives."""
    memory = Memory()
    call, one = calls(memory)[op], torch.ones((), dtype=G.dtype)
    if fullgraph:
        call(one)  # also when there is a plan
    before = memory.copy()
    torch._dynamo.reset()

    def model(x: torch.Tensor) -> torch.Tensor:
        call(x)
        return x + 1

    compiled = torch.compile(model, fullgraph=fullgraph, backend="eager")
    advice = r"Fix: call it outside the compiled function; support comes later"
    with pytest.raises(RuntimeError) as caught:  # torch's error, and NotImplementedError, are RuntimeErrors
        compiled(one)
    if fullgraph:
        assert isinstance(caught.value, torch._dynamo.exc.Unsupported)
        assert f"kvdock: {op} cannot be traced. {advice}" in str(caught.value)
    else:
        assert isinstance(caught.value, kvdock.UnsupportedError)
        assert str(caught.value) == f"{op} under torch.compile: got a call that is being traced. {advice}"
    before.assert_same("raised")


def test_calls_beside_what_is_compiled_work() -> None:
    memory = Memory()
    double = torch.compile(lambda x: x * 2, fullgraph=True, backend="eager")
    for op, call in calls(memory).items():
        call(double(torch.ones((), dtype=G.dtype)))
        after = memory.copy()
        call(torch.full((), 2, dtype=G.dtype))
        after.assert_same(f"{op} again")
