"""What is handed to Triton at a launch, how often it compiles, and which of its two launches is taken: on a GPU that is not there.

Kernels are really compiled, for an sm_90. The driver keeps what it is told to launch. What the same arguments do is tested
under the interpreter, in `tests/unit/triton`, and on GPUs, in `tests/gpu`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import kvdock
from kvdock.errors import ArgumentValueError, IndexRangeError
from kvdock.ops.api import pairs_tensor
from opskit import Geometry, Memory, active, runtime_of
from opskit.interpreted import AcmeBackend

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install 'kvdock[triton]'"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled under the interpreter"),
]

G = Geometry.even(2, 8, num_blocks=1100, block=64)
STREAM, FUNCTION = 77, 88


class Driver:
    """Triton's view of a GPU that is not there."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], dict[str, Any]]] = []
        self.utils: Any = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 2**20},
            load_binary=lambda *args: (1, FUNCTION, 32, 0, 1024),
            unload_module=lambda module: None,
        )

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, index: int | None) -> int:
        return STREAM

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Return a launcher that notes grid, and parameters by name, which come behind two hooks."""

        def launch(x: int, y: int, z: int, stream: int, function: int, packed: Any, launch_metadata: Any, *rest: Any) -> None:
            assert (stream, function) == (STREAM, FUNCTION)
            self.launches.append(((x, y, z), dict(zip(source.fn.arg_names, rest[2:], strict=True))))

        return launch


@pytest.fixture
def driver() -> Iterator[Driver]:
    """Let Triton compile for such a GPU, and `kvdock.ops` run on a backend for it."""
    config, fake = importlib.import_module("triton").runtime.driver, Driver()
    before, compiled = config._active, importlib.import_module("kvdock_triton.launch").COMPILED
    kept = dict(compiled)
    compiled.clear()
    config.set_active(fake)
    with active(runtime_of(AcmeBackend()), "acme"):
        yield fake
    for kernel, _ in compiled.values():
        kernel.module = None  # newer releases unload it when it goes, through a driver that is gone by then
    compiled.clear()
    compiled.update(kept)
    config._active = before


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list to which every compilation adds its source."""
    triton, made = importlib.import_module("triton"), list[Any]()
    real = triton.compile

    def counted(source: Any, **options: Any) -> Any:
        made.append(source)
        return real(source, **options)

    monkeypatch.setattr(triton, "compile", counted)
    return made


def test_paged_launches(driver: Driver) -> None:
    pools, slots = G.pools(Memory()), torch.arange(5, dtype=torch.int32)
    sources = {"contiguous": (1, 2), "fused qkv": (3, 1)}  # what each is launched with: tokens in a tile, and rows of the grid
    for source, (_, grid_y) in sources.items():
        k, v = G.tokens(Memory(), [5], source)
        kvdock.ops.paged_caching_(*pools, k, v, slots)
        (x, y, z), args = driver.launches[-1]
        assert (x, y, z) == (-(-5 // args["TILE"]), grid_y, 1)
        pointers = dict(zip(("k_cache", "v_cache", "k", "v", "slots"), (*pools, k, v, slots), strict=True))
        assert {name: args[name] for name in pointers} == {name: tensor.data_ptr() for name, tensor in pointers.items()}
        assert (args["tokens"], args["capacity"], args["slot_token"], args["BOTH"]) == (5, G.capacity, 1, grid_y == 1)
        assert [args[name] * 8 for name in ("k_token", "k_head", "v_token", "v_head")] == [*k.stride()[:2], *v.stride()[:2]]
        assert (args["K_BLOCK"] * 8, args["K_SLOT"] * 8, args["BLOCK_SIZE"]) == (*pools[0].stride()[:2], 64)
    got = kvdock.ops.gather_paged(*pools, slots)
    (x, y, z), args = driver.launches[-1]
    assert (y, z, args["k_out"], args["v_out"], args["tokens"]) == (2, 1, *(out.data_ptr() for out in got), 5)
    assert (args["width"], args["k_row"], args["ROWS"]) == (0, 0, False)


def few(args: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the first three pairs of blocks that are passed by value."""
    return [(args[f"source{number}"], args[f"to{number}"]) for number in range(3)]


def test_static_and_copy_launches(driver: Driver) -> None:
    caches = [torch.zeros(4, 2, 32, 8, dtype=torch.bfloat16) for _ in "kv"]
    k, v = (torch.zeros(3, 2, 5, 8, dtype=torch.bfloat16) for _ in "kv")
    lengths = torch.zeros(3, dtype=torch.int64)
    kvdock.ops.static_update_(*caches, k, v, lengths)
    assert driver.launches[-1][1]["lengths"] == lengths.data_ptr()
    assert (driver.launches[-1][1]["length"], driver.launches[-1][1]["length_row"]) == (0, 1)
    kvdock.ops.static_update_(*caches, k, v, 7)
    args = driver.launches[-1][1]
    assert (args["length"], args["lengths"], args["rows"], args["new"], args["capacity"]) == (7, 0, 3, 5, 32)
    pools, pairs = G.pools(Memory()), torch.tensor([[0, 1], [2, 3]])
    kvdock.ops.copy_blocks_(*pools, pairs)  # a few pairs of the host are passed by value
    (x, _, _), args = driver.launches[-1]
    assert (x, *few(args)) == (2 * (args["K_PIECES"] + args["V_PIECES"]), (0, 1), (2, 3), (0, 0))
    kvdock.ops.copy_blocks_(*pools, torch.arange(40).view(20, 2))
    (x, _, _), args = driver.launches[-1]
    assert (x, args["num_blocks"], args["pair_step"]) == (20 * (args["K_PIECES"] + args["V_PIECES"]), 1100, 2)
    assert (args["k_cache"], args["v_cache"]) == (pools[0].data_ptr(), pools[1].data_ptr())


def test_lists_of_blocks_that_change(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once their strides are known, pairs in host memory are read by address: padding, many, and wrong ones as at first."""
    bound = runtime_of(AcmeBackend()).dispatcher.op("copy_blocks_").bind(*G.pools(Memory()), named="acme")

    def copy(pairs: list[tuple[int, int]]) -> None:
        bound(pairs_tensor(pairs))

    lists = ([(0, 1), (2, 3)], [(5, 4)], [(-1, 2), (7, 8), (9, -1)], [(7, 8), (7, 9)])
    for pairs in lists * 3:
        copy(pairs)
        (x, _, _), args = driver.launches[-1]
        live = [pair for pair in pairs if min(pair) >= 0]
        assert (x, few(args)) == (len(live) * (args["K_PIECES"] + args["V_PIECES"]), [*live, (0, 0), (0, 0)][:3])
    count = len(driver.launches)
    copy([(-1, 2), (3, -5)])
    for wrong in ([(0, 1), (2, 1)], [(0, 1), (1, 2)]):
        with pytest.raises(ArgumentValueError, match="block_pairs"):
            copy(wrong)
    with pytest.raises(IndexRangeError, match="block id below 1100"):
        copy([(0, 1100)])
    assert len(driver.launches) == count
    with monkeypatch.context() as patch:
        patch.setattr("kvdock_triton.copy_blocks.live_pairs", pytest.fail)  # the quick way is taken
        copy([(4, 6), (8, 2)])
    assert few(driver.launches[-1][1]) == [(4, 6), (8, 2), (0, 0)]
    many = [(2 * number, 2 * number + 1) for number in range(20)]
    copy(many)
    (x, _, _), args = driver.launches[-1]
    assert (x, args["num_blocks"], args["pair_step"]) == (20 * (args["K_PIECES"] + args["V_PIECES"]), 1100, 2)


def test_attention_launches(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries: programs that share the keys, and what joins them. Many: tiles, and as few splits as fill the GPU."""
    monkeypatch.setattr(AcmeBackend, "processors", lambda self, device: 32)
    pools, table = G.pools(Memory()), torch.zeros(3, 20, dtype=torch.int32)
    q, lens = torch.zeros(3, 8, 8, dtype=torch.bfloat16), torch.tensor([5, 0, 1280])
    out, lse = kvdock.ops.paged_attention(q, *pools, table, lens, return_lse=True)
    (grid, args), (join_grid, join) = driver.launches
    programs = 3 * 2 * -(-20 * 64 // args["LEAST"])
    assert (grid, join_grid) == ((programs, 1, 1), (3 * 2 * args["SHARE"], 1, 1))
    pointers = {"q": q, "k_cache": pools[0], "v_cache": pools[1], "table": table, "lens": lens, "out": out, "lse": lse}
    assert {name: args[name] for name in pointers} == {name: tensor.data_ptr() for name, tensor in pointers.items()}
    assert [join[name] for name in ("out", "lse")] == [tensor.data_ptr() for tensor in (out, lse)]
    assert [join[name] for name in ("parts", "sums", "openers")] == [args[name] for name in ("parts", "sums", "openers")]
    assert args["sums"] - args["parts"] == 2 * programs * args["ROWS"] * 8 * 4  # behind both parts of all programs
    assert args["openers"] - args["sums"] == 2 * programs * args["ROWS"] * 4
    assert (args["queries"], args["batch"], args["room"], args["num_blocks"]) == (3, 3, 20 * 64, 1100)
    assert args["each"] * 3 * 2 == programs
    assert [args[name] * args["Q_UNIT"] for name in ("q_token", "q_head")] == [*q.stride()[:2]]
    cu, q = torch.tensor([0, 300, 300, 301]), torch.zeros(301, 8, 8, dtype=torch.bfloat16)
    kvdock.ops.paged_attention(q, *pools, table, lens, cu_query_lens=cu)
    grid, args = driver.launches[-1]
    assert (args["splits"], grid) == (1, ((301 // args["TILE"] + 3) * 2, 1, 1))
    kvdock.ops.paged_attention(q, *pools, table, lens, cu_query_lens=cu, max_query_len=4)
    (grid, args), (join_grid, join) = driver.launches[-2:]
    assert (grid, join_grid) == ((programs, 1, 1), (3 * 2 * args["TILE"] * args["SHARE"], 1, 1))
    assert args["cu"] == cu.data_ptr()


def test_launches_with_maps_of_the_caches(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper: maps are made once for the pools of each layer, by the driver, and no more programs run at once than are to."""
    from triton.backends.nvidia.driver import make_launcher

    from kvdock_triton.tuning import HOPPER

    direct, calls, maps = importlib.import_module("kvdock_triton.direct"), list[tuple[Any, ...]](), list[tuple[Any, ...]]()

    def launcher(source: Any, metadata: Any) -> Any:
        make_launcher({}, source.signature, metadata.tensordesc_meta)  # Triton's own, which refuses what does not fit
        return SimpleNamespace(launch=lambda *args: calls.append((len(source.signature), *args)))

    driver.utils.fill_tma_descriptor = lambda *args: maps.append(args) or f"map {len(maps)}"
    monkeypatch.setattr(AcmeBackend, "tuning", lambda self, device: HOPPER)
    monkeypatch.setattr("triton.backends.nvidia.driver.CudaLauncher", launcher)
    for name, value in {"why_not": str, "fits": lambda kernel, driver: True}.items():
        monkeypatch.setattr(direct, name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", int, raising=False)
    layers = [G.pools(Memory()) for _ in range(2)]
    q, table, lens = torch.zeros(3, 8, 8, dtype=torch.bfloat16), torch.zeros(3, 20, dtype=torch.int32), torch.tensor([5, 0, 1280])
    for pools in layers * 2:
        kvdock.ops.paged_attention(q, *pools, table, lens)
    assert [at for at, *_ in maps] == [pool.data_ptr() for pools in layers for pool in pools]
    block, slot, head, _ = layers[0][0].stride()
    assert {tuple(map(tuple, rest[3:6])) for _, *rest in maps} == {((1, 1, 16, 16), (1100, 2, 64, 8), (block, head, slot, 1))}
    attends, joins = calls[::2], calls[1::2]
    assert [call[-18] for call in attends] == ["map 1", "map 3"] * 2
    assert attends[0][-9:] == ("map 2", 1100, 2, 64, 8, block, head, slot, 1)
    for number, *args in calls:
        assert len(args) == 3 + 10 + number
    assert {call[7] for call in attends} == {False}
    assert {call[7] for call in joins} == {True}
    most = driver.utils.get_device_properties(0)["max_shared_mem"]
    assert {most // call[10][2] for call in attends} == {HOPPER.decode.programs}
    assert all(call[10][2] < most // 32 for call in joins)


def meant(grid: tuple[int, ...], args: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Drop what says nothing: which backend's count it is, and the steps of sizes of 1, which may be any."""
    idle = ["skipped"]
    if args.get("rows") == 1 or args.get("width") == args.get("tokens"):
        idle += ["k_row", "v_row", "slot_row"]
    if args.get("new") == 1:
        idle += ["k_position", "v_position"]
    if args.get("width") == 1:
        idle += ["k_token", "v_token", "slot_token"]
    return grid, {name: value for name, value in args.items() if name not in idle}


def test_settled_launches_are_those_of_whole_calls(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `fix` returns launches, at every size, what a call of the descriptor does: same grid, same arguments."""
    monkeypatch.setattr("kvdock.ops.signatures.FIRST_WORTH", 1)
    runtime, whole = runtime_of(AcmeBackend()), runtime_of(AcmeBackend())
    pools, caches = G.pools(Memory()), [torch.zeros(4, 2, 32, 8, dtype=torch.bfloat16) for _ in "kv"]
    memory = torch.zeros(8, 64, 2, 48, dtype=torch.bfloat16)
    calls: list[tuple[str, tuple[Any, ...]]] = []
    for rows, width in ((1, 5), (3, 5), (1, 1), (2, 1), (3, 7), (3, 5), (1, 9)):
        k, v = (memory[:rows, :width, :, at : at + 8] for at in (0, 16))
        slots, lengths = torch.arange(rows * width).view(rows, width), torch.zeros(rows, dtype=torch.int64)
        outs = [torch.empty(rows, width, 2, 8, dtype=torch.bfloat16) for _ in "kv"]
        calls += [
            ("paged_caching_", (*pools, k, v, slots, None, None)),
            ("paged_caching_", (*pools, k[0], v[0], slots[0], None, None)),
            ("gather_paged", (*pools, slots, None, None, *outs)),
            ("gather_paged", (*pools, slots[0], None, None, *(out[0] for out in outs))),
            ("static_update_", (*caches, k.transpose(1, 2), v.transpose(1, 2), 3)),
            ("static_update_", (*caches, k.transpose(1, 2), v.transpose(1, 2), lengths)),
            ("static_update_", (*caches, k.transpose(1, 2), v.transpose(1, 2), lengths[0])),
        ]
    with kvdock.use_backend("acme"):
        for op, values in calls:
            whole.dispatcher.op(op).run_slowly(values, "acme")
    expected = [meant(*launch) for launch in driver.launches]
    bound = {op: runtime.dispatcher.op(op).bind(*values[:2], named="acme") for op, values in calls}
    for _ in range(3):
        driver.launches.clear()
        for op, values in calls:
            bound[op](*values[2:])
        assert [meant(*launch) for launch in driver.launches] == expected


def test_another_token_count_or_width_compiles_nothing(driver: Driver, compilations: list[Any]) -> None:
    """The same memory for all, since nothing is run: up to 70,000 tokens out of projections of several widths."""
    pools, memory = G.pools(Memory()), torch.zeros(70_000 * 96, dtype=torch.bfloat16)
    for count in [*range(1, 34), 100, 1023, 1024, 65_535, 65_536, 70_000]:
        slots = torch.zeros(count, dtype=torch.int64)
        for width in (16, 32, 48, 96):
            k, v = (memory[at : at + (count - 1) * width + 16].as_strided((count, 2, 8), (width, 8, 1)) for at in (0, 0))
            kvdock.ops.paged_caching_(*pools, k, v, slots)
        if count % 2 == 0:
            kvdock.ops.paged_caching_(*pools, k.view(2, count // 2, 2, 8), v.view(2, count // 2, 2, 8), slots.view(2, -1))
    names = [source.fn.__name__ for source in compilations]
    assert names == ["paged_caching_kernel"] * 4  # 1-D and 2-D slots, each for tensors of their own and for slices
    assert len(driver.launches) == 39 * 4 + 20


def test_threads_share_what_is_compiled(driver: Driver, compilations: list[Any]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    pools, slots = G.pools(Memory()), torch.arange(3)
    runtime = runtime_of(AcmeBackend())

    def call(_: int) -> None:
        with kvdock.use_backend("acme"):
            runtime.dispatcher.op("gather_paged")(*pools, slots, None, None, *G.tokens(Memory(), [3]))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(32)))
    assert len(compilations) == 1
    assert len(driver.launches) == 32


def test_a_forked_child_is_not_locked_out() -> None:
    launch = importlib.import_module("kvdock_triton.launch")
    is_held, is_done = threading.Event(), threading.Event()

    def hold() -> None:
        with launch._lock:
            is_held.set()
            is_done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert is_held.wait(60)
        child = os.fork()
        if child == 0:
            os._exit(0 if launch._lock.acquire(timeout=10) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        is_done.set()
        holder.join()


def test_a_call_in_the_middle_of_another_does_not_wait_for_itself() -> None:
    launch = importlib.import_module("kvdock_triton.launch")
    with launch._lock:
        assert launch._lock.acquire(timeout=10), "a signal's handler would wait forever"
        launch._lock.release()


RELEASES = {
    "3.6.0": "",
    "3.6.1+git": "",
    "3.7.1": "direct ones were run on 3.6 only",
    "3.9.0": "direct ones were run on 3.6 only",
    "4.0.0": "direct ones were run on 3.6 only",
}


@pytest.mark.parametrize(("release", "reason"), RELEASES.items(), ids=RELEASES)
def test_releases_on_which_the_private_launcher_is_called(monkeypatch: pytest.MonkeyPatch, release: str, reason: str) -> None:
    direct, launch = (importlib.import_module(f"kvdock_triton.{name}") for name in ("direct", "launch"))
    monkeypatch.setattr("triton.__version__", release)
    monkeypatch.setattr("torch.version.cuda", "12.8")
    for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice"):
        monkeypatch.setattr(torch._C, name, None, raising=False)
    assert direct.why_not() == reason
    how = f"public launches; {reason}" if reason else "direct launches on NVIDIA GPUs"
    assert AcmeBackend().notes() == [launch.describe_launch()] == [f"Triton {release}: {how}"]


def test_without_what_it_needs_launches_are_public(monkeypatch: pytest.MonkeyPatch) -> None:
    direct = importlib.import_module("kvdock_triton.direct")
    monkeypatch.setattr("triton.__version__", "3.6.0")
    monkeypatch.setattr("torch.version.cuda", None)
    assert direct.why_not() == "direct ones are for NVIDIA GPUs"
    monkeypatch.setattr("torch.version.cuda", "12.8")
    monkeypatch.setattr(direct, "_PRIVATE", ((torch._C, "_quick_stream"),))
    assert direct.why_not() == "direct ones need _quick_stream, which is gone"


class CudaDriver(Driver):
    """One whose kernels are launched directly; its name is what is asked for."""


def test_kernels_that_need_more_are_launched_publicly() -> None:
    direct = importlib.import_module("kvdock_triton.direct")
    bare = {"global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False}
    assert direct.fits(SimpleNamespace(metadata=SimpleNamespace(**bare)), CudaDriver())
    assert not direct.fits(SimpleNamespace(metadata=SimpleNamespace(**bare)), Driver())
    for name in bare:
        assert not direct.fits(SimpleNamespace(metadata=SimpleNamespace(**{**bare, name: 1})), CudaDriver()), name


class Metadata(NamedTuple):
    """What a compiled kernel says of itself."""

    launch_pdl: bool
    tensordesc_meta: Sequence[Any] = ()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("devices", [1, 2])
def test_direct_launches(monkeypatch: pytest.MonkeyPatch, devices: int, early: bool) -> None:
    """Grid, stream and parameters in Triton's order; with several devices under a guard when another is current."""
    direct, calls, current = importlib.import_module("kvdock_triton.direct"), list[tuple[Any, ...]](), [1]

    @contextlib.contextmanager
    def guard(index: int) -> Iterator[None]:
        calls.append(("guard", index))
        yield

    made = SimpleNamespace(launch=lambda *args: calls.append(args))
    monkeypatch.setattr("triton.backends.nvidia.driver.CudaLauncher", lambda source, metadata: made)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM + index, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    kernel = SimpleNamespace(_init_handles=lambda: None, metadata=Metadata(early), function=FUNCTION, packed_metadata="packed")
    launch = direct.build(kernel, None, [("k", "*i32"), ("v", "*i32"), ("tokens", "i64")], 1)
    head = (STREAM + 1, FUNCTION, False, early, None, None, "packed", None, None, None)
    launch.run(5, 2, 100, 200, 9)
    launch.fix(["k", "v", "rows"], "-(-rows // tile)", "1", {"tokens": "rows * 2", "tile": 4})(300, 400, 7)
    assert calls == [(5, 2, 1, *head, 100, 200, 9), (2, 1, 1, *head, 300, 400, 14)]
    current[0] = 0
    launch.run(5, 2, 100, 200, 9)
    assert calls[2:] == [*([("guard", 1)] if devices > 1 else []), (5, 2, 1, *head, 100, 200, 9)]


def test_plans_share_the_direct_launch_of_their_kernel(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `CudaLauncher` loads a C module again, whose names Python keeps: as many as kernels, and not as plans."""
    direct, launches, calls = importlib.import_module("kvdock_triton.direct"), list[Any](), list[tuple[Any, ...]]()

    def launcher(source: Any, metadata: Any) -> Any:
        launches.append(source)
        return SimpleNamespace(launch=lambda *args: calls.append(args))

    monkeypatch.setattr("triton.backends.nvidia.driver.CudaLauncher", launcher)
    for name, value in {"why_not": str, "fits": lambda kernel, driver: True}.items():
        monkeypatch.setattr(direct, name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", int, raising=False)
    for blocks in range(3, 13):  # a plan each
        kvdock.ops.paged_caching_(*Geometry.even(2, 8, num_blocks=blocks).pools(Memory()), *G.tokens(Memory(), [3]), torch.arange(3))
    compiled = importlib.import_module("kvdock_triton.launch").COMPILED
    assert (len(launches), len(calls)) == (len(compiled), 10)


OLD = """
import triton; triton.__version__ = "3.5.1"
import kvdock
from opskit import runtime_of
from opskit.interpreted import AcmeBackend
*_, record = runtime_of(AcmeBackend()).registry.records()
print(record.state.value, record.reason, sep=": ")
"""


def test_a_triton_that_is_too_old_makes_the_backend_unusable() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", OLD], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == (
        "unusable: kernels() raised ImportError: Triton 3.5.1 is too old. Fix: pip install 'kvdock[triton]', which asks for 3.6 or newer\n"
    )
