"""Side streams and page locks of backends on Triton, by what torch's module for their devices has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvdock
from kvdock.plugin import BackendError
from kvdock_cuda.backend import CudaBackend
from kvdock_triton.streams import SideStream, has_streams, pinned
from opskit.interpreted import AcmeBackend

CPU = torch.device("cpu")


class Runtime:
    """The driver's functions, on a machine that locks so many bytes."""

    def __init__(self, most: int) -> None:
        self.most, self.locked, self.notes = most, dict[int, int](), list[str]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - the driver's name
        assert flags == 1, "for all devices of the process"
        if nbytes > self.most:
            return 2
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - the driver's name
        self.notes.append("unlock")
        del self.locked[address]
        return 0


def module(runtime: Runtime | None) -> Any:
    found = SimpleNamespace(synchronize=lambda device: runtime.notes.append(f"synchronize {device}") if runtime else None)
    if runtime is not None:
        found.cudart = lambda: runtime
    return found


def test_pages_are_locked_and_unlocked_behind_the_device() -> None:
    runtime, memory = Runtime(4096), torch.zeros(4096, dtype=torch.uint8)
    undo = pinned(module(runtime), memory, CPU)
    assert undo is not None
    assert runtime.locked == {memory.data_ptr(): 4096}
    undo()
    assert (runtime.locked, runtime.notes) == ({}, ["synchronize cpu", "unlock"])


def test_what_the_system_does_not_lock_is_an_error_with_its_code() -> None:
    with pytest.raises(BackendError, match=r"pin: expected 4096 bytes of host memory locked, got code 2 .*Fix: .*ulimit -l"):
        pinned(module(Runtime(100)), torch.zeros(4096, dtype=torch.uint8), CPU)


def test_devices_without_the_driver_s_function_lock_nothing() -> None:
    assert pinned(module(None), torch.zeros(8, dtype=torch.uint8), CPU) is None
    assert AcmeBackend().pin(torch.zeros(8, dtype=torch.uint8), CPU) is None
    assert kvdock.plugin.Backend.pin(AcmeBackend(), torch.zeros(8, dtype=torch.uint8), CPU) is None


def test_a_stream_is_torch_s() -> None:
    stream = AcmeBackend().side_stream(CPU)
    assert isinstance(stream, SideStream)
    stream.follow()
    with stream.current():
        assert torch.cpu.current_stream() is vars(stream)["_stream"]
    mark = stream.mark()
    mark.wait()
    mark.synchronize()
    assert mark.reached()


def test_what_torch_has_no_streams_for_has_none() -> None:
    assert not has_streams(SimpleNamespace(Stream=object))
    assert kvdock.plugin.Backend.side_stream(AcmeBackend(), CPU) is None

    class Bare(AcmeBackend):
        @property
        def module(self) -> Any:
            return SimpleNamespace()

    assert Bare().side_stream(CPU) is None


class Recorded:
    """A stand-in for `torch.cuda` that notes what waits for what."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.here = self.Stream("here")

    def current_stream(self, device: torch.device) -> Any:
        self.notes.append(f"current of {device}")
        return self.here

    def Event(self) -> Any:  # noqa: N802 - torch's name
        return SimpleNamespace(
            record=lambda stream: self.notes.append(f"record {stream.name}"),
            wait=lambda stream: self.notes.append(f"{stream.name} waits"),
            query=lambda: False,
            synchronize=lambda: self.notes.append("synchronize"),
        )

    def Stream(self, name: str = "side") -> Any:  # noqa: N802 - torch's name
        return SimpleNamespace(name=name, wait_stream=lambda other: self.notes.append(f"{name} waits for {other.name}"))


def test_the_side_waits_for_the_current_stream_of_its_device_and_the_other_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_cuda, device = Recorded(), torch.device("cuda:1")
    vars(torch_cuda)["stream"] = None
    monkeypatch.setattr(CudaBackend, "module", torch_cuda)
    stream = CudaBackend().side_stream(device)
    assert stream is not None
    stream.follow()
    mark = stream.mark()
    assert not mark.reached()
    mark.wait()
    mark.synchronize()
    assert torch_cuda.notes == [
        "current of cuda:1",
        "side waits for here",
        "record side",
        "current of cuda:1",
        "here waits",
        "synchronize",
    ]
