"""Notices an environment that changed after plugins were loaded: too late in this process, or on the way to a child.

A forked child has its parent's plugins, whatever it puts into its environment. A spawned child loads its own; so that it
can compare, the parent leaves a line in what `multiprocessing` hands on to its children. Environments are only read.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Mapping
from typing import Any

from kvdock.errors import KVDockError, KVDockWarning
from kvdock.plugins.settings import PluginSettings

__all__ = ["EnvironmentWatch"]

_LINE = "kvdock: plugins were loaded with"
"""Under which name a process leaves, for its children, what it loaded plugins with."""


class EnvironmentWatch:
    """Reads settings from an environment, and warns once for each that came too late.

    Args:
        environ: the environment; None is the process's own, the only one that says something to children.
    """

    def __init__(self, environ: Mapping[str, str] | None) -> None:
        self._inherited = environ is None
        self._environ: Mapping[str, str] = os.environ if environ is None else environ
        self._warned: PluginSettings | None = None

    def settings(self) -> PluginSettings:
        """Read the settings. Raises ArgumentValueError when a variable cannot be read."""
        return PluginSettings.from_environ(self._environ)

    def loaded_with(self, settings: PluginSettings) -> None:
        """Compare with what the parent loaded, and leave a line for the children."""
        if not self._inherited:
            return
        handed_on = _handed_on()
        parents, handed_on[_LINE] = handed_on.get(_LINE), settings.lists()
        if multiprocessing.parent_process() is not None and parents not in (None, settings.lists()):
            _warn(f"this child process loads other plugins than its parent: {settings.lists()} here, {parents} there")

    def check(self, settings: PluginSettings) -> None:
        """Warn if the environment no longer says what plugins were loaded with."""
        try:
            now = self.settings()
        except KVDockError as error:
            _warn(f"plugins are loaded already, and keep what they were loaded with: {error}")
            return
        if now in (settings, self._warned):
            return
        self._warned = now
        _warn(f"plugins were loaded with {_show(settings)}; {_show(now)} came too late and changes nothing in this process")


def _handed_on() -> dict[str, Any]:
    """Return what each child of `multiprocessing` gets a copy of when it is made, however it is started.

    It has no public name, and holds such things as the key by which processes know one another. A release that has it no
    longer would cost the comparison, and nothing else.
    """
    handed_on: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    return handed_on


def _show(settings: PluginSettings) -> str:
    """Describe settings in one line."""
    devices = "".join(f"; {kind}: {name}" for kind, name in settings.device_backends.items())
    return f"[{settings.lists()}{devices}]"


def _warn(text: str) -> None:
    """Warn the user."""
    warnings.warn(f"{text}. Fix: set KVDOCK_* variables before the first process uses kvdock", KVDockWarning, stacklevel=3)
