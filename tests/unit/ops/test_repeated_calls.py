"""A call that repeats the last one may be launched with fewer checks; nothing that differs from it may slip through.

Each test repeats a good call until whatever may be remembered is, then makes one that differs in one thing, and then the
good one again.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import threading
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

import kvdock
from kvdock.ops import guards
from opskit import SINGLE, Geometry, Memory, Target, bits_of, check, counting_runtime
from opskit.targets import forget_runtimes

G = Geometry(dtype=torch.float32)
REPEATS = 4
SIDE_BY_SIDE = "halves [2, NB, ...]"
"""Pools with no token between them: then a repeated call needs the fewest checks, wherever memory happens to lie."""

pytestmark = pytest.mark.parametrize("target", SINGLE, indirect=True)


@pytest.fixture(autouse=True, params=["torch's guards", "guards in Python"])
def cold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each test with runtimes of its own: what earlier tests repeated, or did not, must not matter.

    With torch's guards, and as where torch has none that can be trusted.
    """
    if request.param == "guards in Python":
        monkeypatch.setattr(guards, "_maker", lambda: guards.guard_in_python)
    forget_runtimes()


@attrs.define
class Call:
    """Arguments of `paged_caching_` in a memory, with room to change each."""

    memory: Memory
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def of(cls, target: Target, slots: list[int] | None = None) -> Call:
        memory = Memory(target.device)
        mapping = memory.index([5, 0, -1, 23, 9] if slots is None else slots)
        return cls(memory, *G.pools(memory, SIDE_BY_SIDE), *G.tokens(memory, [len(mapping)]), mapping)

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        return self.k_cache, self.v_cache, self.k, self.v, self.slots

    def check(self, target: Target) -> None:
        check(target, self.memory, "paged_caching_", *self.args)


def tensor(call: Call, like: torch.Tensor, **layout: Any) -> torch.Tensor:
    """Return a tensor shaped like another, elsewhere in memory, in its dtype unless told otherwise."""
    return call.memory.tensor(layout.pop("dtype", like.dtype), like.shape, **layout)


GOOD: dict[str, Callable[[Call], dict[str, Any]]] = {
    "other addresses": lambda c: {"k": tensor(c, c.k), "v": tensor(c, c.v)},
    "other slots": lambda c: {"slots": c.memory.index([1, 2, 3, 4, -7])},
    "all padding": lambda c: {"slots": c.memory.index([-1] * 5)},
    "slots beyond the pool": lambda c: {"slots": c.memory.index([1, 2, 24, 4, 99])},
    "k 4 bytes further": lambda c: {"k": tensor(c, c.k, offset=4)},
    "v 8 bytes further": lambda c: {"v": tensor(c, c.v, offset=8)},
    "slots 8 bytes further": lambda c: {"slots": c.memory.index([9, 1, 2, 3, 4, 5])[1:]},
    "pools 8 bytes further": lambda c: {"k_cache": tensor(c, c.k_cache, offset=8), "v_cache": tensor(c, c.v_cache, offset=8)},
    "another pool": lambda c: {"k_cache": tensor(c, c.k_cache), "v_cache": tensor(c, c.v_cache)},
    "pools changed over": lambda c: {"k_cache": c.v_cache, "v_cache": c.k_cache},
    "a pool in another order": lambda c: {"k_cache": tensor(c, c.k_cache, order=(0, 2, 1, 3))},
    "wider rows": lambda c: {"k": tensor(c, c.k, gaps=(0, 4, 0))},
    "heads before tokens": lambda c: {"k": tensor(c, c.k, order=(1, 0, 2))},
    "one token for all": lambda c: {"k": c.k[:1].expand(5, 2, 8)},
    "fewer tokens": lambda c: {"k": c.k[:3], "v": c.v[:3], "slots": c.slots[:3]},
    "one token": lambda c: {"k": c.k[:1], "v": c.v[:1], "slots": c.slots[:1]},
    "no tokens": lambda c: {"k": c.k[:0], "v": c.v[:0], "slots": c.slots[:0]},
    "a batch": lambda c: {"k": c.k[None], "v": c.v[None], "slots": c.slots[None]},
    "int32 slots": lambda c: {"slots": c.memory.index([3, 1, 4, -1, 5], torch.int32)},
    "strided slots": lambda c: {"slots": c.memory.index([3, 1, 4, -1, 5], step=2)},
    "one tensor for k and v": lambda c: {"v": c.k},
}


@pytest.mark.parametrize("change", GOOD.values(), ids=GOOD)
def test_what_differs_is_seen(target: Target, change: Callable[[Call], dict[str, Any]]) -> None:
    call = Call.of(target)
    other = attrs.evolve(call, **change(call))
    for _ in range(2):
        for one in (call, other):
            for _ in range(REPEATS):
                one.check(target)
    for one in (other, call) * 3:
        one.check(target)


WRONG: dict[str, Callable[[Call], dict[str, Any]]] = {
    "k within k_cache": lambda c: {"k": c.k_cache.view(-1, 2, 8)[3:8]},
    "v within k_cache": lambda c: {"v": c.k_cache.view(-1, 2, 8)[3:8]},
    "k over the last row": lambda c: {"k": c.k_cache.view(-1)[-16:].as_strided((5, 2, 8), (16, 8, 1))},
    "one cache for both": lambda c: {"v_cache": c.k_cache},
    "one cache for both, as two views": lambda c: {"v_cache": c.k_cache.view(c.k_cache.shape)},
    "slots within v_cache": lambda c: {"slots": c.v_cache.view(-1)[:10].view(torch.int64)},
    "k of another dtype": lambda c: {"k": tensor(c, c.k, dtype=torch.int32)},
    "k of another dtype of floats": lambda c: {"k": c.k.half()},
    "k on another device": lambda c: {"k": c.k.to("meta")},
    "no k": lambda c: {"k": None},
    "a list of slots": lambda c: {"slots": [1, 2, 3, 4, 5]},
    "fewer slots": lambda c: {"slots": c.slots[:4]},
    "fewer values": lambda c: {"v": c.v[:4]},
    "another head": lambda c: {"k": tensor(c, c.k[:, :1])},
    "an inner stride": lambda c: {"k": c.k.repeat(1, 1, 2)[..., ::2]},
    "a pool of fewer blocks": lambda c: {"v_cache": c.v_cache[:5]},
    "a pool that overlaps itself": lambda c: {"v_cache": c.v_cache[:1].expand(6, 4, 2, 8)},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_refused(target: Target, change: Callable[[Call], dict[str, Any]]) -> None:
    call = Call.of(target)
    wrong = attrs.evolve(call, **change(call))
    for _ in range(2):
        for _ in range(REPEATS):
            call.check(target)
        before = call.memory.copy()
        for _ in range(REPEATS):
            with pytest.raises((kvdock.ArgumentTypeError, kvdock.ArgumentValueError), match=r"^paged_caching_: "):
                kvdock.ops.paged_caching_(*wrong.args)
        before.assert_same("raised")


def between(target: Target, gap: int, k_from: int, v_from: int) -> Call:
    """Return a call whose tokens lie between its pools, which are so many bytes apart, and start so many behind the first."""
    call, size = Call.of(target), math.prod(G.k_shape)
    flat = call.memory.tensor(torch.float32, (2 * size + gap // 4,))
    pools = [flat[at : at + size].view(G.k_shape) for at in (0, size + gap // 4)]
    k, v = (flat[size + at // 4 :][: 5 * 16].view(5, 2, 8) for at in (k_from, v_from))
    return attrs.evolve(call, k_cache=pools[0], v_cache=pools[1], k=k, v=v)


def test_tokens_between_the_pools(target: Target) -> None:
    """They may touch both, and overlap neither by as little as an aligned address allows."""
    size = 5 * 16 * 4
    good = between(target, 2 * size, 0, size)
    wrong = [between(target, 2 * size, -16, size), between(target, 2 * size, 0, size + 16), between(target, size, 0, 16)]
    for _ in range(2):
        for _ in range(REPEATS):
            good.check(target)
        for one in wrong:
            before = one.memory.copy()
            for _ in range(REPEATS):
                with pytest.raises(kvdock.ArgumentValueError, match=r"^paged_caching_: [kv]: expected memory outside"):
                    kvdock.ops.paged_caching_(*one.args)
            before.assert_same("raised")
            good.check(target)


def test_a_scale_is_refused(target: Target) -> None:
    call = Call.of(target)
    for _ in range(REPEATS):
        call.check(target)
        for _ in range(2):
            with pytest.raises(kvdock.ArgumentValueError, match="paged_caching_: k_scale: expected None"):
                kvdock.ops.paged_caching_(*call.args, k_scale=torch.ones((), device=target.device))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad, contextlib.nullcontext])
def test_gradients_and_modes(target: Target, mode: Callable[[], Any]) -> None:
    call = Call.of(target)
    plain = torch.zeros(2, *G.k_shape, device=target.device).unbind()
    for wants in (False, True, False, True):
        k = call.k.clone().nan_to_num().requires_grad_(wants)
        for _ in range(REPEATS):
            with mode():
                kvdock.ops.paged_caching_(*plain, k, k, call.slots)
            assert not any(pool.requires_grad or pool.grad_fn for pool in plain)
            assert torch.equal(plain[0][1, 1], k[0].detach())


def test_the_same_address_with_another_meaning(target: Target) -> None:
    """Memory that was given back and taken again: pools of other sizes where the last one lay."""
    flat = Memory(target.device).tensor(torch.float32, (2, 6 * 4 * 2 * 8))
    tokens, slots = torch.randn(5, 2, 8, device=target.device), torch.arange(5, device=target.device)
    for shape in ((6, 4, 2, 8), (3, 8, 2, 8), (12, 2, 2, 8), (6, 4, 2, 8)):
        k_cache, v_cache = (half.view(shape) for half in flat)
        for _ in range(REPEATS):
            k_cache.zero_()
            kvdock.ops.paged_caching_(k_cache, v_cache, tokens, tokens, slots)
            assert torch.equal(k_cache.flatten(0, 1)[:5], tokens)
            assert not k_cache.flatten(0, 1)[5:].any()


def test_a_thread_does_not_take_another_ones_call_for_its_own(target: Target) -> None:
    calls = [Call.of(target) for _ in range(3)]
    errors: list[BaseException] = []

    def work(call: Call) -> None:
        try:
            for _ in range(3 * REPEATS):
                kvdock.ops.paged_caching_(*call.args)
                assert torch.equal(bits_of(call.k_cache[1, 1]), bits_of(call.k[0]))
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
            errors.append(error)

    for call in calls:
        for _ in range(REPEATS):
            call.check(target)
        call.k_cache.zero_()
    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@pytest.mark.parametrize("change", GOOD.values(), ids=GOOD)
def test_a_plan_is_run_on_its_own_kind_of_tensors_only(target: Target, change: Callable[[Call], dict[str, Any]]) -> None:
    """Held by the descriptors of `counting_runtime`: each compares what it is called with to what it was prepared for."""
    call = Call.of(target, [5, 0, -1, 23, 9])
    other = attrs.evolve(call, **change(call))
    runtime, _ = counting_runtime(target.device, target.kernels)
    for one in (call, other) * 2:
        for _ in range(REPEATS):
            run(runtime, one)


def run(runtime: kvdock.Runtime, call: Call) -> None:
    """Run a call outside of any mode; slots beyond the pool may raise."""
    with contextlib.suppress(kvdock.IndexRangeError):
        contextvars.Context().run(runtime.dispatcher.op("paged_caching_").call, *call.args, None, None)


OTHER_OPS = ["gather_paged", "copy_blocks_", "static_update_"]


@pytest.mark.parametrize("op", OTHER_OPS)
def test_other_ops_repeat_and_change_too(target: Target, op: str) -> None:
    memory = Memory(target.device)
    pools, static = G.pools(memory, SIDE_BY_SIDE), [memory.tensor(G.dtype, (4, 2, size, 8)) for size in (10, 10, 3, 3)]
    calls: list[tuple[Any, ...]] = {
        "gather_paged": [
            (*pools, memory.index([1, -1, 3]), *G.tokens(memory, [3])),
            (*pools, memory.index([1, 24, 3]), *G.tokens(memory, [3])),
            (*pools, memory.index([5, 6, 7]), *G.tokens(memory, [3], "odd address")),
            (pools[1], pools[0], memory.index([5, 6, 7]), *G.tokens(memory, [3], "[B, H, q, D]")),
        ],
        "copy_blocks_": [
            (*pools, memory.index([[0, 1], [2, 3]])),
            (*pools, memory.index([[4, 0], [-1, 3]])),
            (*pools, memory.index([[4, 0], [6, 3]])),
            (pools[1], pools[0], memory.index([[1, 5], [2, 4]])),
        ],
        "static_update_": [(*static, 4), (*static, 8), (*static, memory.index([0, 7, 8, 2])), (*static, memory.index([3])), (*static, 0)],
    }[op]
    for _ in range(2):
        for args in calls:
            for _ in range(REPEATS):
                check(target, memory, op, *args)
    for args in calls * 3:
        check(target, memory, op, *args)
