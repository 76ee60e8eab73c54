"""A backend is asked for its kernels when one is first needed, and what it answers is compared with the ops that there are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import kvdock
from kvdock.errors import BackendUnavailableError, KVDockWarning, PluginError
from kvdock.plugins import discovery
from kvdock.plugins.entry_points import FoundEntryPoint, LoadingPlan
from kvdock.plugins.loading import Contribution, admit
from kvdock.plugins.records import PluginState
from kvdock.plugins.registry import Registry
from support_plugins import CallKernel, InProcessBackend, plugin

HOST, META = torch.device("cpu"), torch.device("meta")
KERNEL = CallKernel(lambda *args: None)
OPS = "copy_blocks_, gather_paged, mla_caching_, mla_gather, paged_attention, paged_caching_, static_update_, swap_blocks_"


class Asked(InProcessBackend):
    """A backend whose answer about kernels the test decides."""

    def __init__(self, name: str, answer: Callable[[], Any], **options: Any) -> None:
        super().__init__(name, **options)
        self.answer = answer

    def kernels(self) -> Mapping[str, kvdock.plugin.Kernel]:
        self.asked.append("kernels")
        return self.answer()  # type: ignore[no-any-return]


def installed(monkeypatch: pytest.MonkeyPatch, *backends: InProcessBackend, **options: Any) -> Registry:
    """Return a registry that finds one plugin for each backend, as if entry points named them."""
    found = {backend.name: FoundEntryPoint(backend.name, f"{backend.name}-dist", "1.0", "m") for backend in backends}

    def load(item: FoundEntryPoint, watch: Any) -> Contribution:
        (backend,) = (each for each in backends if each.name == item.name)
        return admit(plugin(backend), item.record(PluginState.READY, ""), watch)

    monkeypatch.setattr(discovery, "collect", lambda: (list(found.values()), []))
    monkeypatch.setattr(discovery, "plan", lambda *_: LoadingPlan(tuple(found.values()), (), ()))
    monkeypatch.setattr(discovery, "load", load)
    return Registry({}, **options)


def raises() -> Any:
    raise SystemExit("no compiler")


def test_a_backend_that_is_not_chosen_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 s in an unrelated plugin's `kernels` delayed the first op on the CPU by 3 s."""
    slow = Asked("slow", lambda: pytest.fail("asked for kernels"))
    near = InProcessBackend("near", claims=("cpu",), devices=("cpu",), kernels={"copy_blocks_": KERNEL})
    registry = installed(monkeypatch, slow, near)
    assert registry.choose("copy_blocks_", HOST).kernels == {"copy_blocks_": KERNEL}
    assert registry.backend("slow") is slow
    assert slow.asked == ["probe", "capabilities", "claims"]


def test_it_is_asked_once_by_the_first_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Asked("acme", lambda: {"copy_blocks_": KERNEL})
    registry = installed(monkeypatch, backend)
    epoch = registry.epoch
    for op in ("copy_blocks_", "gather_paged"):
        assert registry.choose(op, META).kernels == {"copy_blocks_": KERNEL}
    assert backend.asked.count("kernels") == 1
    assert registry.epoch == epoch, "nothing was prepared from what was not known"


@pytest.mark.parametrize("question", [Registry.records, Registry.loaded])
def test_who_looks_at_everything_asks_everybody(monkeypatch: pytest.MonkeyPatch, question: Callable[[Registry], Any]) -> None:
    backends = [Asked(name, dict) for name in ("a", "b")]
    registry = installed(monkeypatch, *backends)
    question(registry)
    question(registry)
    assert [backend.asked.count("kernels") for backend in backends] == [1, 1]


def test_one_that_fails_is_unusable_and_another_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Asked("broken", raises, claims=("cpu",), devices=("cpu",), priority=kvdock.plugin.Priority.SPECIALISED)
    near = InProcessBackend("near", device_type="cpu", claims=("cpu",), devices=("cpu",))
    registry = installed(monkeypatch, broken, near)
    with pytest.warns(KVDockWarning, match=r"plugin 'broken' \(broken-dist 1.0\) is UNUSABLE: kernels\(\) raised SystemExit: no compiler"):
        choice = registry.choose("copy_blocks_", HOST)
    assert choice.backend is near
    (record, _) = registry.records()
    assert (record.state, record.reason) == (PluginState.UNUSABLE, "kernels() raised SystemExit: no compiler")
    assert "in raises" in record.traceback
    with pytest.raises(BackendUnavailableError, match=r"UNUSABLE: kernels\(\) raised SystemExit"):
        registry.choose("copy_blocks_", HOST, "broken")
    assert broken.asked.count("kernels") == 1


def test_one_that_returns_something_else_is_incompatible(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = installed(monkeypatch, Asked("acme", lambda: 7))
    with pytest.warns(KVDockWarning, match="INCOMPATIBLE"):
        (record,) = registry.records()
    assert record.reason == "kernels() of backend 'acme': expected a mapping of op name to Kernel, got 7 (int)"
    with pytest.raises(PluginError, match="expected a mapping of op name to Kernel"):
        registry.register(plugin(Asked("other", lambda: 7)), "other")


def test_one_that_asks_for_a_backend_meanwhile_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    registry: Registry

    def kernels() -> Any:
        registry.choose("copy_blocks_", META)

    registry = installed(monkeypatch, Asked("acme", kernels))
    with pytest.warns(KVDockWarning, match="backends were asked for while they are being loaded"):
        (record,) = registry.records()
    assert record.state is PluginState.UNUSABLE
    assert "kernels of acme" in record.reason


def test_threads_that_need_it_at_once_ask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def kernels() -> Any:
        begun.wait(5)
        return {"copy_blocks_": KERNEL}

    backend = Asked("acme", kernels)
    registry = installed(monkeypatch, backend)
    choices: list[Any] = []
    threads = [threading.Thread(target=lambda: choices.append(registry.choose("copy_blocks_", META))) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.set()
    for thread in threads:
        thread.join(20)
    assert [choice.kernels for choice in choices] == [{"copy_blocks_": KERNEL}] * 4
    assert backend.asked.count("kernels") == 1


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("paged_caching", "rename it to 'paged_caching_'"),
        ("gather_pages", "rename it to 'gather_paged'"),
        ("rms_norm", f"name one of {OPS}; or bring the op"),
    ],
)
def test_a_kernel_for_no_op_is_a_warning_and_a_reason(monkeypatch: pytest.MonkeyPatch, name: str, fix: str) -> None:
    registry = installed(monkeypatch, Asked("acme", lambda: {name: KERNEL, "copy_blocks_": KERNEL}), InProcessBackend("fine"))
    text = f"kernels() has one for {name!r}, which is no op of this kvdock: it is never called. Fix: {fix}"
    with pytest.warns(KVDockWarning) as caught:
        acme, fine = registry.records()
    (warning,) = caught
    assert str(warning.message) == f"backend 'acme' (plugin 'acme' (acme-dist 1.0)): {text}. `kvdock doctor` shows details"
    assert acme.state is PluginState.READY
    assert acme.reason == f"made by a test; {text}"
    assert fine.reason == "made by a test"
    assert registry.loaded()["acme"].kernels.keys() == {name, "copy_blocks_"}
    assert type(acme).from_dict(acme.as_dict()) == acme
