"""Nothing is built without end, whatever changes from call to call: every pattern of the benchmark, and worse ones.

What is counted is what costs: guards that are made, signatures that are looked for, fast calls that are made, and plans. A call
that finds its signature or fast call makes none of these. Times are the benchmark's to measure.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvdock
from kvdock.ops import signatures
from kvdock.ops.catalog import CATALOG
from kvdock.ops.entry import OpEntry
from kvdock.ops.signatures import Recent, Signature
from kvdock.process import process_runtime
from opskit import active, runtime_of
from support_docs import ROOT
from support_plugins import CallKernel, InProcessBackend


def _benchmark() -> Any:
    """Return the benchmark's module, which is no package."""
    spec = importlib.util.spec_from_file_location("host_patterns", Path(ROOT) / "benchmarks" / "host_patterns.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PATTERNS = _benchmark()
IDLE = dict.fromkeys(CATALOG, CallKernel(lambda *args: None))
"""Kernels that do nothing: what is counted happens before."""


def patterns() -> list[Any]:
    """Return every pattern, in the runtime that is active."""
    writes, gathers = PATTERNS.write_patterns("cpu", None), PATTERNS.gather_patterns("cpu", None)
    return [*writes, *gathers, *PATTERNS.static_patterns("cpu"), *PATTERNS.copy_patterns("cpu")]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count what is built, in a process's runtime that has met no call."""
    counts: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*args, **options)

        return counted

    monkeypatch.setattr(signatures, "make_guard", counting("guard", signatures.make_guard))
    monkeypatch.setattr(Signature, "settle", counting("settle", Signature.settle))
    monkeypatch.setattr(OpEntry, "find", counting("find", OpEntry.find))
    monkeypatch.setattr(OpEntry, "prepare", counting("prepare", OpEntry.prepare))
    monkeypatch.setattr(Recent, "adopt", counting("adopt", Recent.adopt))
    with active(runtime_of(InProcessBackend("plain", claims=("cpu",), devices=("cpu",), kernels=IDLE))):
        yield counts


def test_once_met_no_pattern_of_the_benchmark_builds_anything(built: Counter[str]) -> None:
    for pattern in patterns():
        for name, run in pattern.candidates.items():
            for _ in range(2):
                run()
            built.clear()
            run()
            del built["adopt"]
            assert not built, f"{pattern.name}, {name}: {built} in {pattern.calls} calls"


@pytest.mark.usefixtures("real_number")
def test_what_is_met_is_settled_a_logarithm_of_times(built: Counter[str], real_number: int) -> None:
    """With the number that programs have: the same call, then another count, dtype of slots and rank in turn."""
    pools = [torch.zeros(6, 4, 2, 8) for _ in range(2)]
    calls = [
        (torch.zeros(*lead, 2, 8), torch.zeros(lead, dtype=dtype)) for lead in ((3,), (5,), (2, 2)) for dtype in (torch.int64, torch.int32)
    ]
    for _ in range(6 * real_number):
        for tokens, slots in calls:
            kvdock.ops.paged_caching_(*pools, tokens, tokens.clone(), slots)
    assert built["settle"] == 4  # counts share theirs
    assert built["prepare"] == 4
    assert built["guard"] == 1 + 4 + 2 * 4  # of pools, signatures and fast calls, those with pools and without
    calls_made = 6 * real_number * len(calls)
    assert built["find"] < calls_made // 4, "few, once there are fast calls"


@pytest.mark.usefixtures("real_number")
def test_strides_that_change_every_time_are_never_settled(built: Counter[str]) -> None:
    """In a circle of more than are counted, as tokens by heads of growing prompts have them; and a call that repeats stays a fast one."""
    pools, flat = [torch.zeros(6, 4, 2, 8) for _ in range(2)], torch.zeros(20_000)
    slots, same = torch.arange(3), flat.as_strided((3, 2, 8), (16, 8, 1))
    changing = [flat.as_strided((3, 2, 8), (24 + 8 * n, 8, 1)) for n in range(signatures.MOST_PATTERNS + 1)]
    for k in changing * 35:
        kvdock.ops.paged_caching_(*pools, k, k, slots)
        kvdock.ops.paged_caching_(*pools, same, same.view_as(same), slots)
    assert built["settle"] == 1
    assert built["guard"] <= 1 + 2 + 2  # of pools, signatures and a fast call
    assert built["prepare"] == 1
    assert built["find"] == 1


@pytest.mark.usefixtures("real_number")
def test_a_call_that_cannot_be_settled_is_tried_a_logarithm_of_times(built: Counter[str], real_number: int) -> None:
    """An output that is not dense: what holds of it at one size need not at another."""
    pools = [torch.zeros(6, 4, 2, 8) for _ in range(2)]
    outputs = [torch.zeros(3, 4, 8)[:, ::2] for _ in range(2)]
    for _ in range(8 * real_number):
        kvdock.ops.gather_paged(*pools, torch.arange(3), out=(outputs[0], outputs[1]))
    assert built["settle"] == 4  # the 4th, 8th, 16th and 32nd time
    assert built["guard"] == 2


@pytest.mark.usefixtures("real_number")
def test_many_layers_in_turn_are_settled_once(built: Counter[str], real_number: int) -> None:
    """32 layers, and counts of all kinds: each layer tries for itself, and what it finds is made once for all of them."""
    op = process_runtime().dispatcher.op("paged_caching_")
    layers = [op.bind(torch.zeros(6, 4, 2, 8), torch.zeros(6, 4, 2, 8)) for _ in range(32)]
    tokens = torch.zeros(24, 2, 8)
    for count in itertools.islice(itertools.cycle((1, 8, 8, 16, 16, 24, 24, 2)), 40):
        for layer in layers:
            layer(tokens[:count], tokens[:count].clone(), torch.zeros(count, dtype=torch.int64), None, None)
    assert built["settle"] <= 2  # one token, and more
    assert built["prepare"] == 1
    assert built["find"] == 32, "each layer once"
    assert built["guard"] == 2 + 2 * built["settle"]
    assert built["adopt"] <= 2 * 32 * real_number
