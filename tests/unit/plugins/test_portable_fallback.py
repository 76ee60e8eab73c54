"""An op that the backend lacks is served by portable kernels on its device; a kernel that raised is never retried elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import kvdock
from kvdock.plugins.registry import Registry
from kvdock.runtime import Runtime
from support_plugins import QUIET, CallKernel, InProcessBackend, plugin

OP = "copy_blocks_"


def runtime(kernels: dict[str, kvdock.plugin.Kernel] | None = None) -> Runtime:
    registry = Registry(QUIET)
    registry.register(plugin(InProcessBackend("acme", claims=("cpu",), devices=("cpu",), kernels=kernels)), "acme")
    return Runtime(registry)


def arguments() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two pools of three blocks, and the order to copy block 0 to block 2."""
    k = torch.arange(3 * 2 * 1 * 4, dtype=torch.float32).reshape(3, 2, 1, 4)
    return k, k + 100, torch.tensor([[0, 2]])


class Unwilling(kvdock.plugin.Kernel):
    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        return ["only heads of 64 elements", "only even numbers of blocks"]

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        raise AssertionError("never asked")


@pytest.mark.parametrize(
    ("kernels", "reasons"),
    [({}, ["it has no kernel for this op"]), ({OP: Unwilling()}, ["only heads of 64 elements", "only even numbers of blocks"])],
)
def test_op_that_the_backend_lacks_is_served_counted_and_reported(kernels: dict[str, kvdock.plugin.Kernel], reasons: list[str]) -> None:
    mine = runtime(kernels)
    k, v, pairs = arguments()
    explanation = mine.dispatcher.explain(OP, (k, v, pairs))
    assert (explanation.backend, explanation.served_by) == ("acme", "portable")
    assert [(name, list(why)) for name, why in explanation.rejected] == [("acme", reasons)]
    assert mine.dispatcher.fallbacks == {}, "explaining counts nothing"
    mine.dispatcher.op(OP)(k, v, pairs)
    assert torch.equal(k[2], k[0])
    assert torch.equal(v[2], v[0])
    assert mine.dispatcher.fallbacks == {(OP, "acme"): 1}


def test_kernel_that_raises_in_the_middle_of_a_mutating_call_is_never_retried_elsewhere() -> None:
    calls: list[str] = []

    def half(k: torch.Tensor, v: torch.Tensor, pairs: torch.Tensor) -> None:
        calls.append("acme")
        k[2] = k[0]
        raise OSError("card lost")

    mine = runtime({OP: CallKernel(half)})
    k, v, pairs = arguments()
    before = v.clone()
    for _ in range(2):
        with pytest.raises(OSError, match="card lost"):
            mine.dispatcher.op(OP)(k, v, pairs)
    assert calls == ["acme", "acme"]
    assert torch.equal(v, before), "nobody else went on with it"
    assert mine.dispatcher.fallbacks == {}


def test_registered_kernel_replaces_a_prepared_plan_and_shows_in_explain() -> None:
    calls: list[str] = []
    mine = runtime({OP: CallKernel(lambda *args: calls.append("old"))})
    call = mine.dispatcher.op(OP)
    call(*arguments())
    mine.registry.register_kernel("acme", OP, CallKernel(lambda *args: calls.append("new")), override=True)
    call(*arguments())
    assert calls == ["old", "new"]
    explanation = mine.dispatcher.explain(OP, arguments())
    assert (explanation.served_by, explanation.kernel.rsplit(".", 1)[-1]) == ("acme", "CallKernel")
    assert "its own kernel for 'copy_blocks_' was overridden by a registered one" in explanation.backend_reason
