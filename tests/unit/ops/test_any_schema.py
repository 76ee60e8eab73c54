"""Every shape of schema works: an op is an entry in a catalog, and nothing of the quick path knows which ops there are.

As in `test_signature`, calls are drawn with each thing wrong at times, and the quick path is held against the slow one, and both
against what the op means.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import linecache
import traceback
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import kvdock
from kvdock.ops.calls import writer
from kvdock.ops.catalog import CATALOG
from kvdock.ops.entry import OpEntry
from kvdock.ops.geometry import has_internal_overlap, ranges_overlap
from kvdock.ops.schema import Arg, OpSchema, Role
from opskit import PROPERTY, Memory, outcome_of
from opskit.any_schema import SCHEMAS, expect, op_of
from opskit.drawing import ROOM, ROOMS, Cut, Drawer
from support_slow import QUICK

F32, I64 = torch.float32, torch.int64
STATICS = [1, 1.0, True, None, 0.5, "causal", (1, "a")]
each_op = pytest.mark.parametrize("op", SCHEMAS)


def line_of(arg: Arg, draw: st.DrawFn, lead: int) -> list[str]:
    """Draw one of an argument's lists of sizes."""
    words = draw(st.sampled_from(arg.dims)).split()
    return [f"*lead{i}" for i in range(lead)] + words[1:] if words[:1] == ["..."] else words


@st.composite
def calls(draw: st.DrawFn, schema: OpSchema, *, plain: bool) -> dict[str, Any]:
    """Draw the arguments of a call; plain ones are right and aligned, and have no optional ones."""
    d, lead = Drawer(draw, plain=plain), draw(st.sampled_from([1, 1, 2]))
    usual = {"D": 4, "E": 8, "W": 12, "C": 8, "P": 4, "2": 2, "R": 3, "G": 3}
    runtime = {"lead0": [3, 2, 1, 0], "lead1": [2, 1], "n": [3, 4, 1, 0], "T": [3, 5, 1, 9], "N": [2, 1, 0], "m": [2, 4, 1], "k": [1]}
    sizes = {word: draw(st.sampled_from(many)) for word, many in runtime.items()} | usual
    sizes["k"] = draw(st.sampled_from([1, sizes["n"]]))
    sizes["P"] = d.mostly(4, 6)
    none, bare, static = draw(st.booleans()), plain or draw(st.booleans()), draw(st.sampled_from([0.5, *STATICS]))

    def value(arg: Arg) -> Any:
        if arg.role is Role.STATIC:
            return d.mostly(static, [1])
        if arg.role is Role.RUNTIME_INT and (not arg.dims or draw(st.booleans())):
            return d.mostly(draw(st.integers(0, 9)), None, True, 2.0, np.int64(3))
        if (arg.returned and none) or (arg.optional and (bare or draw(st.booleans()))):
            return None
        shape = [sizes.get(word.lstrip("*"), 2) for word in line_of(arg, draw, lead)]
        dtype = draw(st.sampled_from([arg.dtypes[0], *arg.dtypes]))
        return d.mostly(d.cut(dtype, shape, (torch.float16, torch.int16)), None if arg.role is Role.RUNTIME_INT else 3, None)

    return {arg.name: value(arg) for arg in schema.args}


def placed(drawn: dict[str, Any], memory: Memory) -> dict[str, Any]:
    """Cut tensors out of an arena of small numbers."""
    memory.tensor(torch.uint8, (ROOMS * ROOM,))
    memory.arenas[0].bytes.zero_()
    args = {name: value.of(memory) if isinstance(value, Cut) else value for name, value in drawn.items()}
    for number, tensor in enumerate(value for value in args.values() if isinstance(value, torch.Tensor)):
        if not has_internal_overlap(tensor):
            tensor.copy_(torch.arange(number, number + tensor.numel()).view(tensor.shape) % 7)
    return args


def slowly(entry: OpEntry, values: tuple[Any, ...]) -> Any:
    """Run a call on the slow path; make outputs first, as the public way does."""
    returned = [arg.name for arg in entry.schema.args if arg.returned]
    args = entry.schema.bind(values)
    if returned and all(args[name] is None for name in returned):
        args |= dict(zip(returned, entry.make_outputs(values), strict=True))
    entry.run_slowly(tuple(args.values()), None)
    return tuple(args[name] for name in returned)


def tensors_of(result: Any) -> list[torch.Tensor]:
    """Return what a call returned, as a list."""
    return [result] if isinstance(result, torch.Tensor) else list(result or ())


class Agreeing:
    """Compares the ways into one op on drawn calls; plans, signatures and fast calls stay from call to call."""

    def __init__(self, op: str, *, fixes: bool) -> None:
        self.schema = SCHEMAS[op]
        self.entry, self.kernel, _ = op_of(self.schema, fixes=fixes)
        self.seen: dict[str, int] = {}

    def check(self, drawn: dict[str, Any]) -> None:
        memory, entry = Memory(), self.entry
        args = placed(drawn, memory)
        values = tuple(args.values())
        start = memory.copy()
        slow = outcome_of(lambda: slowly(entry, values))
        after = memory.copy()
        for way in self.ways(args, values):
            start.restore()
            results: list[Any] = []
            assert outcome_of(lambda way=way, results=results: results.append(way())) == slow
            after.assert_same("quick and slow path")
            if slow[0] is None:
                self.held(args, start, results[0])
        if slow[0] is not None:
            start.assert_same(f"{slow[1]}: raised")
            assert slow[1].startswith(f"{self.schema.name}: "), slow[1]
        key = slow[0].__name__ if slow[0] else "ran"
        self.seen[key] = self.seen.get(key, 0) + 1

    def ways(self, args: dict[str, Any], values: tuple[Any, ...]) -> list[Callable[[], Any]]:
        """Return a plan, its use, a fast call's making, and its use; and the same for a bound op."""
        ways: list[Callable[[], Any]] = [lambda: self.entry.call(*values)] * 4
        pools = [args[arg.name] for arg in self.schema.static_args]
        rest = [value for name, value in args.items() if name not in {arg.name for arg in self.schema.static_args}]
        if all(isinstance(pool, torch.Tensor) for pool in pools):
            bound = self.entry.bind(*pools)
            ways += [lambda: bound(*rest)] * 4
        return ways

    def held(self, args: dict[str, Any], start: Any, result: Any) -> None:
        """Compare what is written and returned with what the op means."""
        returned = [arg.name for arg in self.schema.args if arg.returned]
        made = [name for name in returned if args[name] is None]
        given = args | {name: torch.empty(tensor.shape) for name, tensor in zip(made, tensors_of(result), strict=True)} if made else args
        if any(isinstance(v, torch.Tensor) and v.numel() == 0 for v in given.values()):
            return
        written = [given[arg.name] for arg in self.schema.mutated if given[arg.name] is not None]
        assert not any(ranges_overlap(a, b) for a, b in itertools.combinations(written, 2))
        expected = expect(self.schema, given, start)
        actual = given | dict(zip(returned, tensors_of(result), strict=True))
        for name, tensor in expected.items():
            assert torch.equal(tensor, actual[name]), name


@each_op
@pytest.mark.parametrize("fixes", [False, True], ids=["called", "by address"])
def test_quick_and_slow_path_agree_and_compute_what_the_op_means(op: str, fixes: bool) -> None:
    agreeing = Agreeing(op, fixes=fixes)

    for plain in (False, True, False):
        settings(PROPERTY, max_examples=10 if QUICK else 16)(given(calls(SCHEMAS[op], plain=plain))(agreeing.check))()
    seen, kernel = agreeing.seen, agreeing.kernel
    assert seen["ran"] > 12, f"too few valid calls: {seen}"
    assert {"ArgumentValueError", "ArgumentTypeError"} & set(seen), f"too few kinds: {seen}"
    assert kernel.launches > 10 if fixes else kernel.calls > 10, f"{kernel.launches} launches, {kernel.calls} calls"


def good(op: str) -> dict[str, Any]:
    """Return right arguments, without optional ones; outputs are made by the op."""
    ones, slots = torch.ones, torch.tensor([0, 1, 2])
    return {
        "three_written_": {"slots": slots, "a": ones(3, 4), "b": ones(3, 8), "c": ones(3), "x": ones(3, 4)},
        "latents_": {"pool": ones(2, 2, 12), "kv_c": ones(3, 8), "k_pe": ones(3, 4), "slots": slots, "eps": None},
        "swap_": {"pairs": torch.tensor([[0, 1]]), "source": ones(2, 2, 4), "target": ones(3, 2, 4)},
        "attend": {
            "scale": 0.5,
            "window": 4,
            "q": ones(3, 2, 4),
            "pool": ones(2, 2, 2, 4),
            "slopes": None,
            "lse": None,
            "out": None,
        },
        "pool_only_": {"value": 1, "pool": ones(3, 4)},
        "norm": {"x": ones(3, 4), "weight": ones(4), "eps": 1, "y": None},
        "pick": {"table": ones(5, 4), "slots": slots, "rows": None, "found": None},
        "rotate_": {"x": ones(3, 4), "cos": None, "sin": None, "bias": None, "shift": None},
        "ints_": {"start": 1, "pool": ones(3, 4), "x": ones(3, 4), "length": 2, "stop": 3},
    }[op]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "static sizes that a relation forbids": ("latents_", {"k_pe": torch.ones(3, 8)}, "k_pe: expected at most 12 elements with kv_c"),
    "run-time and static sizes that a relation forbids": (
        "latents_",
        {"kv_c": torch.ones(9, 8), "k_pe": torch.ones(9, 4), "slots": torch.arange(9)},
        "kv_c: expected few rows",
    ),
    "optional sizes that a relation forbids": ("rotate_", {"cos": torch.ones(4, 8)}, "cos: expected at most 3 rows"),
    "optional sizes that a relation forbids, without the one it names": (
        "rotate_",
        {"sin": torch.ones(4, 8)},
        "sin: expected at most 3 rows",
    ),
    "two optional ones that do not agree": (
        "rotate_",
        {"cos": torch.ones(2, 8), "sin": torch.ones(3, 8)},
        "sin: expected shape [m=2, E=8]",
    ),
    "an optional one of another size": ("rotate_", {"shift": torch.ones(2, 4)}, "shift: expected shape [n=3, D=4] to agree with x"),
    "an optional one without dimensions": ("rotate_", {"shift": torch.ones(())}, "shift: expected shape [n=3, D=4] to agree with x"),
    "an optional one on another device": ("rotate_", {"cos": torch.ones(2, 8, device="meta")}, "cos: expected a tensor on cpu, where x is"),
    "no int": ("ints_", {"start": None}, "start: expected an int, got NoneType None. Fix: pass int(start)"),
    "a bool": ("ints_", {"stop": True}, "stop: expected an int, got bool True"),
    "a float": ("attend", {"window": 2.5}, "window: expected an int, got float 2.5"),
    "an int of numpy's": ("attend", {"window": np.int64(2)}, "window: expected an int, got int64 np.int64(2). Fix: pass int(window)"),
    "a bool for an int or a tensor": ("ints_", {"length": True}, "length: expected an int or a torch.Tensor, got bool True"),
    "a static list": ("attend", {"scale": [1]}, "scale: expected a hashable value, got list [1]. Fix: pass a tuple"),
    "one output of two": ("pick", {"rows": torch.ones(3, 4)}, "found: expected a torch.Tensor, got NoneType None"),
    "an output of another size": ("norm", {"y": torch.ones(2, 4)}, "y: expected shape [T=3, D=4] to agree with x"),
    "a pool on another device than the tensor that counts": (
        "swap_",
        {"target": torch.ones(3, 2, 4, device="meta")},
        "target: expected a tensor on cpu, where source is",
    ),
}


@pytest.mark.parametrize(("op", "change", "text"), REFUSED.values(), ids=REFUSED)
def test_an_error_names_the_argument(op: str, change: dict[str, Any], text: str) -> None:
    entry, kernel, _ = op_of(SCHEMAS[op])
    right = good(op)
    wrong = right | change
    pools = [arg.name for arg in entry.schema.static_args]
    bound = entry.bind(*[wrong[name] for name in pools])
    rows = torch.ones(2, 8)
    present: list[dict[str, Any]] = [{"cos": rows}, {"sin": rows}, {"cos": rows, "sin": rows}, {"shift": torch.ones(3, 4)}]
    for _ in range(3):
        for more in [{}, *(present if op == "rotate_" else [])]:
            entry.call(*(right | more).values())
        done = len(kernel.found)
        for way in (lambda: entry.call(*wrong.values()), lambda: bound(*[wrong[name] for name in wrong if name not in pools])):
            with pytest.raises(kvdock.KVDockError) as caught:
                way()
            assert str(caught.value).startswith(f"{op}: {text}")
        assert len(kernel.found) == done


@pytest.mark.parametrize("fixes", [False, True])
def test_a_pool_that_is_read_may_not_lie_in_one_that_is_written(fixes: bool) -> None:
    """Of an op that has pools alone, once such calls are known too."""
    entry, _, _ = op_of(SCHEMAS["pools_only_"], fixes=fixes)
    memory = torch.ones(64 * 4)  # rows of whole lines: such calls are settled
    pools = [memory[start : start + 64].view(4, 16) for start in (0, 128, 32, 64)]
    for _ in range(20):
        entry.call(*pools[:2])
    for source, target in ((0, 2), (2, 0), (2, 3)):
        with pytest.raises(kvdock.ArgumentValueError, match="pools_only_: source: expected memory outside target"):
            entry.call(pools[source], pools[target])
    entry.call(pools[0], pools[3])


@pytest.mark.parametrize("op", ["pool_only_", "norm", "attend"])
def test_equal_static_values_of_other_types_are_other_plans(op: str) -> None:
    entry, kernel, counting = op_of(SCHEMAS[op], fixes=False)
    args = good(op)
    name = next(arg.name for arg in entry.schema.args if arg.role is Role.STATIC)
    values = [1, 1.0, True, None, 0.5, "1", 0, 0.0, False]
    for value in [*values, *reversed(values)]:
        for _ in range(3):
            entry.call(*(args | {name: value}).values())
    assert [(type(v), v) for v in values] == [(type(request.args[name]), request.args[name]) for request in counting.prepared]
    assert kernel.calls == 6 * len(values)


def test_what_is_optional_selects_the_plan_and_its_run_time_sizes_do_not() -> None:
    entry, _, counting = op_of(SCHEMAS["rotate_"], fixes=False)
    for shift in (None, True):
        for cos in (None, True):
            for count in (3, 5, 1, 3):
                rows = [torch.ones(max(count - 1, 1), 8) if cos else None] * 2
                for _ in range(3):
                    entry.call(torch.ones(count, 4), *rows, None, torch.ones(count, 4) if shift else None)
    assert len(counting.prepared) == 4


def test_an_optional_tensor_has_its_alignment_and_its_strides_in_the_plan() -> None:
    """The kernel that counts holds each tensor against what it was promised."""
    entry, _, counting = op_of(SCHEMAS["rotate_"], fixes=False)
    flat, x = torch.ones(200), torch.ones(3, 3)
    biases = [flat[:9].view(3, 3), flat[1:10].view(3, 3), flat[2:11].view(3, 3), flat[:24].view(3, 8)[:, :3], flat[:15].view(3, 5)[:, :3]]
    for bias in biases * 3:
        entry.call(x, None, None, bias, None)
    assert [(meta.alignment, meta.strides) for meta in (request.args["bias"] for request in counting.prepared)] == [
        *((16, (3, 1)), (4, (3, 1)), (8, (3, 1))),
        *((16, (8, 1)), (16, (5, 1))),
    ]
    shifts = [torch.ones(3, 4), torch.ones(13)[1:].view(3, 4), torch.ones(3, 6)[:, :4]]
    for shift in shifts * 3:
        entry.call(torch.ones(3, 4), None, None, None, shift)
    assert [request.args["shift"].alignment for request in counting.prepared[5:]] == [16, 4, 8]


@pytest.mark.parametrize("name", ["cos", "shift"])
def test_an_optional_tensor_in_what_is_written_is_refused(name: str) -> None:
    entry, _, _ = op_of(SCHEMAS["rotate_"])
    flat = torch.ones(40)
    x = flat[8:20].view(3, 4)
    sizes = {"cos": (1, 8), "shift": (3, 4)}[name]
    for at in (20, 12, 24):
        given = flat[at : at + sizes[0] * sizes[1]].view(sizes)
        args = {"x": x, "cos": None, "sin": None, "bias": None, "shift": None} | {name: given}
        for _ in range(3):
            if at >= 20:
                entry.call(*args.values())
                continue
            with pytest.raises(kvdock.ArgumentValueError, match=f"rotate_: {name}: expected memory outside x"):
                entry.call(*args.values())


def test_outputs_are_given_or_made_one_or_two() -> None:
    for op in ("norm", "pick", "attend"):
        entry, kernel, _ = op_of(SCHEMAS[op])
        names = [arg.name for arg in entry.schema.args if arg.returned]
        for _ in range(4):
            made = entry.call(*good(op).values())
            assert isinstance(made, tuple) is (len(names) == 2)
            if op == "pick":
                assert all(bool((tensor == place * kernel.found[-1]).all()) for place, tensor in enumerate(made, 1))
            given = good(op) | {name: torch.zeros_like(tensor) for name, tensor in zip(names, tensors_of(made), strict=True)}
            again = tensors_of(entry.call(*given.values()))
            assert all(a is given[name] for a, name in zip(again, names, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(again, tensors_of(made), strict=True))


@pytest.mark.parametrize("shape", [(3,), (2, 2), (1, 3)])
def test_made_outputs_have_the_sizes_of_this_call(shape: tuple[int, ...]) -> None:
    """Also where no pool says them: other rows with other tables."""
    entry, _, _ = op_of(SCHEMAS["pick"])
    for width in (4, 8, 4, 12, 8):
        for _ in range(3):
            rows, found = entry.call(torch.ones(5, width), torch.zeros(shape, dtype=I64), None, None)
            assert (tuple(rows.shape), tuple(found.shape)) == ((*shape, width), shape)


def test_an_output_that_is_optional_is_written_where_it_is_given() -> None:
    entry, kernel, counting = op_of(SCHEMAS["attend"], fixes=False)
    for _ in range(3):
        for lse in (None, torch.zeros(3, 2)):
            entry.call(*(good("attend") | {"lse": lse}).values())
            assert lse is None or bool((lse == kernel.found[-1]).all())
    assert len(counting.prepared) == 2
    flat = torch.zeros(30)
    for _ in range(3):
        with pytest.raises(kvdock.ArgumentValueError, match="attend: out: expected memory outside lse, which is written"):
            entry.call(*(good("attend") | {"lse": flat[:6].view(3, 2), "out": flat[4:28].view(3, 2, 4)}).values())


def test_ints_and_counts_are_run_time_values() -> None:
    entry, kernel, _ = op_of(SCHEMAS["ints_"])
    pool, expected = torch.zeros(3, 4), 0.0
    for start, count, length, stop in [(1, 3, 2, 5), (2, 3, 2, 5), (2, 2, 7, 5), (0, 1, 0, 0), (9, 8, 1, 2)] * 2:
        entry.call(start, pool, torch.zeros(count, 4), length, stop)
        assert kernel.found[-1] == 1 * start + 3 * length + 4 * stop
        expected += kernel.found[-1]
    assert bool((pool == expected).all())
    assert (kernel.fixed, kernel.launches, kernel.calls) == (2, 10, 0)  # a count of 1 is a pattern of its own


def test_a_backend_is_asked_about_the_dtype_of_pools_and_not_of_indices() -> None:
    args = good("three_written_")
    entry, kernel, _ = op_of(SCHEMAS["three_written_"], dtypes=(F32,))
    entry.call(*args.values())
    assert len(kernel.found) == 1
    entry, _, _ = op_of(SCHEMAS["three_written_"], dtypes=(torch.bfloat16,))
    with pytest.raises(kvdock.UnsupportedError, match=r"any stores torch.bfloat16, not torch.float32"):
        entry.call(*args.values())


@each_op
def test_the_source_is_seen_by_debuggers(op: str) -> None:
    """Also after `linecache` was asked to forget files that have changed."""
    entry, _, _ = op_of(SCHEMAS[op])
    linecache.checkcache()
    source = inspect.getsource(entry.call)
    assert source.lstrip().startswith(f"def call({', '.join(entry.schema.arg_names)}):")
    with pytest.raises(kvdock.ArgumentTypeError) as caught:
        entry.call(*dict.fromkeys(entry.schema.arg_names).values())
    lines = [frame.line for frame in traceback.extract_tb(caught.tb) if frame.filename == f"<kvdock call of {op}>"]
    assert len(lines) >= 1
    assert all(line and line in writer.source_of(entry.schema) for line in lines)


@pytest.mark.parametrize("schema", [*SCHEMAS.values(), *CATALOG.values()], ids=lambda schema: schema.name)
def test_the_code_keeps_its_names_to_itself(schema: OpSchema) -> None:
    words = {dim.name for arg in schema.args for dims in arg.shapes() for dim in dims}
    tree = ast.parse(writer.source_of(schema))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    words |= {f"{word}_{what}" for word in words for what in ("least", "reach")}
    of_args = {name for name in names for arg in schema.arg_names if name.startswith(f"{arg}_")}
    assert names - words - of_args - {*schema.arg_names, "__all__"} <= writer._OWN_NAMES


@pytest.mark.parametrize("name", ["cache", "key", "plan", "lambda", "a b", "x_ptr", "x_n0", "n"])
def test_a_name_that_the_code_needs_is_refused(name: str) -> None:
    schema = OpSchema("mine", (Arg("x", Role.TENSOR, ("*n D",), (F32,)), Arg(name, Role.STATIC)))
    with pytest.raises(kvdock.ArgumentValueError, match=f"OpSchema mine: {name}: expected names"):
        op_of(schema)


def test_an_op_without_a_tensor_of_its_own_is_refused() -> None:
    index = Arg("pairs", Role.TENSOR, ("*N 2",), (I64,), host=True)
    for args in ((), (Arg("value", Role.STATIC),), (Arg("x", Role.TENSOR, ("*n",), (F32,), optional=True),), (index,)):
        with pytest.raises(kvdock.ArgumentValueError, match="OpSchema mine: args: expected a tensor that every call has"):
            OpSchema("mine", args)
