"""What goes wrong with peers, as errors: whose fault it is decides what helps."""

from __future__ import annotations

from kvdock.errors import TransferError

__all__ = ["lost", "misplaced", "no_pool", "refused", "tag_taken"]


def refused(subject: str, expected: object, got: object) -> TransferError:
    """Describe what no sound peer of this version says, whoever sent it."""
    fix = "run the same kvdock on both sides; if they do, the peer is broken or hostile: drop it"
    return TransferError(subject, expected=expected, got=got, fix=fix)


def misplaced(peer: str, expected: str, got: object) -> TransferError:
    """Describe bytes that are none of the messages that are read there."""
    fix = "pass `Exchange.hello` to connect and each message of `outgoing` to take, whole, from a peer that runs kvdock"
    return TransferError(f"message of peer {peer!r}", expected=expected, got=got, fix=fix)


def lost(name: str, got: str, *, expected: str = "all of them", peer: str = "") -> TransferError:
    """Describe blocks that did not come through. Where what came says itself what helps, as that of a peer may, that is the fix."""
    what, _, fix = got.partition(". Fix: ")
    fix = fix or "ask for them again, or compute them: nothing is held for them any more"
    return TransferError(f"blocks of {name!r}{peer}", expected=expected, got=what, fix=fix)


def tag_taken(peer: str, tag: int) -> TransferError:
    """Describe a tag by which something is expected already."""
    return TransferError(f"peer {peer!r}: tag", expected="one that nothing is expected by", got=tag, fix="use a tag for one push only")


def no_pool(peer: str) -> TransferError:
    """Describe a peer that would be connected to nothing."""
    fix = "let an Exchange register its pool; after close make another transport"
    return TransferError(f"peer {peer!r}", expected="an open transport with a pool", got="one without", fix=fix)
