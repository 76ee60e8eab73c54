"""Tensors that are more, or less, than plain memory: each argument of each op refuses them, and nothing is written.

Beside plain ones, that is. What a tensor's class makes of calls that it accepts is in `tests/unit/tracing`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

import kvdock
from kvdock.cli.explain import example
from kvdock.ops.catalog import CATALOG
from opskit import Geometry, Memory, Target, check
from opskit.targets import forget_runtimes

Wrap = Callable[[torch.Tensor], torch.Tensor]


class Subclass(torch.Tensor):
    """Memory like any other, whose elements may mean something else."""


def functional(tensor: torch.Tensor) -> torch.Tensor:
    with FunctionalTensorMode():
        wrapped: torch.Tensor = FunctionalTensor.to_functional(tensor)
        return wrapped


def distributed(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, init_device_mesh

    return DTensor.from_local(tensor, init_device_mesh("cpu", (1,)))


KINDS: dict[str, tuple[Wrap, str, str]] = {
    "fake": (FakeTensorMode().from_tensor, "FakeTensor with Python", "outside of the mode that made it"),
    "distributed": (distributed, "DTensor with Python", "{name}.to_local()"),
    "negative": (torch._neg_view, "torch.Tensor with Negative", "{name}.resolve_neg()"),
    "conjugate": (lambda t: t.to(torch.complex64).conj(), "torch.Tensor with Conjugate", "{name}.resolve_conj()"),
    "zeros": (lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype), "torch.Tensor with ZeroTensor", "{name}.clone()"),
    "functional": (functional, "FunctionalTensor with Python", "outside of the mode"),
    "functionalized": (torch._to_functional_tensor, "torch.Tensor with Functionalize", "outside of torch.func.functionalize"),
    "subclass": (lambda t: t.as_subclass(Subclass), "test_plain_memory.Subclass", "{name}.as_subclass(torch.Tensor)"),
}
"""What is made of a plain tensor, what an error calls it, and the fix."""


def arguments(target: Target, op: str, name: str = "") -> dict[str, Any]:
    """Return good arguments, the one of that ``name`` among them: of a quantised cache where only such have it."""
    dtype = torch.int8 if any(arg.name == name and arg.scale_of for arg in CATALOG[op].args) else torch.float32
    device, sizes = torch.device(target.device), {"heads": 2, "head_dim": 8, "block_size": 4}
    return CATALOG[op].bind(example(op, device=device, dtype=dtype, present=[name], **sizes))


def tensors(op: str) -> list[str]:
    return [arg.name for arg in CATALOG[op].args if arg.is_tensor]


@pytest.fixture(autouse=True)
def _fresh(target: Target) -> Iterator[None]:
    """Let no earlier test have left a plan."""
    forget_runtimes()
    yield
    forget_runtimes()


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def refused(target: Target, op: str, args: dict[str, Any], name: str) -> kvdock.KVDockError:
    """Call an op, and return the error about an argument; the others have not changed."""
    before = {key: value.clone() for key, value in args.items() if isinstance(value, torch.Tensor) and key != name}
    with pytest.raises(kvdock.KVDockError, match=f"^{op}: {name}: expected ") as caught:
        target.runtime.dispatcher.op(op)(*args.values())
    assert all(torch.equal(args[key], value) for key, value in before.items())
    return caught.value


@pytest.mark.parametrize("op", CATALOG)
def test_what_is_more_than_memory_is_refused(target: Target, op: str) -> None:
    for name, (wrap, called, fix) in itertools.product(tensors(op), KINDS.values()):
        if target.device != "cpu" and wrap is distributed:
            continue  # the mesh is of the host
        args = arguments(target, op, name)
        args[name] = wrap(args[name])
        error = refused(target, op, args, name)
        assert isinstance(error, kvdock.ArgumentTypeError)
        assert called in str(error.got)
        assert fix.format(name=name) in str(error.fix)


TRANSFORMS: dict[str, Callable[[Wrap, torch.Tensor], Any]] = {
    "vmap": lambda call, tensor: torch.vmap(call)(tensor[None]),
    "grad": lambda call, tensor: torch.func.grad(call)(tensor),
    "functionalize": lambda call, tensor: torch.func.functionalize(call)(tensor),
}


@pytest.mark.parametrize("op", CATALOG)
def test_what_a_transform_of_functions_passes_is_refused(target: Target, op: str) -> None:
    for name, transform in itertools.product(tensors(op), TRANSFORMS):
        args = arguments(target, op, name)
        if transform == "grad" and not args[name].is_floating_point():
            continue
        errors = []

        def call(tensor: torch.Tensor, name: str = name, args: dict[str, Any] = args, errors: list[Any] = errors) -> torch.Tensor:
            errors.append(refused(target, op, args | {name: tensor}, name))
            return tensor.sum()

        TRANSFORMS[transform](call, args[name])
        assert "outside of torch." in str(errors[0].fix)


@pytest.mark.parametrize("op", CATALOG)
def test_memory_that_was_given_back_is_refused(target: Target, op: str) -> None:
    for name in tensors(op):
        args = arguments(target, op, name)
        storage = args[name].untyped_storage()
        storage.resize_(storage.nbytes() - 1)
        assert isinstance(refused(target, op, args, name), kvdock.ArgumentValueError)
        storage.resize_(0)
        assert refused(target, op, args, name).got == "one of 0"


@pytest.mark.parametrize("op", CATALOG)
def test_a_part_of_memory_that_was_given_back_is_refused_by_known_calls(target: Target, op: str) -> None:
    """Its address is not 0, but its offset."""
    for name in tensors(op):
        if CATALOG[op].arg(name).scale_of:
            continue  # no call that has one is served
        args = arguments(target, op, name)
        if name == "cu_query_lens":
            args[name][-1] = args["q"].shape[0]
        if op == "copy_blocks_":
            args["block_pairs"] = torch.tensor([[0, 1]], device=target.device)
        for _ in range(6):
            target.runtime.dispatcher.op(op)(*args.values())
        whole = torch.cat([args[name].flatten(), args[name].flatten()])
        part = whole[args[name].numel() :].view(args[name].shape)
        whole.untyped_storage().resize_(0)
        assert part.data_ptr() == part.storage_offset() * part.element_size() > 0
        assert refused(target, op, args | {name: part}, name).got == "one of 0"


@pytest.mark.parametrize("op", CATALOG)
def test_parameters_and_buffers_are_memory(target: Target, op: str) -> None:
    for kind in (lambda t: torch.nn.Parameter(t, False), torch.nn.Buffer):
        args = arguments(target, op)
        if op == "copy_blocks_":
            args["block_pairs"] = torch.tensor([[0, 1]], device=target.device)
        values = [kind(v) if isinstance(v, torch.Tensor) else v for v in args.values()]
        target.runtime.dispatcher.op(op)(*values)


@pytest.mark.parametrize("is_inference", [(True, True), (True, False), (False, True)], ids=["both", "keys", "values"])
@pytest.mark.parametrize("pool", ["nhd", "hnd", "odd steps"])
def test_tensors_made_for_inference_are_written_outside_of_it(target: Target, pool: str, is_inference: tuple[bool, bool]) -> None:
    """Also where a slot is padding, for which some kernels do something else."""
    g = Geometry()
    few, many = [5, -1, 0], [*range(23, 3, -2), -1, *range(4), -7]
    memories = {flag: Memory(target.device) for flag in (True, False)}
    made: dict[bool, Any] = {}
    for flag, memory in memories.items():
        with torch.inference_mode(flag):
            slots = [memory.index(values) for values in (few, [few], many)]
            tokens = [g.tokens(memory, index.shape) for index in slots]
            made[flag] = (g.pools(memory, pool), slots, tokens)
    k, v = (made[flag] for flag in is_inference)
    both = Memory(target.device)
    both.arenas = [*memories[True].arenas, *memories[False].arenas]
    pools = (k[0][0], v[0][1])
    assert tuple(tensor.is_inference() for tensor in pools) == is_inference
    for index, k_rows, v_rows in zip(k[1], k[2], v[2], strict=True):
        check(target, both, "paged_caching_", *pools, k_rows[0], v_rows[1], index)
        check(target, both, "gather_paged", *pools, index, k_rows[0], v_rows[1])
    check(target, both, "copy_blocks_", *pools, both.index([[0, 5], [-1, 2], [3, 2]]))
    rows = [tensor.transpose(1, 2) for tensor in pools]
    for lengths in (2, both.index([0, 1, 2, 1, 0, 2]), both.index([1, 0])):
        count = lengths.shape[0] if isinstance(lengths, torch.Tensor) else 6
        new = [both.tensor(g.dtype, (count, 2, 2, 8)) for _ in pools]
        check(target, both, "static_update_", *rows, *new, lengths)
