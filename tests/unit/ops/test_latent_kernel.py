"""`LatentKernel`: what a kernel for keys and values is asked and handed in place of a call on latents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch

import kvdock
from kvdock.ops.catalog import CATALOG
from kvdock.ops.validate import validate
from kvdock.plugin import Descriptor, Kernel, LatentKernel, Request, TensorMeta
from opskit import active, runtime_of
from support_plugins import InProcessBackend

PAIR = {"mla_caching_": "paged_caching_", "mla_gather": "gather_paged"}


class Noted(Descriptor):
    """Notes its calls; what settles one notes addresses."""

    uses_autograd = False
    notes_capture = True

    def __init__(self, kernel: Noting) -> None:
        self.kernel = kernel
        self.workspace_bytes = 7

    def __call__(self, *args: Any) -> None:
        self.kernel.calls.append(args)
        self.workspace_bytes = 9

    def fix(self, *args: Any) -> Callable[..., None] | None:
        self.kernel.settled.append(args)
        return (lambda *addresses: self.kernel.launches.append(addresses)) if self.kernel.fixes else None

    def destroy(self) -> None:
        self.kernel.destroyed += 1


@attrs.define(eq=False)
class Noting(Kernel):
    """A kernel for keys and values that does nothing."""

    fixes: bool = True
    reasons: Sequence[str] = ()
    requests: list[Request] = attrs.field(factory=list)
    calls: list[tuple[Any, ...]] = attrs.field(factory=list)
    settled: list[tuple[Any, ...]] = attrs.field(factory=list)
    launches: list[tuple[int, ...]] = attrs.field(factory=list)
    destroyed: int = 0

    def supports(self, request: Request) -> Sequence[str]:
        self.requests.append(request)
        return self.reasons

    def prepare(self, request: Request) -> Descriptor:
        self.requests.append(request)
        return Noted(self)


def arguments(
    op: str, rank: int = 16, rope: int = 4, *, dtype: torch.dtype = torch.bfloat16, lead: Sequence[int] = (3,)
) -> tuple[Any, ...]:
    """Return the arguments of a call, in its schema's order."""
    pool, slots = torch.zeros(5, 4, 1, rank + rope, dtype=dtype), torch.arange(3).expand(*lead).contiguous()
    rows = torch.zeros(*lead, rank, dtype=dtype), torch.zeros(*lead, rope, dtype=dtype)
    return (pool, *rows, slots, None) if op == "mla_caching_" else (pool, slots, None, *rows)


def requested(op: str, values: tuple[Any, ...]) -> Request:
    """Return what the kernel for keys and values is asked to prepare."""
    pair = Noting()
    LatentKernel(pair).prepare(validate(CATALOG[op], values))
    return pair.requests[0]


@pytest.mark.parametrize("op", PAIR)
@pytest.mark.parametrize("lead", [(3,), (2, 3)], ids=str)
def test_a_request_is_one_of_keys_and_values_of_one_head(op: str, lead: Sequence[int]) -> None:
    request = requested(op, arguments(op, lead=lead))
    assert request.op == op, "errors name what was called"
    assert tuple(request.args) == CATALOG[PAIR[op]].arg_names, "in the order in which a descriptor takes them"
    for part, dim in (("k", 16), ("v", 4)):
        pool = request.tensor(f"{part}_cache")
        assert (pool.shape, pool.strides) == ((5, 4, 1, dim), (80, 20, 0, 1))
        rows = request.tensor(part if op == "mla_caching_" else f"{part}_out")
        assert (rows.shape, rows.strides) == ((*[None] * len(lead), 1, dim), None)
    assert request.args["k_scale"] is None is request.args["v_scale"]


@pytest.mark.parametrize("op", PAIR)
@pytest.mark.parametrize(
    ("rank", "rope", "dtype", "alignments"),
    [
        (512, 64, torch.bfloat16, (16, 16)),
        (20, 4, torch.bfloat16, (16, 8)),
        (6, 2, torch.bfloat16, (16, 4)),
        (5, 3, torch.bfloat16, (16, 2)),
        (5, 3, torch.uint8, (16, 1)),
        (1, 1, torch.float64, (16, 8)),
    ],
)
def test_the_second_part_is_as_aligned_as_the_first_is_long(
    op: str, rank: int, rope: int, dtype: torch.dtype, alignments: tuple[int, int]
) -> None:
    pool, *others = arguments(op, rank, rope, dtype=dtype)
    store = torch.zeros(pool.numel() + 16, dtype=dtype)
    at = next(number for number in range(16) if store[number:].data_ptr() % 16 == 0)
    aligned = store[at : at + pool.numel()].view(pool.shape)
    request = requested(op, (aligned, *others))
    found = tuple(request.tensor(name).alignment for name in ("k_cache", "v_cache"))
    assert found == alignments
    for name, part in (("k_cache", aligned[..., :rank]), ("v_cache", aligned[..., rank:])):
        assert part.data_ptr() % request.tensor(name).alignment == 0
        assert request.tensor(name).shape == tuple(part.shape)


def test_a_pool_with_gaps_keeps_its_steps() -> None:
    pool = torch.zeros(5, 4, 3, 24)[:, :, 1:2, :20]
    request = requested("mla_caching_", (pool, torch.zeros(3, 16), torch.zeros(3, 4), torch.arange(3), None))
    assert {request.tensor(name).strides for name in ("k_cache", "v_cache")} == {(288, 72, 0, 1)}


def test_reasons_are_those_of_the_kernel_for_keys_and_values() -> None:
    pair = Noting(reasons=("no latents today",))
    request = validate(CATALOG["mla_caching_"], arguments("mla_caching_"))
    assert LatentKernel(pair).supports(request) == ("no latents today",)
    assert isinstance(pair.requests[0].args["k"], TensorMeta)
    assert request.args.keys() == {*CATALOG["mla_caching_"].arg_names}, "the request is as it was"


@pytest.mark.parametrize("op", PAIR)
def test_a_call_gets_views_of_what_was_given(op: str) -> None:
    pair, values = Noting(), arguments(op)
    plan = LatentKernel(pair).prepare(validate(CATALOG[op], values))
    assert (plan.uses_autograd, plan.notes_capture, plan.workspace_bytes, plan.pinned) == (False, True, 7, False)
    plan(*values)
    (called,) = pair.calls
    args = dict(zip(CATALOG[PAIR[op]].arg_names, called, strict=True))
    assert [args[name].data_ptr() - values[0].data_ptr() for name in ("k_cache", "v_cache")] == [0, 32]
    assert [args[name].shape[-1] for name in ("k_cache", "v_cache")] == [16, 4]
    rows = ("k", "v") if op == "mla_caching_" else ("k_out", "v_out")
    given = values[1:3] if op == "mla_caching_" else values[3:]
    assert [args[name].data_ptr() for name in rows] == [row.data_ptr() for row in given]
    assert [tuple(args[name].shape) for name in rows] == [(3, 1, 16), (3, 1, 4)]
    assert args["slot_mapping"] is values[3 if op == "mla_caching_" else 1]
    assert plan.workspace_bytes == 9, "what the call said that it took"
    plan.destroy()
    assert pair.destroyed == 1


def test_what_a_replay_needs_stays_with_the_descriptor_that_holds_it() -> None:
    pair = Noting()
    plan = LatentKernel(pair).prepare(validate(CATALOG["mla_gather"], arguments("mla_gather")))
    held: Any = plan
    held._pair.pinned = True
    assert plan.pinned


@pytest.mark.parametrize("fixes", [True, False])
@pytest.mark.parametrize("op", PAIR)
def test_calls_that_repeat_are_settled_where_those_of_keys_and_values_are(op: str, fixes: bool) -> None:
    pair, values = Noting(fixes), arguments(op)
    backend = InProcessBackend("noting", claims=("cpu",), devices=("cpu",), kernels={op: LatentKernel(pair)})
    with active(runtime_of(backend)) as runtime:
        for _ in range(6):
            runtime.dispatcher.op(op)(*values)
    assert len(pair.calls) + len(pair.launches) == 6
    assert bool(pair.launches) is fixes
    pool, at = values[0].data_ptr(), values[3 if op == "mla_caching_" else 1].data_ptr()
    rows = [row.data_ptr() for row in (values[1:3] if op == "mla_caching_" else values[3:])]
    expected = (pool, pool + 32, *rows, at, 3) if op == "mla_caching_" else (pool, pool + 32, at, *rows, 3)
    assert set(pair.launches) <= {expected}


def test_errors_of_the_kernel_for_keys_and_values_name_the_op_that_was_called() -> None:
    with (
        kvdock.use_backend("portable"),
        pytest.raises(kvdock.IndexRangeError, match=r"^mla_gather: slot_mapping\[1\]: expected a slot below 20"),
    ):
        kvdock.ops.mla_gather(torch.zeros(5, 4, 1, 20), torch.tensor([3, 20]), 16)
