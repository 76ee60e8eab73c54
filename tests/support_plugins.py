"""Plugins for tests: a backend for this process, and the source text of plugins for real distributions."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import kvdock

QUIET = {"KVDOCK_DISABLE_AUTOLOAD": "1"}
"""Environment of a registry that loads nothing by itself."""


class InProcessBackend(kvdock.plugin.Backend):
    """A backend whose every answer the test decides."""

    def __init__(
        self,
        name: str,
        *,
        device_type: str = "acme",
        claims: Sequence[str] = ("meta",),
        devices: Sequence[str] = ("meta",),
        probe: kvdock.plugin.Probe | None = None,
        kernels: Mapping[str, kvdock.plugin.Kernel] | None = None,
        priority: kvdock.plugin.Priority = kvdock.plugin.Priority.NORMAL,
    ) -> None:
        self.name = name
        self.device_type = device_type
        self._claims = claims
        self._devices = devices
        self._probe = probe or kvdock.plugin.Probe.ready("made by a test")
        self._kernels = dict(kernels or {})
        self._priority = priority
        self.asked: list[str] = []

    def probe(self) -> kvdock.plugin.Probe:
        self.asked.append("probe")
        return self._probe

    def claims(self, device: torch.device) -> bool:
        self.asked.append("claims")
        return device.type in self._claims

    def devices(self) -> Sequence[torch.device]:
        return [torch.device(name) for name in self._devices]

    def kernels(self) -> Mapping[str, kvdock.plugin.Kernel]:
        self.asked.append("kernels")
        return self._kernels

    def capabilities(self) -> kvdock.plugin.Capabilities:
        self.asked.append("capabilities")
        return kvdock.plugin.Capabilities(priority=self._priority)


class CallDescriptor(kvdock.plugin.Descriptor):
    """A descriptor that is a function."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)


class CallKernel(kvdock.plugin.Kernel):
    """A kernel that supports everything and calls a function."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        return ()

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        return CallDescriptor(self._call)


def plugin(*backends: object, api: object = kvdock.plugin.KVDOCK_API, name: str = "acme_plugin") -> types.ModuleType:
    """Return a module that hands over backends, as an entry point would name it."""
    return module(name, kvdock_backends=lambda: list(backends), KVDOCK_API=api)


def module(module_name: str, **content: Any) -> types.ModuleType:
    """Return a module with this content, whose functions named like a hook are marked as hooks."""
    made = types.ModuleType(module_name)
    for name, value in content.items():
        setattr(made, name, kvdock.plugin.hookimpl(value) if name.startswith("kvdock_") else value)
    return made


SOURCE = """
import os
import kvdock
import torch

KVDOCK_API = (1, 0)


class Ours(kvdock.plugin.Backend):
    name = {name!r}
    device_type = {device_type!r}

    def probe(self):
        {probe}

    def claims(self, device):
        return device.type == "meta"

    def devices(self):
        return [torch.device("meta")]

    def kernels(self):
        return {{}}

    def capabilities(self):
        return kvdock.plugin.Capabilities(priority=kvdock.plugin.Priority.{priority})


@kvdock.plugin.hookimpl
def kvdock_backends():
    return [Ours()]
"""


def source(name: str, *, device_type: str = "acme", probe: str = "return kvdock.plugin.Probe.ready()", priority: str = "NORMAL") -> str:
    """Return the source of a plugin module with one backend, on the device that torch calls meta."""
    return SOURCE.format(name=name, device_type=device_type, probe=probe, priority=priority)
