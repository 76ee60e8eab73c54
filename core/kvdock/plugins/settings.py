"""What the environment says about plugins, read once into an object that does not change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote, unquote

import attrs

from kvdock.errors import ArgumentValueError

__all__ = ["ALLOW", "DENY", "DISABLE", "PER_DEVICE", "PluginSettings", "Selector", "normalise"]

ALLOW = "KVDOCK_BACKENDS"
DENY = "KVDOCK_BACKENDS_DENY"
DISABLE = "KVDOCK_DISABLE_AUTOLOAD"
PER_DEVICE = "KVDOCK_BACKEND_"
"""Prefix of the variables that name the backend of one device type: ``KVDOCK_BACKEND_<DEVICE_TYPE>``."""

_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "": False, "0": False, "false": False, "no": False, "off": False}

_SPECIAL = re.compile(r"[,@%\s\x00-\x1f]")  # what a name in a list cannot hold as it is


def normalise(distribution: str) -> str:
    """Return the name of a distribution as package indexes compare it: ``My_Dist`` is ``my-dist``."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@attrs.frozen
class Selector:
    """One item of an allow or deny list: ``name``, or ``name@distribution`` where two distributions use one name.

    In the list, a character of a name that means something there is written as in a URL: ``%2C`` is a comma.
    """

    name: str
    distribution: str | None = None

    @classmethod
    def parse(cls, text: str, variable: str) -> Selector:
        """Read one item.

        Raises:
            ArgumentValueError: a part is empty; the text names ``variable``.
        """
        name, at, distribution = (unquote(part.strip()) for part in text.partition("@"))
        if not name or (at and not distribution):
            raise ArgumentValueError(
                variable,
                expected="plugin names separated by commas, each `name` or `name@distribution`",
                got=repr(text),
                fix="remove the item, or complete it; `kvdock doctor` lists the names",
            )
        return cls(name, normalise(distribution) if at else None)

    def matches(self, name: str, distribution: str | None) -> bool:
        """Whether the entry point ``name`` of ``distribution`` is meant."""
        return self.name == name and (self.distribution is None or self.distribution == normalise(distribution or ""))

    def __str__(self) -> str:
        name = _SPECIAL.sub(lambda match: quote(match[0], safe=""), self.name)
        return name if self.distribution is None else f"{name}@{self.distribution}"


@attrs.frozen
class PluginSettings:
    """What the environment variables say.

    Args:
        allow: the only plugins to load; None loads all.
        deny: plugins not to load, whatever `allow` says.
        autoload: False loads no plugin at all, whatever the lists say.
        device_backends: name of the backend by device type in lower case.
    """

    allow: tuple[Selector, ...] | None = None
    deny: tuple[Selector, ...] = ()
    autoload: bool = True
    device_backends: Mapping[str, str] = attrs.field(factory=dict)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> PluginSettings:
        """Read the variables; an empty variable counts as one that is not set.

        Raises:
            ArgumentValueError: a variable holds something that cannot be read.
        """
        return cls(
            allow=_selectors(environ, ALLOW) or None,
            deny=_selectors(environ, DENY),
            autoload=not _switch(environ, DISABLE),
            device_backends=_device_backends(environ),
        )

    def lists(self) -> str:
        """Return what decides which plugins are loaded as one line; equal lines load the same."""
        allow = "all" if self.allow is None else ",".join(map(str, self.allow))
        deny = ",".join(map(str, self.deny)) or "none"
        return f"allow {allow}; deny {deny}; autoload {'on' if self.autoload else 'off'}"


def _selectors(environ: Mapping[str, str], variable: str) -> tuple[Selector, ...]:
    # Empty items count for nothing, so that a list may end in a comma.
    items = [item for item in environ.get(variable, "").split(",") if item.strip()]
    return tuple(Selector.parse(item, variable) for item in items)


def _switch(environ: Mapping[str, str], variable: str) -> bool:
    text = environ.get(variable, "")
    try:
        return _SWITCH[text.strip().lower()]
    except KeyError:
        raise ArgumentValueError(variable, expected="1 or 0", got=repr(text), fix=f"{variable}=1 turns loading off") from None


def _device_backends(environ: Mapping[str, str]) -> dict[str, str]:
    """Collect the variables that name a backend for a device type."""
    found = {key.removeprefix(PER_DEVICE).lower(): value.strip() for key, value in environ.items() if key.startswith(PER_DEVICE)}
    return {device_type: name for device_type, name in sorted(found.items()) if device_type and name}
