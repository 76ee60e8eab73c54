"""Guards: torch's own and the one in Python accept the same, and calls work with either."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import attrs
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode

from kvdock.ops import guards
from kvdock.ops.guards import guard_in_python, make_guard
from opskit import PROPERTY, outcome_of
from opskit.targets import forget_runtimes
from support_isolated import answer
from support_slow import examples

F32 = torch.float32


class Tagged(torch.Tensor):
    """A tensor of a class of its own."""


@attrs.frozen
class Traits:
    """What a tensor is like."""

    shape: tuple[int, ...] = (2, 3, 4)
    strides: tuple[int, ...] = (12, 4, 1)
    dtype: torch.dtype = F32
    kind: str = "plain"

    def make(self) -> torch.Tensor:
        size = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True) if n)
        with torch.inference_mode(self.kind == "inference"):
            flat = torch.zeros(max(size, 1), dtype=self.dtype, device="meta" if self.kind == "meta" else "cpu")
            tensor = flat.as_strided(self.shape, self.strides)
        if self.kind == "conj":
            return torch.conj(flat.to(torch.complex64).as_strided(self.shape, self.strides))
        return {
            "neg": torch._neg_view,
            "subclass": lambda each: each.as_subclass(Tagged),
            "parameter": lambda each: torch.nn.Parameter(each, requires_grad=False),
            "leaf": lambda each: each.detach().requires_grad_(),
            "computed": lambda each: each.requires_grad_() * 1,
        }.get(self.kind, lambda each: each)(tensor)


KINDS = ["plain", "plain", "plain", "neg", "conj", "inference", "meta", "subclass", "parameter", "leaf"]


@st.composite
def traits(draw: st.DrawFn) -> Traits:
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3]), min_size=0, max_size=3)))
    dense = torch.empty(shape, device="meta").stride()
    strides = tuple(draw(st.sampled_from([step, step, 0, 1, 7])) for step in dense)
    dtype = draw(st.sampled_from([F32, F32, torch.float64, torch.int64]))
    return Traits(shape, strides, dtype, draw(st.sampled_from(KINDS if dtype is F32 else ["plain", "meta"])))


@given(st.data())
@settings(PROPERTY, max_examples=examples(250))
def test_both_guards_accept_the_same(data: st.DataObject) -> None:
    """Of the tensors of which one was made and one other, which is often the same but for sizes and strides that may be any."""
    first = data.draw(traits())
    free = [data.draw(st.sampled_from([True, False])) for _ in first.shape]
    kind = data.draw(st.sampled_from(KINDS if first.dtype is F32 else ["plain", "meta"]))
    other = data.draw(st.sampled_from([first, data.draw(traits()), attrs.evolve(first, kind=kind)]))
    if data.draw(st.booleans()):
        shape = tuple(n + 2 if any_ else n for n, any_ in zip(first.shape, free, strict=True))
        other = attrs.evolve(first, shape=shape, strides=tuple(step + 4 * any_ for step, any_ in zip(first.strides, free, strict=True)))
    sizes = [None if any_ else n for n, any_ in zip(first.shape, free, strict=True)]
    strides = [None if any_ else step for step, any_ in zip(first.strides, free, strict=True)]
    index, made, given_ = torch.zeros(3, dtype=torch.int64), first.make(), other.make()
    args = ([made, index], [sizes, [None]], [strides, [None]])
    for values in ([made, index], [given_, index], [given_, made], [index, index], [first.make(), torch.zeros(5, dtype=torch.int64)]):
        quick, slow = (outcome_of_guard(guard, values) for guard in (make_guard(*args), guard_in_python(*args)))
        same_twice = values[0] is values[1]  # torch's guards refuse that, which is careful enough
        assert quick == (slow and not same_twice), (values, quick, slow)
    assert outcome_of_guard(make_guard(*args), [made, index])


@pytest.mark.parametrize("make", [make_guard, guard_in_python])
@pytest.mark.parametrize("kind", sorted({*KINDS, "computed"} - {"plain"}))
def test_one_trait_makes_the_difference(make: Any, kind: str) -> None:
    plain, other, any_ = Traits().make(), Traits(kind=kind).make(), [[None, 3, 4]]
    strides = [[None, 4, 1]]
    assert make([plain], any_, strides)(Traits((5, 3, 4)).make())
    assert not make([plain], any_, strides)(other)
    assert make([other], any_, strides)(Traits(kind=kind).make())
    assert not make([other], any_, strides)(plain)


def outcome_of_guard(guard: guards.Guard, values: Sequence[Any]) -> bool:
    try:
        return guard(*values)
    except TypeError:
        return False


@pytest.mark.parametrize("make", [make_guard, guard_in_python])
@pytest.mark.parametrize("wrong", [None, 3, [1, 2], "text", object()], ids=lambda value: type(value).__name__)
def test_what_is_no_tensor_is_refused(make: Any, wrong: Any) -> None:
    x = torch.zeros(2, 3)
    guard = make([x, torch.zeros(3)], [[None, 3], [3]], [[None, 1], [1]])
    assert not outcome_of_guard(guard, [wrong, torch.zeros(3)])
    assert not outcome_of_guard(guard, [x, wrong])


@pytest.mark.parametrize("make", [make_guard, guard_in_python])
def test_tensors_that_a_transform_wraps_are_refused(make: Any) -> None:
    seen: list[bool] = []
    guard = make([torch.zeros(2, 3)], [[None, 3]], [[None, 1]])

    def look(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(outcome_of_guard(guard, [tensor]))
        return tensor * 1

    torch.vmap(look)(torch.zeros(4, 2, 3))
    torch.func.grad(lambda tensor: look(tensor).sum())(torch.zeros(2, 3))
    torch.func.functionalize(look)(torch.zeros(2, 3))
    assert seen == [False] * 3
    assert outcome_of_guard(guard, [torch.zeros(5, 3)])


@pytest.mark.parametrize("make", [make_guard, guard_in_python])
def test_one_tensor_may_be_in_two_places(make: Any) -> None:
    x = torch.zeros(2, 3)
    guard = make([x, x], [[2, 3]] * 2, [[3, 1]] * 2)
    assert guard(x, x)
    assert guard(x, torch.ones(2, 3))
    assert not guard(x, torch.ones(3, 2))


def test_no_tensors_are_always_alike() -> None:
    assert make_guard([], [], [])()


def test_the_guard_of_the_installed_torch_is_trusted() -> None:
    """If this fails, torch has changed what is private: calls work all the same, but take longer. See `kvdock.ops.guards`."""
    from torch._C._dynamo.guards import TensorGuards

    guard = make_guard([torch.zeros(2)], [[None]], [[1]])
    assert isinstance(getattr(guard, "__self__", None), TensorGuards)


class Blind:
    """torch's guards, if they no longer noticed a trait."""

    def __init__(self, *tensors: torch.Tensor, **options: Any) -> None:
        self._dtypes = [tensor.dtype for tensor in tensors]

    def check(self, *tensors: torch.Tensor) -> bool:
        return [tensor.dtype for tensor in tensors] == self._dtypes


class Broken:
    """torch's guards, if they took other arguments."""

    def __init__(self, *tensors: torch.Tensor) -> None: ...


@pytest.fixture(params=[None, Blind, Broken], ids=["gone", "blind", "broken"])
def untrusted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take torch's guards away, or put something else in their place."""
    module = ModuleType("torch._C._dynamo.guards")
    if request.param is not None:
        module.TensorGuards = request.param  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", module)
    guards._maker.cache_clear()
    forget_runtimes()
    yield
    monkeypatch.undo()
    guards._maker.cache_clear()
    forget_runtimes()


@pytest.mark.usefixtures("untrusted")
def test_a_guard_that_is_not_what_was_relied_on_is_replaced() -> None:
    x = torch.zeros(2, 3)
    guard = make_guard([x], [[None, 3]], [[None, 1]])
    assert guard.__module__ == "kvdock.ops.guards"
    assert guard(torch.ones(5, 3))
    assert not any(guard(wrong) for wrong in (torch.ones(5, 4), torch.ones(5, 3).half(), torch.ones(3, 2).t(), x.as_subclass(Tagged)))
    assert outcome_of(lambda: guard(None)) == (None, "")


SETTINGS: dict[str, str] = {
    "inference mode": "torch.inference_mode()",
    "no gradients": "torch.no_grad()",
    "a mode of dispatch": "Mode()",
}


@pytest.mark.parametrize("setting", [pytest.param(name, marks=[pytest.mark.slow] * bool(i)) for i, name in enumerate(SETTINGS)])
def test_torchs_guards_are_tried_where_no_thread_has_set_anything(setting: str) -> None:
    """Else the first call of a process, in inference mode, would have it compare in Python for good."""
    code = f"""
import json, torch
from torch.utils._python_dispatch import TorchDispatchMode
import kvdock
from kvdock.ops import guards
class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {{}}))
with {SETTINGS[setting]}:
    pools = [torch.zeros(2, 4, 2, 8) for _ in "kv"]
    kvdock.ops.copy_blocks_(*pools, torch.tensor([[0, 1]]))
print(json.dumps(guards._maker() is not guards.guard_in_python))
"""
    assert answer(code) is True


def test_guards_in_python_notice_who_is_shown_calls() -> None:
    tensor = torch.zeros(3)
    check = guard_in_python([tensor], [tensor.shape], [tensor.stride()])
    assert check(tensor)
    with FakeTensorMode():
        assert not check(tensor)
    assert check(tensor)
