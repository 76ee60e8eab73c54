"""The generated quick path of every op against the slow one, which reads the schema: they must agree on every call.

Calls are drawn with tensors cut out of one arena, so that sources and destinations overlap at times, and with sizes, strides,
dtypes and ranks that are wrong at times. Plans stay from example to example: a quick check that misses something would run
the plan of an earlier, valid call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import kvdock
from kvdock.ops.calls.writer import source_of
from kvdock.ops.catalog import CATALOG
from kvdock.ops.geometry import ranges_overlap
from kvdock_conformance import reference
from opskit import PROPERTY, SINGLE, Memory, Target, outcome_of
from opskit.drawing import ROOM, Cut, Drawer
from opskit.kernels import runtime_of
from opskit.memory import Copy
from support_plugins import CallDescriptor, CallKernel, InProcessBackend

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
WRONG = (torch.int16, F32)


def static_call(d: Drawer, dtype: torch.dtype, index: torch.dtype, row: tuple[int, int]) -> tuple[dict[str, Any], list[int]]:
    """Draw arguments of `static_update_`, and lengths."""
    (rows, length, new), (heads, dim) = d.draw(st.sampled_from([(2, 5, 2), (1, 3, 1), (3, 4, 0)])), row
    given_rows = d.draw(st.sampled_from([rows, 1]))
    shapes = dict.fromkeys(("k_cache", "v_cache"), (rows, heads, length, dim)) | dict.fromkeys(("k", "v"), (given_rows, heads, new, dim))
    tensors = {name: d.cut(dtype, shape) for name, shape in shapes.items()}
    shape = d.draw(st.sampled_from([None, (), (1,), (given_rows,)]))
    lengths = d.draw(st.integers(-1, length)) if shape is None else d.cut(index, shape, WRONG)
    return {**tensors, "cache_lengths": d.mostly(lengths, None, True, 2.0)}, d.distinct(rows, length - new + 1)


@st.composite
def calls(draw: st.DrawFn, op: str) -> tuple[dict[str, Any], list[int]]:
    """Draw the arguments of an op, as cuts or as they are, and the values of its index."""
    d, dtype, index = Drawer(draw), draw(st.sampled_from([BF16, BF16, F32])), draw(st.sampled_from([I64, I64, I32]))
    row = draw(st.sampled_from([(1, 8), (2, 4), (2, 1)]))
    if op == "static_update_":
        return static_call(d, dtype, index, row)
    num_blocks, block = draw(st.sampled_from([(3, 2), (3, 1), (1, 4), (0, 2)]))
    caches = {name: d.cut(dtype, (num_blocks, block, *row)) for name in ("k_cache", "v_cache")}
    if op == "copy_blocks_":
        count = draw(st.sampled_from([1, 1, 2, 0]))
        return {**caches, "block_pairs": d.cut(index, (count, 2), WRONG)}, d.distinct(2 * count, num_blocks)
    lead = draw(st.sampled_from([(3,), (1,), (4,), (0,), (2, 2), (1, 3)]))
    rest = [d.cut(dtype, (*lead, *row)) for _ in range(2)]
    mapping = d.mostly(d.cut(index, lead, WRONG), None)
    scales = {"k_scale": d.mostly(None, 1.0, Cut(F32, (), (), 9 * ROOM)), "v_scale": None}
    numbers = d.distinct(torch.Size(lead).numel(), num_blocks * block)
    if op == "paged_caching_":
        return {**caches, "k": rest[0], "v": rest[1], "slot_mapping": mapping, **scales}, numbers
    return {**caches, "slot_mapping": mapping, **scales, "k_out": rest[0], "v_out": rest[1]}, numbers


# Those that move bytes, so that all can be compared. `test_any_schema` does the same with a schema like attention's.
INDEX = {"paged_caching_": "slot_mapping", "gather_paged": "slot_mapping", "static_update_": "cache_lengths", "copy_blocks_": "block_pairs"}


def placed(op: str, drawn: dict[str, Any], numbers: Sequence[int], memory: Memory) -> dict[str, Any]:
    """Cut the tensors out of an arena, and write the index values into theirs."""
    memory.arenas.clear()
    memory.tensor(torch.uint8, (12 * ROOM,))
    args = {name: value.of(memory) if isinstance(value, Cut) else value for name, value in drawn.items()}
    index = args[INDEX[op]]
    if isinstance(index, torch.Tensor):
        spread = (list(numbers) + [-1] * index.numel())[: index.numel()]
        for place, number in zip(itertools.product(*map(range, index.shape)), spread, strict=True):
            index[place] = number
    return args


def agree(target: Target, op: str, drawn: dict[str, Any], numbers: Sequence[int], seen: dict[str, int]) -> None:
    """Run a call on both paths, and on a bound op, each on the same bytes, and compare errors and every byte."""
    entry = target.runtime.dispatcher.op(op)
    named = "portable" if target.name == "portable" else None
    memory = Memory(target.device)
    args = placed(op, drawn, numbers, memory)
    values = tuple(args.values())
    start = memory.copy()
    slow = outcome_of(lambda: entry.run_slowly(values, named))
    after = memory.copy()
    ways: list[Callable[[], Any]] = [lambda: entry.call(*values)] * 4  # a plan, its use, a memo of that, and its use
    pools = [args["k_cache"], args["v_cache"]]
    if all(pool.dim() and pool.numel() for pool in pools):
        ways += [lambda: entry.bind(*pools, named=named)(*values[2:])]
        if slow[0] is None or "_cache: " not in slow[1]:  # else binding itself may refuse
            bound = entry.bind(*pools, named=named)
            ways += [lambda: bound(*values[2:])] * 4
    for way in ways:
        start.restore()
        assert outcome_of(way) == slow
        after.assert_same("quick and slow path")
    if slow[0] is not None:
        start.assert_same(f"{slow[1]}: raised")
    elif not any(ranges_overlap(a, b) for a, b in itertools.combinations([args[a.name] for a in CATALOG[op].mutated], 2)):
        expect(op, args, start)
        after.assert_same("the reference")
    seen[slow[0].__name__ if slow[0] else "ran"] = seen.get(slow[0].__name__ if slow[0] else "ran", 0) + 1


def expect(op: str, args: dict[str, Any], start: Copy) -> None:
    """Put the memory into the state that the reference leaves."""
    twins = [start.twin(value) for name, value in args.items() if not name.endswith("_scale")]
    getattr(reference, op)(*twins)
    start.restore()


PLAIN = {
    "k_cache": Cut(BF16, (3, 2, 2, 8), (32, 16, 8, 1), 0),
    "v_cache": Cut(BF16, (3, 2, 2, 8), (32, 16, 8, 1), ROOM),
    "slot_mapping": Cut(I64, (3,), (1,), 4 * ROOM),
    "k_scale": None,
    "v_scale": None,
    "k_out": Cut(BF16, (3, 2, 8), (16, 8, 1), 2 * ROOM),
    "v_out": Cut(BF16, (3, 2, 8), (16, 8, 1), 3 * ROOM),
}
FOLDED = {**PLAIN, "v_out": Cut(BF16, (3, 2, 8), (0, 8, 1), 3 * ROOM)}


def agree_on_many(target: Target, op: str, count: int) -> None:
    """Draw calls of an op, valid ones and such with each kind of error among them, and compare the paths."""
    seen: dict[str, int] = {}

    @settings(PROPERTY, max_examples=count)
    @given(calls(op))
    def run(call: tuple[dict[str, Any], Any]) -> None:
        agree(target, op, *call, seen)

    run()
    assert seen["ran"] > count // 5, f"too few valid calls: {seen}"
    assert {"ArgumentValueError", "ArgumentTypeError", "ran"} <= set(seen), f"too few kinds: {seen}"


@pytest.mark.parametrize("target", SINGLE, indirect=True)
@pytest.mark.parametrize("op", INDEX)
def test_quick_and_slow_path_agree(target: Target, op: str) -> None:
    agree_on_many(target, op, 30)


@pytest.mark.slow
@pytest.mark.parametrize("target", SINGLE, indirect=True)
@pytest.mark.parametrize("op", INDEX)
def test_quick_and_slow_path_agree_on_many_calls(target: Target, op: str) -> None:
    agree_on_many(target, op, 800)


@pytest.mark.parametrize("target", SINGLE, indirect=True)
def test_what_is_not_in_a_key_is_checked_at_every_call(target: Target) -> None:
    """An output whose strides fold it onto itself, after a plan was made for one that is dense."""
    seen: dict[str, int] = {}
    for drawn in (PLAIN, FOLDED, PLAIN):
        agree(target, "gather_paged", drawn, [1, 2, 3], seen)
    assert seen == {"ran": 2, "ArgumentValueError": 1}


@pytest.mark.parametrize("op", CATALOG)
def test_the_source_that_is_written_out_compiles_and_names_every_argument(op: str) -> None:
    schema = CATALOG[op]
    source = source_of(schema)
    compile(source, op, "exec")
    assert all(name in source for name in schema.arg_names)


def test_calls_with_too_few_or_too_many_arguments_are_type_errors() -> None:
    cache = torch.zeros(2, 2, 1, 8)
    with pytest.raises(TypeError):
        kvdock.ops.paged_caching_(cache, cache)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        kvdock.ops.copy_blocks_(cache, cache, [], None)  # type: ignore[call-arg]


class FixingDescriptor(CallDescriptor):
    """Does nothing, and says when it is asked to settle a call and when that is used."""

    uses_autograd = False

    def fix(self, *args: Any) -> Callable[..., None]:
        self("fix")
        return lambda *addresses: self("fixed call")


class FixingKernel(CallKernel):
    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        return FixingDescriptor(self._call)


@pytest.mark.parametrize("place", ["below", "between", "above"])
def test_a_call_is_remembered_wherever_its_tokens_lie(place: str) -> None:
    """Between the pools, which have tokens in their common range, as often as elsewhere."""
    events: list[Any] = []
    kernel = FixingKernel(lambda *args: events.append(args[0]))
    runtime = runtime_of(InProcessBackend("plain", claims=("cpu",), devices=("cpu",), kernels={"paged_caching_": kernel}))
    parts = list(torch.zeros(3, 6, 4, 2, 8))
    tokens = parts.pop({"below": 0, "between": 1, "above": 2}[place]).view(24, 2, 8)
    slots = torch.arange(5)
    for _ in range(8):
        runtime.dispatcher.op("paged_caching_").call(*parts, tokens[:5], tokens[8:13], slots, None, None)
    assert events[-5:] == ["fixed call"] * 5
    assert events.count("fix") == 1
