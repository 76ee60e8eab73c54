"""Backends on Triton: what they claim, what they say is wrong, how often they compile, and what a failure leaves behind."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvdock
from kvdock.ops.index_values import pairs_on_device
from kvdock_cuda.backend import CudaBackend
from kvdock_cuda.driver import driver_version
from kvdock_rocm.backend import RocmBackend
from kvdock_triton import Tile, Tuning
from kvdock_triton.base import TritonBackend
from opskit import Geometry, Memory, active, runtime_of
from opskit.interpreted import AcmeBackend

G = Geometry(num_blocks=1100, block=64, hk=1, dk=8, hv=1, dv=8)

has_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install 'kvdock[triton]'")
compiles = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled under the interpreter")


@pytest.fixture(autouse=True)
def nothing_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


class Gpu(CudaBackend):
    """A machine with one GPU, as far as torch says."""

    @property
    def module(self) -> Any:
        return SimpleNamespace(device_count=lambda: 1, device=nullcontext, synchronize=print)


@has_triton
@pytest.mark.parametrize("driver", [(13, 0), (12, 9), (14, 1), None], ids=str)
def test_a_driver_that_is_new_enough(driver: tuple[int, int] | None) -> None:
    assert Gpu(lambda: driver, "12.8").probe() == kvdock.plugin.Probe.ready("1 device(s)")


@pytest.mark.parametrize("driver", [(12, 9), (11, 4)], ids=str)
def test_a_driver_that_is_too_old(driver: tuple[int, int]) -> None:
    runtime = runtime_of(Gpu(lambda: driver, "13.0"))
    *_, record = runtime.registry.records()
    assert (record.state.value, runtime.registry.loaded()) == ("unusable", {})
    assert record.reason == (
        f"the driver supports CUDA {driver[0]}.{driver[1]}, and torch {torch.__version__} is built for CUDA 13.0. "
        f"Fix: update the driver, or install a torch built for CUDA {driver[0]}"
    )


def test_a_torch_without_the_hardware_is_no_fault() -> None:
    assert CudaBackend(lambda: (11, 0), None).probe() == kvdock.plugin.Probe.absent(f"torch {torch.__version__} is built without CUDA")
    if torch.version.hip is None:
        assert RocmBackend().probe() == kvdock.plugin.Probe.absent(f"torch {torch.__version__} is built without ROCm")
        assert not RocmBackend().claims(torch.device("cuda"))


class Blind(CudaBackend):
    """A machine on which torch counts no GPU."""

    module = SimpleNamespace(device_count=lambda: 0, device=nullcontext, synchronize=print)


NO_DEVICE = kvdock.plugin.Probe.absent("no cuda device is visible (device_count() is 0)")


def silent() -> None:
    raise RuntimeError("Driver/library version mismatch")


@pytest.mark.parametrize("driver", [(13, 0), None], ids=str)
def test_no_visible_device_is_no_fault(driver: tuple[int, int] | None) -> None:
    assert Blind(lambda: driver, "13.0").probe() == NO_DEVICE


def test_a_driver_at_fault_is_not_taken_for_no_device() -> None:
    """Torch counts no device then."""
    probe = Blind(lambda: (12, 9), "13.0").probe()
    assert (probe.state, probe.reason[:31]) == (kvdock.plugin.ProbeState.UNUSABLE, "the driver supports CUDA 12.9, ")
    probe = Blind(silent, "13.0").probe()
    text = "the NVIDIA driver does not answer: Driver/library version mismatch. Fix: see what nvidia-smi says"
    assert (probe.state, probe.reason[: len(text)]) == (kvdock.plugin.ProbeState.UNUSABLE, text)


@has_triton
def test_a_driver_that_says_nothing_is_no_fault_where_torch_counts_devices() -> None:
    assert Gpu(silent, "13.0").probe() == kvdock.plugin.Probe.ready("1 device(s)")


@pytest.mark.parametrize("value", ["", "-1"])
def test_devices_that_are_hidden_on_purpose_are_no_fault(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    for driver in (silent, lambda: (11, 4)):
        assert Blind(driver, "13.0").probe() == NO_DEVICE


class Nvml:
    """NVML's library, with these answers."""

    def __init__(self, init: int = 0, count: tuple[int, int] = (0, 1), version: tuple[int, int] = (0, 12090)) -> None:
        self.calls: list[str] = []
        self.nvmlErrorString = lambda code: {18: b"Driver/library version mismatch", 999: b"Unknown Error"}[code]
        self.nvmlInit_v2 = lambda: init
        self.nvmlShutdown = lambda: self.calls.append("shutdown")
        self.nvmlDeviceGetCount_v2 = self._answer(*count)
        self.nvmlSystemGetCudaDriverVersion_v2 = self._answer(*version)

    @staticmethod
    def _answer(code: int, value: int) -> Any:
        def answer(reference: Any) -> int:
            reference._obj.value = value
            return code

        return answer


ANSWERS: dict[str, tuple[Nvml, tuple[int, int] | None, list[str]]] = {
    "12.9": (Nvml(), (12, 9), ["shutdown"]),
    "13.0": (Nvml(version=(0, 13000)), (13, 0), ["shutdown"]),
    "no driver is loaded": (Nvml(9), None, []),
    "a driver without a GPU": (Nvml(count=(0, 0)), None, ["shutdown"]),
    "GPUs that cannot be counted": (Nvml(count=(4, 0)), (12, 9), ["shutdown"]),
    "no version": (Nvml(version=(999, 0)), None, ["shutdown"]),
}


@pytest.mark.parametrize(("nvml", "version", "calls"), ANSWERS.values(), ids=ANSWERS)
def test_what_the_driver_says(monkeypatch: pytest.MonkeyPatch, nvml: Nvml, version: tuple[int, int] | None, calls: list[str]) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: nvml)
    assert driver_version() == version
    assert nvml.calls == calls


@pytest.mark.parametrize(("code", "text"), [(18, "Driver/library version mismatch"), (999, "Unknown Error")])
def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, code: int, text: str) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: Nvml(code))
    with pytest.raises(RuntimeError, match=f"^{text}$"):
        driver_version()


@pytest.mark.parametrize("backend", [Gpu(lambda: (13, 0), "13.0"), AcmeBackend()], ids=["cuda", "acme"])
def test_without_triton(monkeypatch: pytest.MonkeyPatch, backend: kvdock.plugin.Backend) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # as where it is not installed
    runtime = runtime_of(backend)
    *_, record = runtime.registry.records()
    assert (record.state.value, record.reason) == ("unusable", "Triton is not installed. Fix: pip install 'kvdock[triton]'")
    assert runtime.registry.loaded() == {}
    with active(runtime), pytest.raises(kvdock.KVDockError, match="Triton is not installed"), kvdock.use_backend(backend.name):
        kvdock.ops.copy_blocks_(*G.pools(Memory()), [(0, 1)])


@has_triton
def test_notes_say_how_kernels_are_launched() -> None:
    (note,) = AcmeBackend().notes()
    assert note.startswith(f"Triton {importlib.import_module('triton').__version__}: ")


class Counting(AcmeBackend):
    """Keeps every spec that a kernel asks for, and compiles nothing: a launch does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.specs: list[Any] = []
        self.launched: list[tuple[int, ...]] = []
        """What each launch was called with: the grid, and arguments with tensors as addresses."""

    def without_driver(self) -> str:
        return ""

    def kernels(self) -> Any:
        from kvdock_triton.written import Launch

        def launch(spec: Any, request: kvdock.plugin.Request) -> Launch:
            self.specs.append(spec)
            note = {"run": lambda *args: self.launched.append(args)}
            return Launch([name for name, _ in spec.types], ["run({grid}, {arguments})"], note)

        made = super().kernels()
        for kernel in made.values():
            kernel.launch = launch
        return made


@pytest.fixture
def counting() -> Iterator[Counting]:
    pytest.importorskip("triton", reason="needs Triton: pip install 'kvdock[triton]'")
    backend = Counting()
    with active(runtime_of(backend), "acme"):
        yield backend


COUNTS = [1, 2, 3, 7, 8, 15, 16, 17, 100, 1024, 4095, 65_535, 65_536, 70_000]
WIDTHS = [16, 24, 48, 160, 4096]


def tokens(count: int, width: int) -> list[torch.Tensor]:
    """Return ``k`` and ``v`` out of a projection so wide."""
    rows = torch.empty(count, width, dtype=torch.bfloat16)
    return [rows[:, at : at + 8].view(count, 1, 8) for at in (0, 8)]


def test_paged_kernels_compile_once_for_all_token_counts_and_widths(counting: Counting) -> None:
    """One plan: a kernel for tensors of their own, and one for slices of a projection."""
    pools = G.pools(Memory())
    for count in COUNTS:
        for width in WIDTHS if count < 5000 else WIDTHS[:2]:
            slots = torch.arange(count)
            kvdock.ops.paged_caching_(*pools, *tokens(count, width), slots)
            kvdock.ops.gather_paged(*pools, slots, out=tokens(count, width))
        kvdock.ops.paged_caching_(*pools, *G.tokens(Memory(), [count]), slots)
        kvdock.ops.gather_paged(*pools, slots)
    assert len(counting.specs) == len(set(counting.specs)) == 3


def test_static_and_copy_kernels_compile_once(counting: Counting) -> None:
    caches, pools = [torch.zeros(64, 2, 2048, 8, dtype=torch.bfloat16) for _ in "kv"], G.pools(Memory())
    for rows, new in ((1, 1), (1, 2), (2, 1), (64, 1), (64, 1100), (3, 2047)):
        for extra in (0, 8, 248):
            k, v = (torch.empty(rows, new, 2, 8 + extra, dtype=torch.bfloat16)[..., :8].transpose(1, 2) for _ in "kv")
            kvdock.ops.static_update_(*caches, k, v, torch.zeros(rows, dtype=torch.int64))
    for count in (1, 2, 3, 16, 500):
        kvdock.ops.copy_blocks_(*pools, torch.arange(2 * count).view(count, 2))
    assert len(counting.specs) == len(set(counting.specs)) == 3  # pairs in a tensor, and a few by value


def test_blocks_in_one_piece_share_a_kernel_whatever_their_order(counting: Counting) -> None:
    """Slots before heads, or heads before slots: both are one run of memory. Blocks with gaps need other kernels."""
    g = Geometry(block=4, hk=3, dk=8, hv=5, dv=16)
    for pool, kernels in {"nhd": 1, "hnd": 1, "padded heads": 2, "padded slots": 3, "padded blocks": 4, "heads outermost": 5}.items():
        kvdock.ops.copy_blocks_(*g.pools(Memory(), pool), [(0, 1)])
        assert len(set(counting.specs)) == 2 * kernels, pool  # for pairs in a tensor, and for a few by value
    constants = dict(counting.specs[0].constants)
    runs = [(constants[f"{name}_OUTER"], constants[f"{name}_MIDDLE"], constants[f"{name}_INNER"]) for name in "KV"]
    assert runs == [(1, 1, 4 * 3 * 8 * 2 // 4), (1, 1, 4 * 5 * 16 * 2 // 4)]


def test_pairs_in_host_memory_are_launched_with_as_pairs_on_device_returns_them(
    counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes care of pinned ones: see `test_index_values`. Here the device's memory is the host's, so a copy stands for its result."""
    pools, pairs, made = G.pools(Memory()), torch.arange(40).view(20, 2), list[torch.Tensor]()

    def copied(op: str, given: torch.Tensor, num_blocks: int, device: torch.device) -> torch.Tensor:
        made.append(pairs_on_device(op, given, num_blocks, device).clone())
        return made[-1]

    monkeypatch.setattr("kvdock_triton.copy_blocks.pairs_on_device", copied)
    kvdock.ops.copy_blocks_(*pools, pairs)
    assert counting.launched[-1][4] == made[-1].data_ptr() != pairs.data_ptr()
    with pytest.raises(kvdock.IndexRangeError, match="copy_blocks_: block_pairs"):
        kvdock.ops.copy_blocks_(*pools, torch.tensor([[0, G.num_blocks]]))
    assert len(counting.launched) == 1


def test_another_alignment_class_is_another_kernel(counting: Counting) -> None:
    pools = G.pools(Memory())
    for _ in range(2):
        for offset, gap in ((0, 0), (2, 0), (4, 0), (8, 0), (0, 1), (0, 2), (0, 4)):
            k, v = (Memory().tensor(torch.bfloat16, (5, 1, 8), gaps=(0, gap, 0), offset=offset) for _ in "kv")
            kvdock.ops.paged_caching_(*pools, k, v, torch.arange(5))
    pointers = {(dict(spec.types)["k"], spec.aligned) for spec in counting.specs}
    assert {pointer for pointer, _ in pointers} == {"*i16", "*i32", "*i64"}
    assert len(set(counting.specs)) == 2 * len(pointers) == 8


class Mistuned(AcmeBackend):
    """Names a cache modifier that Triton does not know."""

    tiles = Tuning(separate=Tile(1, 2, ".nosuch"))

    def tuning(self, device: torch.device) -> Tuning:
        return self.tiles


@pytest.fixture
def sm90() -> Iterator[None]:
    """Let Triton compile for a GPU that is not there."""
    triton = pytest.importorskip("triton", reason="needs Triton: pip install 'kvdock[triton]'")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    yield
    triton.runtime.driver._active = before


@compiles
def test_a_kernel_that_does_not_compile(sm90: None) -> None:
    """The error says which op, which device, what Triton said and what helps, each time: no plan and no kernel of it is kept."""
    backend, pools = Mistuned(), G.pools(Memory())
    runtime = runtime_of(backend)
    compiled = importlib.import_module("kvdock_triton.launch").COMPILED
    before = set(compiled)
    with active(runtime, "acme"):
        for _ in range(2):
            with pytest.raises(kvdock.BackendError) as caught:
                kvdock.ops.paged_caching_(*pools, *G.tokens(Memory(), [3]), torch.arange(3))
            text = str(caught.value)
            assert text.startswith("paged_caching_: Triton could not compile paged_caching_kernel for cpu: ")
            assert "nosuch" in text
            assert "Fix: kvdock.use_backend('portable') serves the same ops without Triton" in text
            assert caught.value.__cause__ is not None
        stats = runtime.dispatcher.descriptors.stats()
        assert sum(one.size for ops in stats.values() for one in ops.values()) == 0
        assert all("STORE" in dict(spec.constants) and spec.constant("STORE") != ".nosuch" for spec, _ in set(compiled) - before)


@compiles
@has_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_no_driver_for_triton() -> None:
    """It was ready, and failed at each call."""
    text = r"has no driver for these devices \(RuntimeError: 0 active drivers.*\)\. Fix: install the Triton that is made for acme devices"
    with pytest.warns(kvdock.KVDockWarning, match=text):
        runtime = runtime_of(AcmeBackend())
    (*_, record) = runtime.registry.records()
    assert record.state.value == "unusable"
    pools = G.pools(Memory())
    with active(runtime, "acme"), pytest.raises(kvdock.BackendError, match=text):
        kvdock.ops.gather_paged(*pools, torch.arange(3))


class Of(TritonBackend):
    """Devices of some type."""

    name = device_type = "acme"

    def __init__(self, torch_type: str) -> None:
        super().__init__()
        self.torch_type = torch_type


def test_a_type_that_torch_does_not_know_is_no_hardware() -> None:
    assert Of("acme").probe() == kvdock.plugin.Probe.absent(f"torch {torch.__version__} knows no device type 'acme'")


def test_a_type_without_a_module_is_told_what_to_give_torch() -> None:
    fix = "Fix: give torch a module with device_count, synchronize, device, by torch._register_device_module"
    assert Of("meta").probe() == kvdock.plugin.Probe.unusable(f"torch.meta is not there. {fix}")


def test_a_module_without_a_guard_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "meta", SimpleNamespace(device_count=lambda: 2, synchronize=print), raising=False)
    probe = Of("meta").probe()
    assert probe.state is kvdock.plugin.ProbeState.UNUSABLE
    assert probe.reason.startswith("torch.meta has no device. Fix: give torch a module")

    class Guarded(Of):
        def device_guard(self, device: torch.device) -> Any:
            return nullcontext()

    assert Guarded("meta").probe().state is not kvdock.plugin.ProbeState.ABSENT
    assert "torch.meta" not in Guarded("meta").probe().reason, "a guard of its own needs none of torch's"


def test_where_torch_has_no_graphs_steps_stay_as_they_are() -> None:
    steps = [lambda: 1, lambda: 2]
    assert Of("cpu").capture(torch.device("cpu"), steps) is steps
