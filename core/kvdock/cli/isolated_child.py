"""The child process of `isolated`: ``python -m kvdock.cli.isolated_child RESULT``.

The environment allows the one plugin. Each step, and at last the record, goes to the file RESULT as a line of JSON, so
that the parent knows how far a child came that hung or crashed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvdock.cli.notes import notes_of
from kvdock.errors import KVDockError
from kvdock.guarded import ask_devices
from kvdock.interface import HOST
from kvdock.plugins.records import PluginState
from kvdock.plugins.registry import Registry

__all__ = ["main", "said_by"]


def main(result: str) -> None:
    """Load and probe the plugin that the environment allows, write what happens to the file ``result``, and end the process."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with Path(result).open("w", encoding="utf-8", buffering=1) as out:

        def write(**line: Any) -> None:
            """Write a line that the parent sees at once."""
            out.write(json.dumps(line) + "\n")

        warnings.simplefilter("ignore")  # the record says it all
        registry = Registry(watch=lambda step, subject: write(step=step, subject=subject))
        begin = time.monotonic()
        record = next(record for record in registry.records() if record.state is not PluginState.BLOCKED)
        seconds = time.monotonic() - begin
        notes = [*said_by(registry, write), *(_opened(record.name, kind) for kind in _initialised(registry))]
        write(record=record.as_dict(), notes=notes, problems=_without_devices(registry), seconds=round(seconds, 3))
    os._exit(0)  # the verdict is in; what the plugin does at exit must not delay it


def said_by(registry: Registry, write: Callable[..., None]) -> list[str]:
    """Return what the ready backends of the plugin have to say."""
    said = []
    for name, loaded in registry.loaded().items():
        write(step="notes", subject=name)
        said += [f"backend {name!r}: {note}" for note in notes_of(loaded.backend)]
    return said


def _without_devices(registry: Registry) -> list[str]:
    """Return an error for each ready backend of the plugin that cannot say where it runs: it serves nobody who asks for it by name."""
    found = []
    for loaded in registry.loaded().values():
        try:
            ask_devices(loaded.backend)
        except KVDockError as error:
            found.append(str(error))
    return found


def _initialised(registry: Registry) -> list[str]:
    """Return the kinds of torch device on which there is a context now, among those of the plugin."""
    kinds: set[str] = set()
    for loaded in registry.loaded().values():
        with contextlib.suppress(KVDockError):  # it is among the problems
            kinds |= {device.type for device in ask_devices(loaded.backend)} - {HOST.type}
    modules = {kind: getattr(torch, kind, None) for kind in kinds}  # not every kind of device has one
    return sorted(kind for kind, module in modules.items() if getattr(module, "is_initialized", bool)())


def _opened(name: str, kind: str) -> str:
    return (
        f"plugin {name!r} opened a context on {kind!r} when it was loaded or probed: a process that forks after that cannot use the device"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
