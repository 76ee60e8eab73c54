"""What a check raises when the backend does not conform."""

from __future__ import annotations

from typing import Any

__all__ = ["NonconformanceError"]


class NonconformanceError(AssertionError):
    """One thing that is not as the requirement says.

    Args:
        what: the thing: a place in memory, an error's text, a count.
        expected: what it should have been.
        got: what it was.
    """

    def __init__(self, what: str, *, expected: object, got: object) -> None:
        self.what = what
        self.expected = str(expected)
        self.got = str(got)
        super().__init__(f"{what}: expected {expected}, got {got}")

    def as_dict(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        return {"what": self.what, "expected": self.expected, "got": self.got}
