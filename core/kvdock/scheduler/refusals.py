"""What a pool of blocks refuses, in words."""

from __future__ import annotations

from kvdock.errors import OutOfBlocksError, UnsupportedError

__all__ = ["in_the_middle", "too_few"]


def too_few(subject: str, most: int, room: str, got: str) -> OutOfBlocksError:
    """Describe a request for more blocks than can be had."""
    fix = "finish sequences or release pins first, ask plan() whether a prompt fits, or make the pool larger"
    return OutOfBlocksError(subject, expected=f"at most {max(most, 0)} blocks: {room}", got=got, fix=fix)


def in_the_middle() -> UnsupportedError:
    """Describe a call of the manager while another is not over."""
    return UnsupportedError(
        "CacheManager",
        expected="calls one after the other",
        got="one from an observer of its prefix cache, in the middle of another",
        fix="note the event, and call the manager when the call that caused it has returned",
    )
