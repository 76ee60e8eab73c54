"""Which plugins are installed, and which of them may be loaded. Nothing here imports a plugin."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
from collections.abc import Iterable, Mapping, Sequence

import attrs

from kvdock.plugins.built_in import built_in
from kvdock.plugins.hookspecs import PROJECT
from kvdock.plugins.installed import installed
from kvdock.plugins.records import PluginRecord, PluginState
from kvdock.plugins.settings import ALLOW, DENY, DISABLE, PluginSettings, Selector, normalise

__all__ = ["GROUP", "FoundEntryPoint", "LoadingPlan", "collect", "plan"]

GROUP = "kvdock.backends"
"""The entry-point group that every plugin registers in, kvdock's own backends included."""


@attrs.frozen(order=True)
class FoundEntryPoint:
    """One entry point: its name, what it names, and the distribution that declares it."""

    name: str
    distribution: str
    version: str
    value: str

    @property
    def target(self) -> tuple[str, tuple[str, ...]]:
        """The module that it names, and the attributes in it, one of the other. Extras behind them are pip's business.

        Raises:
            ValueError: it names something else.
        """
        match = importlib.metadata.EntryPoint.pattern.match(self.value)
        if match is None:
            raise ValueError(f"the entry point is {self.value!r}; expected module or module:attribute")
        return match["module"], tuple(filter(None, (match["attr"] or "").split(".")))

    def record(self, state: PluginState, reason: str, traceback: str = "") -> PluginRecord:
        """Return the record of a plugin that stopped here."""
        return PluginRecord(self.name, self.value, self.distribution, self.version, state, reason, traceback)


@attrs.frozen
class LoadingPlan:
    """What discovery is going to do.

    Args:
        load: entry points to load, in order.
        refused: records of those that are not loaded.
        notes: what the user should be told beside the records.
    """

    load: tuple[FoundEntryPoint, ...]
    refused: tuple[PluginRecord, ...]
    notes: tuple[str, ...]


def collect() -> tuple[list[FoundEntryPoint], list[str]]:
    """Return the entry points that are there, sorted, and a note for each distribution that is not in order.

    Without metadata of kvdock that declares them, its own plugins are there all the same.
    """
    distributions, notes = installed(GROUP)
    found = [FoundEntryPoint(name, item.name, item.version, value) for item in distributions for name, value in item.points]
    if not any(normalise(item.name) == PROJECT for item in distributions):
        version, points = built_in(GROUP, PROJECT)
        found += [FoundEntryPoint(name, PROJECT, version, value) for name, value in points.items()]
        notes += _incomplete(points)
    return sorted(found), notes


def _incomplete(points: Mapping[str, str]) -> list[str]:
    """Return a note if kvdock has metadata, and that does not declare its plugins."""
    try:
        importlib.metadata.distribution(PROJECT)
    except importlib.metadata.PackageNotFoundError:
        return []  # a frozen application or a checkout on the path: nothing is wrong
    names = ", ".join(points) or "none"
    return [f"the metadata of {PROJECT} declares no plugins; found beside its code: {names}. Fix: pip install --force-reinstall {PROJECT}"]


def plan(found: Sequence[FoundEntryPoint], settings: PluginSettings) -> LoadingPlan:
    """Apply the lists, then look for names that several distributions use."""
    refused: list[PluginRecord] = []
    allowed: list[FoundEntryPoint] = []
    for item in found:
        reason = _blocked(item, settings)
        if reason:
            refused.append(item.record(PluginState.BLOCKED, reason))
        elif not item.name:  # no list could name it
            refused.append(item.record(PluginState.INCOMPATIBLE, f"{item.distribution} declares an entry point without a name"))
        else:
            allowed.append(item)
    # Behind the lists, so that denying one of two rivals settles their conflict.
    load: list[FoundEntryPoint] = []
    for _, same_name in itertools.groupby(allowed, key=lambda item: item.name):
        rivals = _distinct(same_name)
        if len(rivals) == 1:
            load += rivals
        else:
            # None of them is loaded: the order of the path would decide between them, and nobody would know.
            refused += [item.record(PluginState.CONFLICT, _conflict(rivals)) for item in rivals]
    return LoadingPlan(tuple(load), tuple(refused), tuple(_missing(found, settings)))


def _blocked(item: FoundEntryPoint, settings: PluginSettings) -> str:
    """Return why an entry point may not be loaded, naming the variable; empty when it may."""
    if not settings.autoload:
        return f"{DISABLE}=1 turns every plugin off"
    denied = [str(selector) for selector in settings.deny if selector.matches(item.name, item.distribution)]
    if denied:
        return f"{DENY} names {denied[0]!r}"
    if settings.allow is not None and not any(selector.matches(item.name, item.distribution) for selector in settings.allow):
        return f"{ALLOW} does not name it; it names {', '.join(map(str, settings.allow))}"
    return ""


def _distinct(same_name: Iterable[FoundEntryPoint]) -> list[FoundEntryPoint]:
    """Drop what is the same plugin seen twice, such as installed and in editable mode under another distribution name."""
    first: dict[object, FoundEntryPoint] = {}
    for item in same_name:
        with contextlib.suppress(ValueError):
            first.setdefault(item.target, item)
            continue
        first.setdefault(item.value, item)
    return list(first.values())


def _conflict(rivals: Sequence[FoundEntryPoint]) -> str:
    """Name all that use one name, and how to keep each of them and refuse the others; first kvdock's own, if it is among them."""
    name = rivals[0].name
    places = " and ".join(f"{item.distribution} {item.version} ({item.value})" for item in rivals)
    ways = []
    for kept in sorted(rivals, key=lambda item: normalise(item.distribution) != PROJECT):
        others = ",".join(str(Selector(name, item.distribution)) for item in rivals if item is not kept)
        ways.append(f"keep that of {kept.distribution} with {DENY}={others}")
    return f"entry point {name!r} is declared by {places}; none of them is loaded. Fix: {', or '.join(ways)}"


def _missing(found: Sequence[FoundEntryPoint], settings: PluginSettings) -> list[str]:
    """Return a note for each allowed name that is not installed."""
    installed = ", ".join(f"{item.name}@{item.distribution}" for item in found) or "none"
    return [
        f"{ALLOW} names {str(selector)!r}, which is not installed. Installed: {installed}"
        for selector in settings.allow or ()
        if not any(selector.matches(item.name, item.distribution) for item in found)
    ]
