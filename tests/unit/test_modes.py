"""`use_backend` and `debug`: what a block of code asks of the calls in it."""

from __future__ import annotations

import asyncio
import threading
import warnings
from typing import Any

import attrs
import pytest
import torch

import kvdock
from kvdock.ops.modes import MODE, Mode
from support_caches import CPU, SPECS, counting_runtime

SLOTS = torch.tensor([0, 1])
TWICE = torch.tensor([3, 3])
BEYOND = torch.tensor([0, 8])


def paged(runtime: kvdock.Runtime) -> kvdock.PagedKVCache:
    return kvdock.create_cache(SPECS["uniform"], kvdock.PagedKVCacheConfig(num_blocks=2, block_size=4), CPU, ops=runtime.dispatcher)


def write(cache: kvdock.PagedKVCache, slots: torch.Tensor = SLOTS) -> None:
    cache.update(0, torch.ones(2, 2, 8), torch.ones(2, 2, 8), slots)


def test_usually_there_is_no_mode() -> None:
    assert MODE.get() is None


def test_blocks_nest_and_end() -> None:
    with kvdock.use_backend("one"):
        assert MODE.get() == Mode(named="one")
        with kvdock.debug():
            assert MODE.get() == Mode(named="one", debug=True)
            with kvdock.use_backend("other"), kvdock.debug(False):
                assert MODE.get() == Mode(named="other", debug=False)
            assert MODE.get() == Mode(named="one", debug=True)
        assert MODE.get() == Mode(named="one")
    assert MODE.get() is None


def test_a_block_ends_on_an_error_too() -> None:
    with pytest.raises(ZeroDivisionError), kvdock.use_backend("one"), kvdock.debug():
        _ = 1 // 0
    assert MODE.get() is None


def test_what_counts_is_when_the_block_is_entered_not_when_it_is_written() -> None:
    checking = kvdock.debug()
    with kvdock.use_backend("one"), checking:
        assert MODE.get() == Mode(named="one", debug=True)
    assert MODE.get() is None


def test_a_mode_is_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Mode().debug = True  # type: ignore[misc]


@pytest.mark.parametrize("name", [None, 3, b"cpu", ["cpu"], torch.device("cpu")], ids=repr)
def test_a_name_that_is_no_text_is_refused_at_once(name: Any) -> None:
    with pytest.raises(kvdock.ArgumentTypeError, match="use_backend: name: expected the name of a backend"):
        kvdock.use_backend(name)
    assert MODE.get() is None


def test_the_named_backend_serves_the_calls_in_the_block() -> None:
    runtime, calls = counting_runtime("usual", "other")
    cache = paged(runtime)
    write(cache)
    with kvdock.use_backend("other"):
        write(cache)
        with kvdock.use_backend("usual"):
            write(cache)
        write(cache)
    write(cache)
    assert calls == {("usual", "paged_caching_"): 3, ("other", "paged_caching_"): 2}


def test_an_unknown_name_is_an_error_at_the_first_call_not_before() -> None:
    runtime, calls = counting_runtime("usual")
    cache = paged(runtime)
    with kvdock.use_backend("nobody"):
        with pytest.raises(kvdock.BackendUnavailableError, match="nobody"):
            write(cache)
        with kvdock.use_backend("usual"):
            write(cache)
    assert calls == {("usual", "paged_caching_"): 1}


def test_a_mode_does_not_leak_into_another_thread() -> None:
    seen: list[Mode | None] = []
    with kvdock.use_backend("one"), kvdock.debug():
        thread = threading.Thread(target=lambda: seen.append(MODE.get()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_tasks_have_modes_of_their_own() -> None:
    runtime, calls = counting_runtime("usual", "other")
    cache = paged(runtime)

    async def work(name: str, mine: asyncio.Event, others: asyncio.Event) -> str | None:
        with kvdock.use_backend(name):
            mine.set()
            await others.wait()  # both are inside their blocks now
            write(cache)
            mode = MODE.get()
            return None if mode is None else mode.named

    async def both() -> list[str | None]:
        events = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(work("usual", *events), work("other", *reversed(events)))

    assert asyncio.run(both()) == ["usual", "other"]
    assert calls == {("usual", "paged_caching_"): 1, ("other", "paged_caching_"): 1}
    assert MODE.get() is None


def test_debug_reports_equal_slots_and_writes_all_the_same() -> None:
    runtime, calls = counting_runtime("usual")
    cache = paged(runtime)
    write(cache, TWICE)  # unspecified, but no error, outside debug mode
    with kvdock.debug():
        with pytest.warns(kvdock.KVDockWarning, match="paged_caching_: 1 slots occur more than once, first 3") as caught:
            write(cache, TWICE)
        assert len(caught) == 1
        write(cache, SLOTS)
        cache.gather(0, TWICE)  # reading a slot twice is fine
    assert calls["usual", "paged_caching_"] == 3


def test_debug_raises_before_the_launch() -> None:
    runtime, calls = counting_runtime("usual")
    cache = paged(runtime)
    with kvdock.debug(), pytest.raises(kvdock.IndexRangeError, match=r"slot_mapping\[1\].*8"):
        write(cache, BEYOND)
    assert not calls, "the kernel was not even called"
    with pytest.raises(kvdock.IndexRangeError, match=r"slot_mapping\[1\].*8"):
        write(cache, BEYOND)
    assert calls == {("usual", "paged_caching_"): 1}, "without debug it is the kernel that refuses on the host"
    assert not cache.k_cache(0).any()


def test_debug_can_be_switched_off_inside() -> None:
    runtime, calls = counting_runtime("usual")
    cache = paged(runtime)
    with kvdock.debug(), kvdock.debug(False), warnings.catch_warnings():
        warnings.simplefilter("error")
        write(cache, TWICE)
    assert calls == {("usual", "paged_caching_"): 1}


def test_debug_checks_wrong_arguments_as_ever() -> None:
    runtime, calls = counting_runtime("usual")
    cache = paged(runtime)
    with kvdock.debug(), pytest.raises(kvdock.ArgumentTypeError, match="slot_mapping"):
        write(cache, SLOTS.double())
    assert not calls
