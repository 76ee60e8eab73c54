"""What installed distributions declare in one group of entry points, whatever state their metadata is in.

An interrupted uninstall leaves an empty folder, an old checkout a stale one, an old tool one under a name that is not in normal
form. `importlib.metadata` takes the first of a name for the whole truth; here the first that declares something counts, and what
could hide it is told.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from kvdock.plugins.settings import normalise

__all__ = ["Installed", "installed"]

_FOLDER = re.compile(r"(?P<name>.+?)(-(?P<version>\d[^-]*)(-py[\d.]+)?)?(\.dist-info|\.egg-info|\.egg|/EGG-INFO)?")
_UNKNOWN = "(unknown version)"


@attrs.frozen
class Installed:
    """One distribution that declares something.

    Args:
        name: its name, as its metadata or else its folder says.
        version: its version, from there too.
        place: its folder.
        points: name and value of each of its entry points in the group.
    """

    name: str
    version: str
    place: str
    points: tuple[tuple[str, str], ...]


def installed(group: str) -> tuple[list[Installed], list[str]]:
    """Return the distributions that declare something in ``group``, the first of each name, and a note on all that is wrong."""
    notes: list[str] = []
    declaring: list[tuple[int, Installed]] = []
    silent: list[tuple[int, importlib.metadata.Distribution]] = []
    for order, distribution in enumerate(importlib.metadata.distributions()):
        try:
            if group in (distribution.read_text("entry_points.txt") or ""):
                declaring.append((order, _read(distribution, group, notes)))
            else:
                silent.append((order, distribution))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one distribution's files, the others count
            notes.append(_unreadable(_place(distribution), error))
    first: dict[str, tuple[int, Installed]] = {}
    for order, item in sorted(declaring, key=lambda each: _is_set_aside(each[1].place)):
        first.setdefault(normalise(item.name), (order, item))
    owners = {name: item for name, (_, item) in first.items()}
    notes += [_shadowed(item, owners[normalise(item.name)]) for _, item in declaring if item.points != owners[normalise(item.name)].points]
    notes += _hiding(first.values(), silent)
    return list(owners.values()), list(dict.fromkeys(notes))


def _read(distribution: importlib.metadata.Distribution, group: str, notes: list[str]) -> Installed:
    """Read one distribution; without its metadata it counts all the same, as it does for importlib."""
    place = _place(distribution)
    points = tuple((point.name, point.value) for point in distribution.entry_points.select(group=group))
    try:
        said = distribution.metadata
        if not (said["Name"] and said["Version"]):
            raise ValueError("no METADATA with a name and a version")
        return Installed(said["Name"].strip(), said["Version"].strip(), place, points)
    except Exception as error:  # noqa: BLE001 - each release of Python raises something else for metadata that is not there
        notes.append(_unreadable(place, error))
        return Installed(*_of_folder(place), place, points)


def _place(distribution: importlib.metadata.Distribution) -> str:
    return str(getattr(distribution, "_path", "a distribution"))  # it has no public name


def _is_set_aside(place: str) -> bool:
    """Whether pip has moved a folder away to replace or remove it, which somebody interrupted."""
    return Path(place).name.startswith("~")


def _of_folder(place: str) -> tuple[str, str]:
    """Return name and version as the name of a folder of metadata says."""
    path = Path(place)
    match = _FOLDER.fullmatch(path.parent.name if path.name == "EGG-INFO" else path.name)
    return (match["name"], match["version"] or _UNKNOWN) if match else (path.name, _UNKNOWN)


def _hiding(owners: Iterable[tuple[int, Installed]], silent: Sequence[tuple[int, importlib.metadata.Distribution]]) -> Iterator[str]:
    """Yield a note for each distribution that has the name of another, and that importlib may take in its place."""
    for order, owner in owners:
        for other, distribution in silent:
            place = _place(distribution)
            # In one folder, the order is that of the file system.
            before = other < order or Path(place).parent == Path(owner.place).parent
            if before and normalise(_of_folder(place)[0]) == normalise(owner.name):
                yield (
                    f"{place}: is left of another installation of {owner.name}, and hides its entry points in {owner.place} from "
                    f"Python's own tools. Fix: remove that folder, then pip install --force-reinstall {owner.name}"
                )


def _shadowed(item: Installed, owner: Installed) -> str:
    names = ", ".join(name for name, _ in item.points)
    fix = "remove that folder" if _is_set_aside(item.place) else "uninstall one of them"
    return (
        f"{item.place}: {item.name} is installed twice; what this one declares ({names}) is not loaded, as {owner.place} comes first. "
        f"Fix: {fix}"
    )


def _unreadable(place: str, error: Exception) -> str:
    return f"{place}: its metadata cannot be read ({type(error).__name__}: {error}). Fix: reinstall or remove it"
