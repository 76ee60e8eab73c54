"""What a new backend may be called, and for which type of device."""

from __future__ import annotations

import importlib.util
import re

from kvdock.errors import ArgumentValueError
from kvdock.plugins.contract import RESERVED
from kvdock.plugins.entry_points import collect

__all__ = ["check_device_type", "check_license", "check_name"]

_WORD = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_LICENSE = re.compile(r"[A-Za-z0-9.+-]+( (AND|OR|WITH) [A-Za-z0-9.+-]+)*")
_LONGEST = 30
_HOST_TYPE = "cpu"


def _check_word(subject: str, word: str, kind: str) -> None:
    """Refuse what cannot be part of a package's name, of a class's name and of an environment variable."""
    if not _WORD.fullmatch(word) or len(word) > _LONGEST:
        suggestion = "_".join(re.findall(r"[a-z0-9]+", word.lower().partition(":")[0])).lstrip("0123456789_")[:_LONGEST].rstrip("_")
        raise ArgumentValueError(
            subject,
            expected=f"{kind}: lower-case letters and digits, words joined by '_', a letter first, at most {_LONGEST} characters",
            got=repr(word),
            fix=f"use {suggestion}" if suggestion else "use a word such as acme",
        )


def check_name(name: str) -> None:
    """Refuse a name that is malformed, means something else, or is taken in this environment.

    Raises:
        ArgumentValueError: says why, and what to use.
    """
    _check_word("name", name, "the name of a backend")
    if name == RESERVED:
        raise ArgumentValueError(
            "name",
            expected=f"another name than {RESERVED}, which means kvdock's own kernels",
            got=repr(name),
            fix="use your company's name",
        )
    for point in collect()[0]:
        if point.name == name:
            raise _taken(name, f"taken by the plugin {point.value} of {point.distribution} {point.version}")
    if importlib.util.find_spec(f"kvdock_{name}") is not None:
        raise _taken(name, f"taken: the package kvdock_{name} can be imported here")


def _taken(name: str, why: str) -> ArgumentValueError:
    return ArgumentValueError(
        "name", expected="a name that no installed plugin has", got=f"{name!r}, {why}", fix="use another name, or uninstall that one"
    )


def check_device_type(device_type: str) -> None:
    """Refuse a type of device that is malformed, or is the host's.

    Raises:
        ArgumentValueError: says why, and what to use.
    """
    _check_word("--device-type", device_type, "torch's name for the type of device")
    if device_type == _HOST_TYPE:
        raise ArgumentValueError(
            "--device-type",
            expected="the type of a device beside the host",
            got=f"{device_type!r}, which other backends claim already",
            fix="use the type that your device's tensors have in torch; the backend runs on host memory anyway when asked for by name",
        )


def check_license(license_id: str) -> None:
    """Refuse what is no SPDX expression in form.

    Raises:
        ArgumentValueError: it is none.
    """
    if not _LICENSE.fullmatch(license_id):
        raise ArgumentValueError(
            "--license",
            expected="an SPDX expression",
            got=repr(license_id),
            fix="use an id from spdx.org/licenses such as Apache-2.0, or LicenseRef-Proprietary",
        )
