"""Settings of the process: what is compared, how a change is told, and that everything is put back."""

from __future__ import annotations

import builtins
import ctypes
import gc
import io
import locale
import os
import random
import resource
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import kvdock
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.left_alone import folder_left_empty, nothing_frozen
from kvdock_conformance.checking.settings import ProcessSettings, renewed, unchanged


@pytest.fixture(autouse=True)
def own_filters() -> Iterator[None]:
    """Pytest's filters of warnings are its own."""
    with warnings.catch_warnings():
        yield


def _without_reduced_precision() -> None:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _with_fewer_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


def _default_device() -> None:
    torch.set_default_device("meta")


CHANGES: list[tuple[str, Callable[[], object]]] = [
    ("the current directory", lambda: os.chdir("/")),
    ("warnings.filters", lambda: warnings.simplefilter("ignore")),
    ("warnings.filters", warnings.resetwarnings),
    ("the state of Python's random numbers", random.random),
    ("the state of torch's random numbers", lambda: torch.rand(1)),
    ("the floating-point mode", lambda: torch.set_flush_denormal(True)),
    ("traps of numbers", lambda: ctypes.CDLL(None).feenableexcept(1)),  # 0 / 0 ends the process
    ("the locale", lambda: locale.setlocale(locale.LC_ALL, "C" if locale.setlocale(locale.LC_ALL) != "C" else "C.UTF-8")),
    ("the garbage collector", gc.disable),
    ("gc.get_threshold()", lambda: gc.set_threshold(1)),
    ("torch.get_default_dtype()", lambda: torch.set_default_dtype(torch.float64)),
    ("torch.get_default_device()", _default_device),
    ("torch.is_grad_enabled()", lambda: torch.set_grad_enabled(False)),
    ("torch.get_num_threads()", lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
    ("sys.getrecursionlimit()", lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1)),
    ("numpy.geterr()", lambda: np.seterr(all="raise")),
    ("numpy.get_printoptions()", lambda: np.set_printoptions(precision=3)),
    ("torch.get_deterministic_debug_mode()", lambda: torch.set_deterministic_debug_mode("warn")),
    ("torch._C._get_cublas_allow_bf16_reduced_precision_reduction()", _without_reduced_precision),
    ("torch's options for printing", lambda: vars(torch._tensor_str.PRINT_OPTS).update(precision=3)),
    ("sys.stdin, sys.stdout and sys.stderr", lambda: setattr(sys, "stdout", io.StringIO())),
    ("what handles signals", lambda: signal.signal(signal.SIGUSR2, print)),
    ("the running timers", lambda: signal.setitimer(signal.ITIMER_PROF, 1000)),
    ("the processors that this thread may use", lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})),
    ("the limits of resources", _with_fewer_files),
    ("status of the thread: Umask", lambda: os.umask(0o007)),
    ("builtins.print", lambda: setattr(builtins, "print", len)),
    ("numpy.zeros", lambda: setattr(np, "zeros", np.ones)),
    ("environment variable HOME", lambda: os.environ.update(HOME="/nowhere")),
    ("C's environment, where os.environ shows another", lambda: os.putenv("HOME", "/nowhere")),
    ("C's environment, where os.environ shows another", lambda: os.putenv("KVDOCK_OF_C", "1")),
    ("C's environment, where os.environ shows another", lambda: os.unsetenv("HOME")),
    ("environment variable HOME", lambda: os.environ.pop("HOME")),
    ("environment variable KVDOCK NEW", lambda: os.environ.update({"KVDOCK NEW": "1"})),
    ("kvdock.ops.copy_blocks_", lambda: setattr(kvdock.ops, "copy_blocks_", print)),
    ("kvdock.ops.copy_blocks_", lambda: delattr(kvdock.ops, "copy_blocks_")),
]


def test_a_thread_that_is_left_is_told_and_one_that_ends_is_no_change() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="left by acme", daemon=True)
    with pytest.raises(NonconformanceError) as caught, unchanged(workers=False):
        thread.start()
    assert (caught.value.expected, caught.value.got) == ("nothing", "'left by acme'")
    with unchanged():
        end.set()
        thread.join()
        worker = threading.Thread(target=len, args=("",))
        worker.start()
        worker.join()


@pytest.mark.parametrize("rounding", range(1, 4))
def test_rounding_is_part_of_the_floating_point_mode(rounding: int) -> None:
    libm = ctypes.CDLL("libm.so.6")
    assert ProcessSettings.floating_point() == {"subnormal numbers": True, "rounds to nearest": True}
    try:
        if libm.fesetround(0x400 * rounding):
            pytest.skip("this processor numbers the modes otherwise")
        found = ProcessSettings.floating_point()
    finally:
        libm.fesetround(0)
    assert found == {"subnormal numbers": True, "rounds to nearest": False}


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=[f"{number} {name}" for number, (name, _) in enumerate(CHANGES)])
def test_a_change_is_told_and_put_back(name: str, change: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/root")
    assert kvdock.ops.copy_blocks_, "which is imported when it is asked for"
    if name == "the processors that this thread may use" and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is one only")
    before = ProcessSettings()
    with pytest.raises(NonconformanceError) as caught, unchanged():
        change()
    assert caught.value.what == f"{name} behind the calls"
    assert caught.value.expected != caught.value.got
    assert before.changes() == []
    assert ProcessSettings().values == before.values


def _change_and_raise() -> None:
    torch.set_default_dtype(torch.float16)
    os.environ["KVDOCK_NEW"] = "1"
    raise OSError("mine")


def test_what_a_case_raises_counts_more_and_all_is_put_back_too() -> None:
    before = ProcessSettings()
    with pytest.raises(OSError, match="mine"), unchanged():
        _change_and_raise()
    assert before.changes() == []


def test_what_needs_a_device_or_arguments_or_is_deprecated_is_not_asked() -> None:
    names = ProcessSettings.pairs()
    assert {"sys.gettrace()", "torch.is_grad_enabled()", "torch._C._get_cudnn_benchmark()", "socket.getdefaulttimeout()"} < set(names)
    assert not [name for name in names if "preferred" in name or "autocast_cpu" in name or "autocast_dtype" in name or "rng" in name]


def test_the_same_numbers_come_again() -> None:
    drawn: list[object] = []
    for _ in range(2):
        with pytest.raises(NonconformanceError), unchanged():
            drawn.append((random.random(), torch.rand(1).item()))  # noqa: S311 - nothing secret
    assert drawn[0] == drawn[1]


def _move_to_nowhere(folder: Path) -> None:
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()


def test_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(NonconformanceError, match=r"the current directory behind the calls.*got 'a folder that is gone'"), unchanged():
        _move_to_nowhere(tmp_path / "gone")
    assert os.getcwd()


def test_what_kvdock_imports_meanwhile_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made = types.ModuleType("kvdock.made_by_a_test")
    vars(made)["Thing"] = type("Thing", (), {})
    with unchanged():
        monkeypatch.setitem(sys.modules, made.__name__, made)
        monkeypatch.setattr(kvdock, "another", print, raising=False)


def test_values_are_told_as_text_that_can_be_read() -> None:
    told = ProcessSettings.told({"short": "x", "long": "y" * 5000}, "long")
    assert len(told) < 250
    assert told.startswith("'yyy")
    assert ProcessSettings.told({"short": "x"}, "short") == "'x'"
    assert ProcessSettings.told({}, "short") == "nothing"


def test_a_filter_that_was_put_back_works(recwarn: pytest.WarningsRecorder) -> None:
    warnings.simplefilter("error", UserWarning)
    with pytest.raises(NonconformanceError), unchanged():
        warnings.simplefilter("ignore")
    with pytest.raises(UserWarning):
        warnings.warn("heard", UserWarning, stacklevel=1)


@pytest.mark.parametrize(("number", "is_told"), [(signal.SIGXFSZ, False), (signal.SIGTERM, False), (signal.SIGTTIN, True)])
def test_what_the_system_does_with_a_signal_is_told_unless_compilers_take_it(number: int, is_told: bool) -> None:
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    was = libc.signal(number, 0)
    try:
        with pytest.raises(NonconformanceError, match="SigIgn") if is_told else unchanged(), unchanged():
            libc.signal(number, 1)
    finally:
        libc.signal(number, was)


def test_settings_that_no_case_has_changed_serve_the_next_one() -> None:
    before = ProcessSettings()
    with unchanged(before=before):
        pass
    assert renewed(before) is before


def test_what_kvdock_brings_meanwhile_is_watched_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ProcessSettings()
    with unchanged(before=before):
        monkeypatch.setattr(kvdock, "another", print, raising=False)
    with pytest.raises(NonconformanceError, match=r"kvdock\.another behind the calls"), unchanged(before=renewed(before)):
        monkeypatch.setattr(kvdock, "another", len, raising=False)
    with unchanged(before=renewed(before)):
        monkeypatch.setitem(sys.modules, "kvdock.made_by_a_test", types.ModuleType("kvdock.made_by_a_test"))
    assert "kvdock.made_by_a_test" in renewed(before).code


def test_what_changes_between_two_cases_is_told_behind_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ProcessSettings()
    with unchanged(before=before):
        pass
    monkeypatch.setenv("KVDOCK_MADE_BY_A_TEST", "1")
    with pytest.raises(NonconformanceError, match="environment variable KVDOCK_MADE_BY_A_TEST"), unchanged(before=renewed(before)):
        pass


def test_what_runtimes_set_in_the_environment_of_c_is_theirs() -> None:
    with unchanged():
        os.putenv("__KMP_REGISTERED_LIB_1", "1")
    os.unsetenv("__KMP_REGISTERED_LIB_1")


def leave(*names: str) -> None:
    with folder_left_empty():
        assert os.listdir() == []
        for name in names:
            Path(name).touch()


def test_a_file_in_the_current_folder_is_named_and_gone_again() -> None:
    before = os.getcwd()
    with pytest.raises(NonconformanceError, match=r"the current folder behind calls: expected empty, as before, got a, b"):
        leave("b", "a")
    assert os.getcwd() == before
    leave()
    assert os.getcwd() == before


def test_what_is_frozen_behind_calls_is_told() -> None:
    def freeze() -> None:
        with nothing_frozen():
            kept.extend([] for _ in range(99))
            gc.freeze()

    kept: list[list[object]] = []
    with pytest.raises(NonconformanceError, match="objects that are frozen behind calls: expected"):
        freeze()
