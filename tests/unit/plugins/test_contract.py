"""Every way of not keeping to the contract is refused with expected and got."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

import kvdock
from kvdock.plugin import Capabilities, Probe
from kvdock.plugins import contract
from kvdock.plugins.contract import BrokenContractError
from support_plugins import InProcessBackend, module, plugin


def refused(call: Any, *args: object) -> str:
    with pytest.raises(BrokenContractError) as caught:
        call(*args)
    return str(caught.value)


@pytest.mark.parametrize(
    ("api", "got"),
    [
        ((2, 0), "(2, 0)"),
        ((0, 9), "(0, 9)"),
        ((1, 1), "(1, 1)"),
        ("1.0", "'1.0'"),
        ((1,), "(1,)"),
        ([1, 0], "[1, 0]"),
        ((1, True), "(1, True)"),
    ],
)
def test_version_that_does_not_fit(api: object, got: str) -> None:
    assert refused(contract.check_api, plugin(api=api)).startswith(
        f"KVDOCK_API: expected (1, 0), as a module constant beside the hook, got {got}. Fix: "
    )


def test_older_minor_version_fits_and_newer_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "KVDOCK_API", (1, 4))
    contract.check_api(plugin(api=(1, 0)))
    contract.check_api(plugin(api=(1, 4)))
    assert "expected (1, 0) to (1, 4), as" in refused(contract.check_api, plugin(api=(1, 5)))


def test_object_takes_the_version_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "acme_objects", module("acme_objects", KVDOCK_API=(1, 0)))
    kind = type("Plugin", (), {"__module__": "acme_objects"})
    contract.check_api(kind())
    contract.check_api(kind)


def test_hooks_are_found_on_modules_and_objects() -> None:
    class Plugin:
        @kvdock.plugin.hookimpl
        def kvdock_backends(self) -> list[kvdock.plugin.Backend]:
            return [InProcessBackend("acme")]

    for made in (plugin(InProcessBackend("acme")), Plugin()):
        hooks = contract.find_hooks(made, "acme")
        assert [backend.name for backend in hooks["kvdock_backends"][0]()] == ["acme"]


def test_hook_under_another_name_of_function() -> None:
    @kvdock.plugin.hookimpl(specname="kvdock_backends")
    def ours() -> list[kvdock.plugin.Backend]:
        return []

    assert set(contract.find_hooks(module("m", ours=ours), "m")) == {"kvdock_backends"}


def test_hook_without_the_mark_says_so() -> None:
    made = types.ModuleType("m")
    made.kvdock_backends = list  # type: ignore[attr-defined]
    assert refused(contract.find_hooks, made, "m").endswith("got none. Fix: mark kvdock_backends with @kvdock.plugin.hookimpl")


def test_optional_hook_of_a_later_version_is_ignored() -> None:
    made = plugin(InProcessBackend("acme"))
    made.kvdock_later = kvdock.plugin.hookimpl(optionalhook=True)(lambda: None)  # type: ignore[attr-defined]
    assert set(contract.find_hooks(made, "m")) == {"kvdock_backends"}


def test_unknown_hook_unlike_any() -> None:
    text = refused(contract.find_hooks, module("m", kvdock_x=lambda: None), "m")
    assert text.endswith("got kvdock_x. Fix: remove it, or mark it @hookimpl(optionalhook=True)")


RESERVED = "Unnamed.name: expected another name than 'portable', which means kvdock's own kernels, got 'portable'"


class Unnamed(InProcessBackend):
    def __init__(self, **attributes: Any) -> None:
        super().__init__("acme")
        for name, value in attributes.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "kvdock_backends(): expected a list of Backend objects, got None (NoneType)"),
        ("acme", "kvdock_backends(): expected a list of Backend objects, got 'acme' (str)"),
        ([InProcessBackend], "kvdock_backends()[0]: expected a Backend, got the class InProcessBackend (not an object of it)"),
        ([InProcessBackend("a"), 3], "kvdock_backends()[1]: expected a Backend, got 3 (int)"),
        ([Unnamed(name="a b")], "Unnamed.name: expected a str of letters, digits, '.', '_' and '-', got 'a b' (str)"),
        ([Unnamed(name=None)], "Unnamed.name: expected a str of letters, digits, '.', '_' and '-', got None (NoneType)"),
        ([Unnamed(device_type="NPU")], "Unnamed.device_type: expected a str of lower-case letters, digits and '_', got 'NPU' (str)"),
        (
            [Unnamed(name="portable")],
            "Unnamed.name: expected another name than 'portable', which means kvdock's own kernels, got 'portable'",
        ),
    ],
)
def test_what_is_no_list_of_backends(value: object, text: str) -> None:
    assert refused(contract.check_backends, value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([], "kernels() of backend 'acme': expected a mapping of op name to Kernel, got [] (list)"),
        ({3: None}, "kernels() of backend 'acme': expected op names (str) as keys, got 3 (int)"),
        ({"op": print}, "kernels() of backend 'acme'['op']: expected a Kernel, got <built-in function print> (builtin_function_or_method)"),
        ({"op": kvdock.plugin.Kernel}, "kernels() of backend 'acme'['op']: expected a Kernel, got the class Kernel (not an object of it)"),
    ],
)
def test_what_is_no_table_of_kernels(value: object, text: str) -> None:
    assert refused(contract.check_kernels, value, "acme") == text


@pytest.mark.parametrize("value", [None, {"mine": 3}, {3: dict}])
def test_what_is_no_table_of_classes(value: object) -> None:
    for hook in ("kvdock_prefix_caches", "kvdock_transports"):
        text = refused(lambda given, name=hook: contract.check_classes(given, name), value)
        assert text.startswith(f"{hook}(): expected a mapping of name to class, got ")


def test_other_results_are_checked_too() -> None:
    assert refused(contract.check_probe, True, "acme") == "probe() of backend 'acme': expected a Probe, got True (bool)"
    assert refused(contract.check_capabilities, {}, "acme") == "capabilities() of backend 'acme': expected a Capabilities, got {} (dict)"


@pytest.mark.parametrize(
    ("probe", "text"),
    [
        (Probe("ready"), "state: expected a ProbeState, got 'ready' (str)"),  # type: ignore[arg-type]
        (Probe.unusable(OSError("gone")), "reason: expected a str, got OSError('gone') (OSError)"),  # type: ignore[arg-type]
        (Probe.ready(None), "reason: expected a str, got None (NoneType)"),  # type: ignore[arg-type]
    ],
)
def test_parts_of_a_probe(probe: Probe, text: str) -> None:
    assert refused(contract.check_probe, probe, "acme") == f"probe() of backend 'acme': {text}"


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"priority": 50}, "priority: expected a Priority, got 50 (int)"),
        ({"priority": "high"}, "priority: expected a Priority, got 'high' (str)"),
        ({"graph_capture": "no"}, "graph_capture: expected a bool, got 'no' (str)"),
        ({"dtypes": torch.float32}, "dtypes: expected a tuple of torch.dtype, or None, got torch.float32 (dtype)"),
        ({"dtypes": ("float32",)}, "dtypes: expected a tuple of torch.dtype, or None, got ('float32',) (tuple)"),
    ],
)
def test_parts_of_capabilities(parts: dict[str, Any], text: str) -> None:
    assert refused(contract.check_capabilities, Capabilities(**parts), "acme") == f"capabilities() of backend 'acme': {text}"


def test_long_values_are_cut() -> None:
    assert refused(contract.check_backends, {"x": "y" * 500}).endswith("yyy... (dict)")
