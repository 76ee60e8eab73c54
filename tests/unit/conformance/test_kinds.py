"""What can be tested, on which of its devices, and what the hardware is called."""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvdock
from kvdock.errors import BackendUnavailableError
from kvdock.prefix import NaivePrefixCache, PrefixCache, factory
from kvdock_conformance.checking.target import Target
from kvdock_conformance.kinds import KINDS, UNKNOWN_DEVICE, hardware
from kvdock_conformance.stand_ins import StandIn, register_backend


class Several(StandIn):
    """A backend with two devices of one type, and the host behind them."""

    def devices(self) -> list[torch.device]:
        return [torch.device("meta", 0), torch.device("meta", 1), torch.device("cpu")]


@pytest.fixture(scope="module", autouse=True)
def several() -> None:
    register_backend(Several("several-devices", {}))


@pytest.mark.parametrize(
    ("asked", "device"),
    [
        (None, "meta"),
        ("meta:0", "meta"),
        ("meta", "meta"),
        ("cpu", "cpu"),
        ("cpu:0", "cpu"),
    ],
)
def test_a_device_is_found_by_its_text(asked: str | None, device: str) -> None:
    assert Target("several-devices", None, asked).device.type == device


def test_the_second_of_a_type_is_another_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    own = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, device: made.append(device) or own(size, device=device))
    Target("several-devices", None, "meta:1")
    assert made == [torch.device("meta", 1)]


@pytest.mark.parametrize("asked", ["meta:2", "cpu:1", "acme", "", "META", "cpu "])
def test_a_device_that_is_not_there_lists_those_that_are(asked: str) -> None:
    with pytest.raises(kvdock.ArgumentValueError, match=r"device: expected one of meta:0, meta:1, cpu, got"):
        Target("several-devices", None, asked)
    with pytest.raises(BackendUnavailableError) as caught:
        KINDS["backend"].open("several-devices", None, asked)
    assert (caught.value.subject, caught.value.got) == ("one of meta:0, meta:1, cpu", UNKNOWN_DEVICE)


def test_what_a_kind_says_of_itself() -> None:
    _, about = KINDS["backend"].open("several-devices", None, "cpu")
    assert (about["device"], about["hardware"]) == ("cpu", hardware.processor())
    _, about = KINDS["prefix"].open("radix", None, None)
    assert about["hardware"] == hardware.processor()
    with pytest.raises(BackendUnavailableError, match="none, since a prefix cache runs on no device"):
        KINDS["prefix"].open("radix", None, "cpu")


class Lacking(PrefixCache):
    """Has a constructor only."""

    def __init__(self, block_size: int = 16) -> None:
        self.block_size = block_size


class Old(NaivePrefixCache):
    """Inserts as by the contract before blocks."""

    def insert_prefix(self, tokens: Any, slots: Any, namespace: Any = (), *, priority: int = 0) -> Any:  # type: ignore[override]  # old
        raise AssertionError("not to be called")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Lacking, r"prefix cache 'mine': expected every method of PrefixCache, got a class without \["),
        (
            Old,
            r"prefix cache 'mine': Old\.insert_prefix: expected \(self, tokens: .*behind: .*got \(self, tokens: .*\)"
            r".* Fix: write it for the contract of this version: kvdock\.prefix\.PrefixCache",
        ),
    ],
)
def test_a_prefix_cache_of_another_contract_cannot_be_tested(monkeypatch: pytest.MonkeyPatch, kind: Any, text: str) -> None:
    runtime = SimpleNamespace(registry=SimpleNamespace(prefix_caches=lambda: {"theirs": {"mine": kind}}))
    monkeypatch.setattr(factory, "process_runtime", lambda: runtime)
    with pytest.raises(BackendUnavailableError, match=text) as caught:
        KINDS["prefix"].open("mine", None, None)
    assert caught.value.got == "unusable"


def test_the_processor_has_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert hardware.processor().strip()
    monkeypatch.setattr(hardware, "_CPUINFO", tmp_path / "cpuinfo")
    fallback = platform.processor() or platform.machine()
    assert hardware.processor() == fallback
    (tmp_path / "cpuinfo").write_text("processor: 0\nmodel name\t: \nmodel name\t:  Acme 9: the fast one \nmodel name: other\n")
    assert hardware.processor() == "Acme 9: the fast one"
    (tmp_path / "cpuinfo").write_text("Features : fp asimd\n")
    assert hardware.processor() == fallback


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (SimpleNamespace(get_device_name=lambda device: f"Acme of {device}"), "Acme of meta"),
        (SimpleNamespace(), ""),
        (None, ""),
    ],
)
def test_a_devices_name_is_what_torchs_module_for_it_says(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    def module_of(device: torch.device) -> Any:
        if module is None:
            raise RuntimeError("no such module")
        return module

    monkeypatch.setattr(torch, "get_device_module", module_of)
    assert hardware.of_device(torch.device("meta")) == name
    assert hardware.of_device(torch.device("cpu")) == hardware.processor()
