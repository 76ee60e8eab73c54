"""What backends say about themselves beside their state: `Backend.notes`, whatever it does."""

from __future__ import annotations

from kvdock.interface import Backend

__all__ = ["notes_of"]


def notes_of(backend: Backend) -> list[str]:
    """Return a ready backend's notes; if asking for them raises, one that says so."""
    try:
        return [str(note) for note in backend.notes()]
    except Exception as error:  # noqa: BLE001 - a plugin's bug must not hide what the command is for
        return [f"notes() raised {type(error).__name__}: {error}"]
