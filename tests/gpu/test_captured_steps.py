"""Decode steps as graphs: the results of the same step without one, for any batch, and what they hold."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch

from kvdock.captured import CapturedSteps
from support_captured import Decoder

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2}


def make(decoder: Decoder, sizes: Sequence[int] = (1, 2, 4, 8)) -> CapturedSteps:
    return CapturedSteps(decoder.step, decoder.tables(max(sizes)), batch_sizes=sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replays_give_what_the_step_gives_for_any_batch(dtype: torch.dtype) -> None:
    decoder = Decoder("cuda", dtype)
    steps = make(decoder)
    assert steps.is_captured
    sequences, calls = decoder.begin([3, 9, 1, 4, 7, 12, 2, 5]), len(decoder.calls)
    for batch in (8, 1, 5, 3, 2, 7, 6, 4, 8, 8):
        some = sequences[:batch]
        tokens = decoder.grow(some)
        wanted = decoder.plain(some, tokens)
        got = steps.run(some, tokens)
        torch.testing.assert_close(got, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        decoder.manager.commit(some, tokens, computed=[seq.num_tokens for seq in some])
    assert len(decoder.calls) == calls, "a replay calls nothing"
    decoder.manager.check_integrity()


def test_each_size_is_called_once_twice_to_warm_up_and_once_to_record() -> None:
    decoder = Decoder("cuda")
    make(decoder, (1, 4))
    assert decoder.calls == [4, 1, 4, 4, 1, 1, 4, 1]
    assert not decoder.cache.k_cache(0).any(), "all of that on padding, which writes nothing"


def test_what_graphs_use_is_kept() -> None:
    decoder = Decoder("cuda")
    steps, sequences = make(decoder), decoder.begin([5, 6])
    tokens = decoder.grow(sequences)
    wanted = decoder.plain(sequences, tokens)
    del decoder
    gc.collect()
    held = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(16)]  # whatever was freed is somebody else's now
    torch.testing.assert_close(steps.run(sequences, tokens), wanted, rtol=1e-4, atol=1e-4)
    assert all(bool((tensor == 7).all()) for tensor in held)


def test_the_smaller_sizes_take_little_memory_beside_the_largest() -> None:
    """A step with a large intermediate: its memory is there once, whatever the number of graphs."""
    decoder = Decoder("cuda")
    wide = torch.zeros(128, 1 << 20, device="cuda")

    def step(tables: object, tokens: torch.Tensor) -> torch.Tensor:
        return (decoder.embedding[tokens] @ wide).sum(1, keepdim=True)

    taken = []
    for sizes in ((8,), (1, 2, 3, 4, 5, 6, 7, 8)):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        steps = CapturedSteps(step, decoder.tables(8), batch_sizes=sizes)
        torch.cuda.empty_cache()
        taken.append(torch.cuda.memory_reserved() - before)
        del steps
        gc.collect()
    assert taken[1] <= 1.5 * taken[0], taken


def test_a_step_that_waits_for_the_device_says_so() -> None:
    decoder = Decoder("cuda")

    def step(tables: object, tokens: torch.Tensor) -> torch.Tensor:
        return decoder.embedding[tokens] * int(tokens.sum().item() + 1)

    with pytest.raises(RuntimeError) as caught:
        CapturedSteps(step, decoder.tables(2), batch_sizes=[1, 2])
    assert any("a step must not wait for the device" in note for note in caught.value.__notes__)
    torch.cuda.synchronize()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert make(decoder).is_captured, "and the device goes on"


def test_inputs_from_the_host_are_not_overtaken() -> None:
    """Twenty steps are queued behind one that takes long; each has tokens of its own."""
    decoder = Decoder("cuda")
    steps = CapturedSteps(lambda tables, tokens: tokens[:, None] * 2, decoder.tables(2), batch_sizes=[2])
    sequences = decoder.begin([3, 4])
    torch.cuda._sleep(200_000_000)
    results = [steps.run(sequences, [number, 100 + number]).clone() for number in range(20)]
    assert [result[:, 0].tolist() for result in results] == [[2 * number, 200 + 2 * number] for number in range(20)]


def test_what_libraries_keep_for_a_stream_may_be_freed() -> None:
    """`torch.compile` frees cuBLAS's room to work in before each graph that it records; kvdock's graphs have their own."""
    from kvdock.runtime import default

    shapes = [(rows, inner, columns) for rows in (16, 64, 256) for inner in (8192, 16384) for columns in (256, 1024)]  # few tiles: split
    pairs = [(torch.randn(m, k, device="cuda").bfloat16(), torch.randn(k, n, device="cuda").bfloat16()) for m, k, n in shapes]
    (replay,) = default().capture(torch.device("cuda", 0), [lambda: torch.cat([(x @ y).flatten() for x, y in pairs])])
    expected = replay().clone()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    garbage = [torch.full((2**20,), 77, dtype=torch.uint8, device="cuda") for _ in range(128)]
    for _ in range(3):
        assert torch.equal(replay(), expected)
    torch.cuda.synchronize()
    assert all(bool((each == 77).all()) for each in garbage), "nothing else is written"
