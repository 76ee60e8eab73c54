"""What backends say about themselves beside their state: `Backend.notes`, whatever it does."""

from __future__ import annotations

from kvdock.guarded import are_reasons, ask
from kvdock.interface import Backend

__all__ = ["notes_of"]


def notes_of(backend: Backend) -> list[str]:
    """Return a ready backend's notes; if it does not answer with lines, one that says so."""
    try:
        return list(ask(backend.name, "notes()", backend.notes, "a list of lines (str)", are_reasons))
    except Exception as error:  # noqa: BLE001 - a plugin's bug must not hide what the command is for
        return [str(error)]
