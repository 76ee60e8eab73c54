"""Captured decode steps where nothing is captured, and with a backend that captures: the same code, and the same results."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import numpy as np
import pytest
import torch

import kvdock
from kvdock.captured import CapturedSteps
from kvdock.runtime import Runtime
from kvdock.scheduler import TableViews
from kvdock_cpu.backend import CpuBackend
from opskit import runtime_of
from support_captured import LAYERS, Decoder

SIZES = (1, 2, 4, 8)


def make(decoder: Decoder, sizes: Sequence[int] = SIZES, **settings: Any) -> CapturedSteps:
    return CapturedSteps(decoder.step, decoder.tables(max(sizes)), batch_sizes=sizes, **settings)


def pools(decoder: Decoder) -> list[torch.Tensor]:
    return [pool.clone() for layer in range(LAYERS) for pool in (decoder.cache.k_cache(layer), decoder.cache.v_cache(layer))]


def test_a_run_gives_what_the_step_gives_for_any_batch() -> None:
    decoder = Decoder()
    steps = make(decoder)
    sequences = decoder.begin([3, 9, 1, 4, 7, 12, 2, 5])
    for batch in (8, 1, 5, 3, 2, 7, 6, 4):
        some = sequences[:batch]
        tokens = decoder.grow(some)
        wanted = decoder.plain(some, tokens)
        got = steps.run(some, tokens)
        assert got.shape == wanted.shape
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        decoder.manager.commit(some, tokens, computed=[seq.num_tokens for seq in some])
    decoder.manager.check_integrity()


def test_a_batch_is_padded_to_the_next_size() -> None:
    decoder = Decoder()
    steps = make(decoder)
    sequences = decoder.begin([3] * 8)
    decoder.calls.clear()
    for batch in range(1, 9):
        steps.run(sequences[:batch], decoder.grow(sequences[:batch]))
    assert decoder.calls == [1, 2, 4, 4, 8, 8, 8, 8]


def test_padding_writes_nothing_and_changes_nothing() -> None:
    decoder, seen = Decoder(), []

    def step(tables: TableViews, tokens: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        seen.append((tables.seq_lens.tolist(), tables.slot_mapping.tolist(), scale.tolist()))
        return decoder.step(tables, tokens) * scale[:, None]

    steps = CapturedSteps(step, decoder.tables(4), batch_sizes=[4], inputs=[torch.tensor(0), torch.tensor(float("nan"))])
    assert seen == [([0] * 4, [-1] * 4, pytest.approx([float("nan")] * 4, nan_ok=True))]
    assert not any(pool.any() for pool in pools(decoder)), "the first call is all padding"
    sequences = decoder.begin([5, 2])
    tokens, before = decoder.grow(sequences), pools(decoder)
    wanted = decoder.plain(sequences, tokens)
    got = steps.run(sequences, tokens, [1.0, 1.0])
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    written = [seq.slot_mapping(seq.num_tokens - 1, seq.num_tokens)[0] for seq in sequences]
    for pool, held in zip(pools(decoder), before, strict=True):
        changed = (pool != held).flatten(0, 1).any(-1).any(-1).nonzero()[:, 0].tolist()
        assert changed == sorted(written)


def test_rows_of_padding_have_the_inputs_of_padding_whatever_ran_before() -> None:
    decoder, seen = Decoder(), []

    def step(tables: TableViews, tokens: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        seen.append((tokens.tolist(), number.tolist()))
        return decoder.step(tables, tokens)

    steps = CapturedSteps(step, decoder.tables(4), batch_sizes=[4], inputs=[torch.tensor(7), torch.tensor(-1)])
    sequences = decoder.begin([5, 2, 3, 4])
    for batch in (4, 1, 3, 2):
        decoder.grow(sequences[:batch])
        steps.run(sequences[:batch], [20] * batch, [30] * batch)
    padded = [([20] * batch + [7] * (4 - batch), [30] * batch + [-1] * (4 - batch)) for batch in (4, 1, 3, 2)]
    assert seen[1:] == padded


def test_inputs_may_be_arrays_or_tensors() -> None:
    decoder = Decoder()
    steps = make(decoder)
    sequences = decoder.begin([5, 2, 6])
    tokens = decoder.grow(sequences)
    results = [steps.run(sequences, form).clone() for form in (tokens, np.array(tokens, dtype=np.int32), torch.tensor(tokens))]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("batch", [0, 5])
def test_a_batch_of_another_size_is_refused(batch: int) -> None:
    decoder = Decoder()
    steps = make(decoder, (1, 3, 4))
    sequences = decoder.begin([3] * 5)
    steps.run(sequences[:2], decoder.grow(sequences[:2]))
    shown, calls = steps.tables.host.seq_lens.tolist(), len(decoder.calls)
    text = re.escape(f"CapturedSteps.run: sequences: expected 1 to 4, for batch_sizes 1, 3, 4, got {batch}. Fix: split the batch")
    with pytest.raises(kvdock.ArgumentValueError, match=text):
        steps.run(sequences[:batch], [0] * batch)
    assert (steps.tables.host.seq_lens.tolist(), len(decoder.calls)) == (shown, calls)


@pytest.mark.parametrize("inputs", [([1],), ([[1], [2]],), ([1.5, 2.5],), (), ([1, 2], [1, 2])], ids=str)
def test_inputs_of_another_form_are_refused(inputs: Any) -> None:
    """One token would be broadcast to all rows, and 1.5 would be 1."""
    decoder = Decoder()
    steps, sequences = make(decoder), decoder.begin([3, 4])
    with pytest.raises(kvdock.ArgumentValueError, match=re.escape("CapturedSteps.run: inputs: expected [(torch.int64, [2])], got ")):
        steps.run(sequences, *inputs)
    assert steps.tables.num_sequences == 0


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"batch_sizes": []}, kvdock.ArgumentValueError, r"batch_sizes: expected at least one, up to the tables' 8 rows, got \[\]"),
        ({"batch_sizes": [1, 9]}, kvdock.ArgumentValueError, r".* the tables' 8 rows, got \[1, 9\]. Fix: make the tables with a larger"),
        ({"batch_sizes": [0, 1]}, kvdock.ArgumentValueError, "batch_sizes: expected at least 1, got 0"),
        ({"batch_sizes": [1.5]}, kvdock.ArgumentTypeError, "batch_sizes: expected an int of at least 1, got 1.5"),
        ({"tables": None}, kvdock.ArgumentTypeError, "tables: expected BatchTables, got NoneType"),
        ({"inputs": [1]}, kvdock.ArgumentTypeError, "inputs: expected tensors, one row of each input, got int"),
        (
            {"step": lambda tables, tokens: tokens[:1]},
            kvdock.ArgumentValueError,
            r"step: expected a tensor \[8, ...\] for 8 rows, got \[1\]",
        ),
        ({"step": lambda tables, tokens: None}, kvdock.ArgumentValueError, "step: .* for 8 rows, got NoneType"),
    ],
)
def test_what_makes_no_steps(change: dict[str, Any], error: type[Exception], text: str) -> None:
    decoder = Decoder()
    settings = {"step": decoder.step, "tables": decoder.tables(8), "batch_sizes": SIZES} | change
    with pytest.raises(error, match=f"CapturedSteps: {text}"):
        CapturedSteps(**settings)


def test_no_gradients_are_recorded() -> None:
    decoder = Decoder()
    decoder.embedding.requires_grad_()
    steps, sequences = make(decoder), decoder.begin([3])
    assert not steps.run(sequences, decoder.grow(sequences)).requires_grad


def test_without_graphs_the_step_runs_once_for_each_size_and_at_each_run() -> None:
    decoder = Decoder()
    steps = make(decoder, (4, 1, 2, 4))
    assert (decoder.calls, steps.batch_sizes, steps.is_captured) == ([4, 2, 1], (1, 2, 4), False)
    assert repr(steps).startswith("CapturedSteps(batch_sizes=(1, 2, 4), is_captured=False, BatchTables(batch_size=4, ")


class Recording(CpuBackend):
    """Captures as a device does: warms up, calls once more, and from then on repeats that without the step's outer code."""

    name = "recording"

    def __init__(self) -> None:
        super().__init__()
        self.replayed: list[int] = []
        self.guarded = False

    def device_guard(self, device: torch.device) -> Any:
        self.guarded = True
        return nullcontext()

    def capture(self, device: torch.device, steps: Sequence[Callable[[], Any]]) -> Sequence[Callable[[], Any]]:
        assert self.guarded
        for step in steps:
            step()
            step()
        return [self.replay(step, step()) for step in steps]

    def replay(self, step: Callable[[], Any], result: torch.Tensor) -> Callable[[], Any]:
        def run() -> torch.Tensor:
            self.replayed.append(len(result))
            return result.copy_(step())

        return run


def test_a_backend_that_captures_is_given_the_largest_first_and_asked_once() -> None:
    backend, decoder = Recording(), Decoder()
    steps = make(decoder, (1, 2, 4), runtime=runtime_of(backend))
    assert decoder.calls == [4, 2, 1, 4, 4, 2, 2, 1, 1, 4, 2, 1], "once to see what comes, twice to warm up, once to record"
    assert steps.is_captured
    sequences = decoder.begin([3, 4, 5])
    tokens = decoder.grow(sequences)
    torch.testing.assert_close(steps.run(sequences, tokens), decoder.plain(sequences, tokens), rtol=1e-5, atol=1e-5)
    steps.run(sequences[:2], tokens[:2])
    assert backend.replayed == [4, 2]
    assert steps.run(sequences, tokens).data_ptr() == steps.run(sequences, tokens).data_ptr(), "where the graph puts it"


def test_a_backend_without_graphs_leaves_recording_to_another_that_has_them() -> None:
    """As one for a single kernel, which comes first for its device."""

    class Graphs(Recording):
        def capabilities(self) -> kvdock.plugin.Capabilities:
            return attrs.evolve(super().capabilities(), graph_capture=True)

    class First(CpuBackend):
        name = "first"

        def capabilities(self) -> kvdock.plugin.Capabilities:
            return attrs.evolve(super().capabilities(), priority=kvdock.plugin.Priority.SPECIALISED)

    assert make(Decoder(), runtime=runtime_of(First(), Graphs())).is_captured
    assert not make(Decoder(), runtime=runtime_of(First(), Recording())).is_captured, "of those without, the first"


def test_a_default_device_changes_nothing() -> None:
    """Tables and inputs come from host memory, whatever a user's default is."""
    decoder = Decoder()
    sequences = decoder.begin([3, 4, 5])
    tokens = decoder.grow(sequences)
    expected = decoder.plain(sequences, tokens)
    with torch.device("meta"):
        steps = make(decoder, (1, 4))
        found = steps.run(sequences, tokens)
    assert found.device.type == "cpu"
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def capturing(answer: Callable[[Any], Any]) -> Runtime:
    """A runtime whose one backend answers `capture` so."""

    class Odd(CpuBackend):
        name = "odd"

        def capture(self, device: torch.device, steps: Any) -> Any:
            return answer(steps)

    return runtime_of(Odd())


@pytest.mark.parametrize(
    "answer", [lambda steps: None, lambda steps: steps[1:], lambda steps: [1] * len(steps)], ids=["none", "few", "ints"]
)
def test_a_backend_that_answers_something_else_is_named(answer: Callable[[Any], Any]) -> None:
    with pytest.raises(kvdock.plugin.PluginError, match=r"backend 'odd': capture\(cpu, ...\): expected 4 functions, got "):
        make(Decoder(), runtime=capturing(answer))


def test_what_a_step_raises_while_it_is_captured_comes_through_with_a_note() -> None:
    def refuse(steps: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted") as caught:
        make(Decoder(), runtime=capturing(refuse))
    (note,) = caught.value.__notes__
    assert note == "raised while backend 'odd' captured steps on cpu: a step must not wait for the device"


def test_views_of_tables_show_the_last_update_and_stay_in_their_place() -> None:
    decoder = Decoder()
    tables = decoder.tables(4)
    views = tables.first(2, 2)
    sequences = decoder.begin([5, 9, 3])
    tables.update(sequences)
    assert (views.seq_lens.tolist(), views.positions.tolist(), views.cu_query_lens.tolist()) == ([5, 9], [4, 8], [0, 1, 2])
    assert views.block_table.tolist() == tables.block_table[:2].tolist()
    assert views.slot_mapping.data_ptr() == tables.slot_mapping.data_ptr()
    assert views.query_lens.tolist() == [1, 1]
    with pytest.raises(kvdock.ArgumentValueError, match=r"BatchTables.first: expected at most 4 sequences, 16 blocks of each and 4 tokens"):
        tables.first(5, 5)
