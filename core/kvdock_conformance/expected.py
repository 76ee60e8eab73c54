"""The file of expected failures: what is known not to conform, with a reason, a link and a day on which that ends.

::

    [[expected]]
    requirement = "KVD-WRITE-019"
    reason = "the copy engine needs 4-byte addresses; firmware 3 fixes it"
    link = "https://example.com/issues/17"
    expires = 2027-01-31

It is strict: an expected failure that passes is a failure, and so is an entry that has expired.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock_conformance.requirement import Requirements
from kvdock_conformance.requirements import find
from kvdock_conformance.verdict import Outcome, Verdict

__all__ = ["Expected", "apply", "read"]


@attrs.frozen
class Expected:
    """One expected failure.

    Args:
        requirement: id of the requirement.
        reason: why it fails.
        link: where that is followed up: an http or https address.
        expires: the last day on which it may fail.
    """

    requirement: str
    reason: str
    link: str
    expires: datetime.date


_TYPES: Mapping[str, type] = {"requirement": str, "reason": str, "link": str, "expires": datetime.date}


def read(path: Path, requirements: Requirements) -> dict[str, Expected]:
    """Read a file.

    Args:
        path: the TOML file.
        requirements: every requirement there is, of any level.

    Returns:
        The entries by requirement.

    Raises:
        ArgumentValueError: it cannot be read, or an entry lacks something, has something unknown, or is there twice.
        ArgumentTypeError: a field of the wrong type.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentValueError(f"expected failures: {path}", expected="a TOML file", got=str(error)) from error
    entries = content.pop("expected", [])
    if content or not isinstance(entries, list):
        raise ArgumentValueError(f"expected failures: {path}", expected="tables [[expected]] only", got=", ".join(content) or repr(entries))
    found: dict[str, Expected] = {}
    for number, entry in enumerate(entries, 1):
        item = _entry(f"expected failures: {path}: entry {number}", entry)
        _check_known(item.requirement, requirements)
        if item.requirement in found:
            raise ArgumentValueError(
                f"expected failures: {path}", expected="one entry for each requirement", got=f"{item.requirement} twice"
            )
        found[item.requirement] = item
    return found


def _check_known(requirement_id: str, requirements: Requirements) -> None:
    """Refuse an id that there is not. Which ops plugins bring is not known here."""
    if "@" in requirement_id:
        find(requirement_id)
    else:
        requirements[requirement_id]  # raises if there is none


def _entry(subject: str, entry: Any) -> Expected:
    if not isinstance(entry, Mapping) or set(entry) != set(_TYPES):
        got = ", ".join(entry) if isinstance(entry, Mapping) else repr(entry)
        raise ArgumentValueError(subject, expected=f"a table with exactly {', '.join(_TYPES)}", got=got or "an empty one")
    for name, kind in _TYPES.items():
        if not isinstance(entry[name], kind) or isinstance(entry[name], datetime.datetime):
            fix = "write a date without quotes: 2027-01-31" if kind is datetime.date else "write a text in quotes"
            raise ArgumentTypeError(f"{subject}: {name}", expected=f"a {kind.__name__}", got=repr(entry[name]), fix=fix)
    if not entry["reason"].strip():
        raise ArgumentValueError(f"{subject}: reason", expected="why it fails", got=repr(entry["reason"]))
    if not entry["link"].startswith(("http://", "https://")):
        raise ArgumentValueError(f"{subject}: link", expected="an address beginning with http", got=repr(entry["link"]))
    return Expected(**entry)


def apply(outcomes: Sequence[Outcome], expected: Mapping[str, Expected], today: datetime.date) -> list[Outcome]:
    """Return the outcomes with what was expected of them taken into account.

    Args:
        outcomes: what came of each requirement that was selected.
        expected: entries by requirement; those of requirements that were not selected do not matter.
        today: the day to compare expiry dates with.
    """
    return [_judged(outcome, expected.get(outcome.requirement.id), today) for outcome in outcomes]


def _judged(outcome: Outcome, entry: Expected | None, today: datetime.date) -> Outcome:
    if entry is None or outcome.verdict is Verdict.NOT_RUN:
        return outcome
    about = f"{entry.reason} ({entry.link})"
    if today > entry.expires:
        reason = f"the expected failure has expired on {entry.expires}: {about}. Fix: repair it, or decide anew until when it may fail"
        return attrs.evolve(outcome, verdict=Verdict.FAILED, reason=reason)
    if outcome.verdict is Verdict.FAILED:
        return attrs.evolve(outcome, verdict=Verdict.EXPECTED_FAILURE, reason=f"{about}, until {entry.expires}")
    reason = f"expected to fail, and {outcome.verdict.value}: {about}. Fix: take it out of the file of expected failures"
    return attrs.evolve(outcome, verdict=Verdict.FAILED, reason=reason)
