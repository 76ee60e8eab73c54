"""What a registry remembers, and what may be registered in it while a program runs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import kvdock
from kvdock.errors import ArgumentTypeError, ArgumentValueError, BackendUnavailableError, PluginError
from kvdock.plugins.records import PluginState
from kvdock.plugins.registry import Registry
from support_plugins import QUIET, CallKernel, InProcessBackend, module, plugin

META = torch.device("meta")


def own_kernel() -> CallKernel:
    return CallKernel(lambda *args: None)


@pytest.fixture
def registry() -> Registry:
    return Registry(QUIET)


def registered(registry: Registry, *backends: InProcessBackend, name: str = "acme-plugin") -> InProcessBackend:
    registry.register(plugin(*backends), name)
    return backends[0]


def test_registering_returns_the_record_and_counts(registry: Registry) -> None:
    before = registry.epoch
    record = registry.register(plugin(InProcessBackend("acme")), "acme-plugin")
    assert (record.name, record.value, record.distribution, record.state) == ("acme-plugin", "acme_plugin", None, PluginState.READY)
    assert registry.records()[-1] is record
    assert registry.epoch == before + 1
    assert registry.backend("acme").name == "acme"


def test_backend_is_asked_once_for_kernels_and_capabilities_and_once_per_choice_for_its_claim(registry: Registry) -> None:
    backend = registered(registry, InProcessBackend("acme"))
    choices = [registry.choose("copy_blocks_", META) for _ in range(3)]
    assert choices[0] is choices[1] is choices[2]
    assert backend.asked == ["probe", "capabilities", "kernels", "claims"]


def test_choices_are_kept_by_op_device_and_name(registry: Registry) -> None:
    registered(registry, InProcessBackend("acme", devices=("meta",)), InProcessBackend("other", claims=()))
    assert registry.choose("copy_blocks_", META).backend.name == "acme"
    assert registry.choose("copy_blocks_", META, "other").backend.name == "other"
    assert registry.choose("copy_blocks_", META).backend.name == "acme"


def test_registering_drops_what_was_chosen(registry: Registry) -> None:
    registered(registry, InProcessBackend("acme"))
    assert registry.choose("copy_blocks_", META).backend.name == "acme"
    registered(registry, InProcessBackend("better", priority=kvdock.plugin.Priority.SPECIALISED), name="better-plugin")
    assert registry.choose("copy_blocks_", META).backend.name == "better"


@pytest.mark.parametrize(
    ("second", "name", "text"),
    [
        ("other", "acme-plugin", "register: plugin name 'acme-plugin': expected a name that nobody uses, got that of plugin 'acme-plugin'"),
        ("acme", "other-plugin", "register: backend name 'acme': expected a name that nobody uses, got that of plugin 'acme-plugin'"),
    ],
)
def test_taken_names_are_refused_and_change_nothing(registry: Registry, second: str, name: str, text: str) -> None:
    registered(registry, InProcessBackend("acme"))
    epoch, records = registry.epoch, registry.records()
    with pytest.raises(ArgumentValueError) as caught:
        registered(registry, InProcessBackend(second), name=name)
    assert str(caught.value).startswith(text)
    assert (registry.epoch, registry.records()) == (epoch, records)


def test_one_name_twice_in_one_plugin_is_refused(registry: Registry) -> None:
    with pytest.raises(ArgumentValueError, match="register: backend name 'acme'"):
        registered(registry, InProcessBackend("acme"), InProcessBackend("acme"))


BAD = "register: plugin 'bad' (registered in this process) is "


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (plugin(api=(2, 0)), BAD + "INCOMPATIBLE: KVDOCK_API: expected (1, 0)"),
        (plugin("no backend"), BAD + "INCOMPATIBLE: kvdock_backends()[0]: expected"),
        (
            module("m", KVDOCK_API=(1, 0), kvdock_backends=lambda: 1 / 0),
            BAD + "LOAD_FAILED: ",
        ),
    ],
)
def test_broken_plugin_is_refused_with_its_reason_and_leaves_nothing(registry: Registry, made: Any, text: str) -> None:
    epoch, records = registry.epoch, registry.records()
    with pytest.raises(PluginError) as caught:
        registry.register(made, "bad")
    assert str(caught.value).startswith(text)
    assert (registry.epoch, registry.records()) == (epoch, records)
    registered(registry, InProcessBackend("acme"), name="bad")  # the name is free


def test_plugin_whose_hardware_is_broken_is_registered_and_not_ready(registry: Registry) -> None:
    registered(registry, InProcessBackend("acme", probe=kvdock.plugin.Probe.unusable("driver 3")))
    with pytest.raises(BackendUnavailableError) as caught:
        registry.backend("acme")
    assert str(caught.value) == "backend 'acme': UNUSABLE: driver 3 (plugin 'acme-plugin' (registered in this process))"


def test_lists_do_not_apply_to_what_the_program_registers() -> None:
    registry = Registry({"KVDOCK_DISABLE_AUTOLOAD": "1", "KVDOCK_BACKENDS_DENY": "acme-plugin"})
    assert registry.register(plugin(InProcessBackend("acme")), "acme-plugin").state is PluginState.READY


def test_hook_may_ask_for_backends_that_are_loaded_already(registry: Registry) -> None:
    registered(registry, InProcessBackend("acme"))
    seen: list[str] = []

    def hook() -> list[kvdock.plugin.Backend]:
        seen.append(registry.choose("copy_blocks_", META).backend.name)
        return []

    registry.register(module("m", KVDOCK_API=(1, 0), kvdock_backends=hook), "asking")
    assert seen == ["acme"]


def test_prefix_caches_are_kept_by_plugin(registry: Registry) -> None:
    registry.register(module("m", KVDOCK_API=(1, 0), kvdock_prefix_caches=lambda: {"mine": dict}), "caches")
    assert registry.prefix_caches() == {"caches": {"mine": dict}}


def test_transports_are_kept_by_plugin(registry: Registry) -> None:
    record = registry.register(module("m", KVDOCK_API=(1, 0), kvdock_transports=lambda: {"mine": dict, "other": list}), "carriers")
    assert (record.state, record.reason) == (PluginState.READY, "brings transports: mine, other")
    assert registry.transports() == {"carriers": {"mine": dict, "other": list}}


def test_kernel_for_an_op_that_has_none(registry: Registry) -> None:
    registered(registry, InProcessBackend("acme"))
    before, epoch = registry.choose("copy_blocks_", META), registry.epoch
    kernel = own_kernel()
    registry.register_kernel("acme", "copy_blocks_", kernel)
    after = registry.choose("copy_blocks_", META)
    assert (after.kernels, before.kernels) == ({"copy_blocks_": kernel}, {})
    assert registry.epoch == epoch + 1
    assert "overridden" not in after.reason


def test_kernel_for_an_op_that_there_is_not(registry: Registry) -> None:
    registered(registry, InProcessBackend("acme"))
    with pytest.raises(ArgumentValueError, match=r"register_kernel: op: expected one of copy_blocks_, .*, got 'copy_block_'"):
        registry.register_kernel("acme", "copy_block_", own_kernel())


def test_kernel_over_an_existing_one_needs_override_and_shows(registry: Registry) -> None:
    old, new = own_kernel(), own_kernel()
    registered(registry, InProcessBackend("acme", kernels={"copy_blocks_": old}))
    epoch = registry.epoch
    with pytest.raises(ArgumentValueError) as caught:
        registry.register_kernel("acme", "copy_blocks_", new)
    assert str(caught.value) == (
        "register_kernel: op 'copy_blocks_' of backend 'acme': expected an op without a kernel, got one served by CallKernel. "
        "Fix: pass override=True to replace it"
    )
    assert registry.choose("copy_blocks_", META).kernels["copy_blocks_"] is old
    assert registry.epoch == epoch
    registry.register_kernel("acme", "copy_blocks_", new, override=True)
    choice = registry.choose("copy_blocks_", META)
    assert choice.kernels["copy_blocks_"] is new
    assert choice.reason == ("only ready backend that claims meta; its own kernel for 'copy_blocks_' was overridden by a registered one")
    assert registry.loaded()["acme"].overridden == {"copy_blocks_"}
    assert "overridden" not in registry.choose("gather_paged", META).reason


def test_kernel_for_nobody_or_of_no_kind_is_refused(registry: Registry) -> None:
    registered(registry, InProcessBackend("acme"))
    with pytest.raises(BackendUnavailableError, match=r"backend 'other': there is none of this name\. Ready: .*acme"):
        registry.register_kernel("other", "copy_blocks_", own_kernel())
    with pytest.raises(ArgumentTypeError, match=r"register_kernel: kernel: expected a kvdock\.plugin\.Kernel object, got "):
        registry.register_kernel("acme", "copy_blocks_", print)  # type: ignore[arg-type]


def test_threads_that_choose_while_others_register_never_keep_a_choice_that_is_older(registry: Registry) -> None:
    registered(registry, InProcessBackend("acme"))
    done = threading.Event()

    def choose() -> None:
        while not done.is_set():
            registry.choose("copy_blocks_", META)

    threads = [threading.Thread(target=choose) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        kernel = own_kernel()
        registry.register_kernel("acme", "copy_blocks_", kernel, override=True)
        assert registry.choose("copy_blocks_", META).kernels["copy_blocks_"] is kernel
    done.set()
    for thread in threads:
        thread.join()
