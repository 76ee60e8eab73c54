"""Whatever a plugin does after it was loaded: the error names the backend, the question, what should have come, and the cause."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import kvdock
from kvdock.cli.backends import describe
from kvdock.errors import IndexRangeError, PluginError
from kvdock.plugins.registry import Registry
from support_plugins import InProcessBackend, plugin

OP = "paged_caching_"
HOST = torch.device("cpu")


class Plan(kvdock.plugin.Descriptor):
    uses_autograd = False

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        self.call()


class Answers(kvdock.plugin.Kernel):
    """A kernel whose every answer the test decides."""

    def __init__(self, supports: Callable[[], Any] = list, prepare: Callable[[], Any] = lambda: Plan(lambda: None)) -> None:
        self._supports, self._prepare = supports, prepare

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        return self._supports()  # type: ignore[no-any-return]

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        return self._prepare()  # type: ignore[no-any-return]


def raiser(error: BaseException) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        raise error

    return call


def runtime(kernel: kvdock.plugin.Kernel, **methods: Any) -> kvdock.Runtime:
    backend = InProcessBackend("acme", claims=("cpu",), devices=("cpu",), kernels={OP: kernel})
    for name, method in methods.items():
        setattr(backend, name, method)
    registry = Registry({"KVDOCK_DISABLE_AUTOLOAD": "1"})
    registry.register(plugin(backend), "acme")
    return kvdock.Runtime(registry)


def call(made: kvdock.Runtime) -> None:
    pool, rows = torch.zeros(2, 2, 4, 1, 8), torch.ones(2, 3, 1, 8)
    made.dispatcher.op(OP)(*pool, *rows, torch.arange(3), None, None)


BOOM = RuntimeError("as planned")
KERNELS = {
    "supports None": (
        Answers(supports=lambda: None),
        "supports() of its kernel for paged_caching_",
        "a list of reasons",
        "None (NoneType)",
    ),
    "supports a text": (Answers(supports=lambda: "too new"), "supports() of its kernel", "a list of reasons", "'too new' (str)"),
    "supports numbers": (Answers(supports=lambda: [3]), "supports() of its kernel", "a list of reasons", "[3] (list)"),
    "supports raises": (Answers(supports=raiser(BOOM)), "supports() of its kernel", "a list of reasons", "RuntimeError: as planned"),
    "supports exits": (Answers(supports=lambda: sys.exit(3)), "supports() of its kernel", "a list of reasons", "SystemExit: 3"),
    "prepare None": (Answers(prepare=lambda: None), "prepare() of its kernel for paged_caching_", "a Descriptor", "None (NoneType)"),
    "prepare a function": (Answers(prepare=lambda: print), "prepare() of its kernel", "a Descriptor", "(builtin_function_or_method)"),
    "prepare raises": (Answers(prepare=raiser(KeyError("block"))), "prepare() of its kernel", "a Descriptor", "KeyError: 'block'"),
}


@pytest.mark.parametrize("case", KERNELS)
def test_a_kernel_that_does_not_keep_to_the_contract_is_named(case: str) -> None:
    kernel, question, expected, got = KERNELS[case]
    with pytest.raises(PluginError) as caught:
        call(runtime(kernel))
    text = str(caught.value)
    assert text.startswith(f"backend 'acme': {question}"), text
    assert f"expected {expected}" in text
    assert got in text
    assert "Fix: report it to the plugin's author" in text
    if "raises" in case:
        assert caught.value.__cause__ is not None, "and where it was raised is in the traceback"


@contextlib.contextmanager
def no_guard(device: torch.device) -> Iterator[None]:
    raise OSError("driver went away")
    yield


BACKENDS = {
    "is_capturing": (raiser(BOOM), "is_capturing(cpu): expected a bool, got RuntimeError: as planned"),
    "device_guard": (no_guard, "device_guard(cpu): expected a context manager, got OSError: driver went away"),
}


@pytest.mark.parametrize("method", BACKENDS)
def test_a_backend_that_raises_while_an_op_is_prepared_is_named(method: str) -> None:
    answer, text = BACKENDS[method]
    with pytest.raises(PluginError) as caught:
        call(runtime(Answers(), **{method: answer}))
    assert f"backend 'acme': {text}" in str(caught.value)


def test_a_guard_that_is_none_and_counts_that_are_none_are_named() -> None:
    with pytest.raises(PluginError, match=r"backend 'acme': device_guard\(cpu\): expected a context manager, got TypeError"):
        call(runtime(Answers(), device_guard=lambda device: None))
    with pytest.raises(PluginError, match=r"backend 'acme': skipped_writes\(cpu\): expected an int, got None \(NoneType\)"):
        runtime(Answers(), skipped_writes=lambda device: None).skipped_writes("cpu")


def test_errors_of_the_contract_and_of_memory_come_as_they_are_with_a_note() -> None:
    for error in (
        IndexRangeError("slot", got=7, fix="none"),
        torch.OutOfMemoryError("none left"),
        kvdock.BackendError("compiler", got="x"),
    ):
        with pytest.raises(type(error)) as caught:
            call(runtime(Answers(prepare=raiser(error))))
        assert caught.value is error
        assert error.__notes__[0] == "raised by prepare() of its kernel for paged_caching_ of backend 'acme'"


def test_devices_that_raise_are_named_where_the_backend_is() -> None:
    made = runtime(Answers(), devices=raiser(BOOM))
    call(made)
    with pytest.raises(PluginError, match=r"backend 'acme': devices\(\): expected a list of torch.device, got RuntimeError: as planned"):
        made.registry.choose(OP, HOST, "acme")


@pytest.mark.parametrize("devices", [raiser(BOOM), raiser(SystemExit(2)), lambda: None, lambda: ["cpu"]])
def test_one_that_cannot_list_its_devices_does_not_hide_the_others(devices: Callable[[], Any]) -> None:
    made = runtime(Answers(), devices=devices)
    made.registry.register(plugin(InProcessBackend("fine", devices=("meta",))), "fine")
    rows = {row["name"]: row for row in describe(made.registry)}
    assert rows["fine"]["devices"] == ["meta"]
    assert rows["acme"]["devices"][0].startswith("backend 'acme': devices(): expected a list of torch.device, got ")


class Panic(BaseException):
    """What a library in Rust raises is no Exception."""


@pytest.mark.parametrize(
    ("claims", "got"),
    [
        (raiser(SystemExit(2)), "SystemExit: 2"),
        (raiser(Panic("unwrap of None")), "Panic: unwrap of None"),
        (lambda device: None, "None (NoneType)"),
        (lambda device: "no", "'no' (str)"),
        (lambda device: torch.ones(2), "tensor([1., 1.]) (Tensor)"),
    ],
    ids=["exits", "panics", "none", "text", "tensor"],
)
def test_a_claim_that_is_no_answer_is_none_and_ends_nothing(claims: Callable[..., Any], got: str) -> None:
    with pytest.raises(kvdock.NoBackendError) as caught:
        call(runtime(Answers(), claims=claims))
    assert f"acme (backend 'acme': claims(cpu): expected a bool, got {got}. Fix: " in str(caught.value)


@pytest.mark.parametrize(
    "kernel", [Answers(supports=raiser(Panic("oh"))), Answers(prepare=raiser(Panic("oh")))], ids=["supports", "prepare"]
)
def test_a_panic_of_a_kernel_is_the_plugins_error(kernel: kvdock.plugin.Kernel) -> None:
    with pytest.raises(PluginError, match=r"backend 'acme': \w+\(\) of its kernel for paged_caching_: expected .*, got Panic: oh"):
        call(runtime(kernel))


def test_ctrl_c_is_no_fault_of_a_plugin() -> None:
    with pytest.raises(KeyboardInterrupt):
        call(runtime(Answers(supports=raiser(KeyboardInterrupt()))))


@pytest.mark.parametrize("repeats", [1, 30])
def test_what_a_call_raises_says_who_served_it(repeats: int) -> None:
    calls = iter([*[lambda: None] * (repeats - 1), raiser(ZeroDivisionError("by accident"))])
    made = runtime(Answers(prepare=lambda: Plan(lambda: next(calls)())))
    for _ in range(repeats - 1):
        call(made)
    with pytest.raises(ZeroDivisionError) as caught:
        call(made)
    assert caught.value.__notes__ == [f"paged_caching_ was served by 'acme', by a plan of {__name__}.Answers"]
    assert "was served by 'acme'" in "".join(traceback.format_exception(caught.value))


def test_an_error_of_the_contract_in_a_call_needs_no_note() -> None:
    error = IndexRangeError("paged_caching_: slot_mapping[0]", got=99, fix="none")
    with pytest.raises(IndexRangeError) as caught:
        call(runtime(Answers(prepare=lambda: Plan(raiser(error)))))
    assert not hasattr(caught.value, "__notes__")


def test_bound_calls_say_it_too() -> None:
    made = runtime(Answers(prepare=lambda: Plan(raiser(ZeroDivisionError()))))
    write = made.dispatcher.op(OP).bind(*torch.zeros(2, 2, 4, 1, 8), named="acme")
    with pytest.raises(ZeroDivisionError) as caught:
        write(*torch.ones(2, 3, 1, 8), torch.arange(3), None, None)
    assert "was served by 'acme'" in caught.value.__notes__[0]
