"""Every error kvdock raises.

Each derives from `KVDockError` and from the built-in that fits, so that `except ValueError` keeps working::

    KVDockError
    ├── ArgumentTypeError      (TypeError)            not a tensor, wrong dtype
    ├── ArgumentValueError     (ValueError)           device, rank, shape, stride, overlap, configuration
    ├── IndexRangeError        (IndexError)           slot, block, position or layer out of range
    ├── CapacityError          (MemoryError)          a budget or a device with less memory than asked for
    │   └── OutOfBlocksError                          a pool without enough free blocks
    ├── UnsupportedError       (NotImplementedError)  a request that no kernel serves (yet)
    ├── FileAccessError        (OSError)              a file that cannot be read or written: missing, a full disk
    ├── FileContentError       (ValueError)           a file that is cut, damaged, or of another cache or model
    ├── DroppedCacheError      (RuntimeError)         a cache used after `drop()`
    ├── StaleHandleError       (RuntimeError)         a handle or a sequence whose time is over
    ├── WrongThreadError       (RuntimeError)         what belongs to one thread used by another
    ├── IntegrityError         (RuntimeError)         bookkeeping that contradicts itself
    ├── TransferError          (RuntimeError)         blocks that did not come, or a peer that is refused
    └── BackendError           (RuntimeError)
        ├── NoBackendError                            no backend claims the device
        ├── BackendUnavailableError                   asked for by name, and not usable
        ├── AmbiguousBackendError                     several claim the device and none is preferred
        └── PluginError                               a plugin that broke the contract while it loaded
            └── DiscoveryReentryError                 backends asked for while they are being loaded

The text of an error says which argument, what was expected, what came, and how to fix it; the parts are attributes too.
"""

from __future__ import annotations

__all__ = [
    "AmbiguousBackendError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "BackendError",
    "BackendUnavailableError",
    "CapacityError",
    "DiscoveryReentryError",
    "DroppedCacheError",
    "FileAccessError",
    "FileContentError",
    "IndexRangeError",
    "IntegrityError",
    "KVDockError",
    "KVDockWarning",
    "NoBackendError",
    "OutOfBlocksError",
    "PluginError",
    "StaleHandleError",
    "TransferError",
    "UnsupportedError",
    "WrongThreadError",
]


class KVDockError(Exception):
    """Base of all errors.

    Args:
        subject: what is wrong, such as ``"paged_caching_: k"``; or the whole text when no part follows.
        expected: what was expected there.
        got: what came.
        fix: what to do about it.
    """

    def __init__(
        self,
        subject: str = "",
        *,
        expected: object = None,
        got: object = None,
        fix: str | None = None,
    ) -> None:
        self.subject = subject
        self.expected = expected
        self.got = got
        self.fix = fix
        super().__init__(_compose(subject, expected, got, fix))


def _compose(subject: str, expected: object, got: object, fix: str | None) -> str:
    found = [f"expected {expected}"] if expected is not None else []
    found += [f"got {got}"] if got is not None else []
    text = f"{subject}: {', '.join(found)}" if found else subject
    return f"{text}. Fix: {fix}" if fix else text


class KVDockWarning(UserWarning):
    """Something that is allowed and rarely meant: equal slots in one call, an environment that changed too late."""


class ArgumentTypeError(KVDockError, TypeError):
    """An argument of the wrong type, or a tensor of the wrong dtype."""


class ArgumentValueError(KVDockError, ValueError):
    """A wrong device, rank, shape, stride or setting, or a source that overlaps its destination."""


class IndexRangeError(KVDockError, IndexError):
    """A slot, block, position or layer outside its range. Nothing was written."""


class CapacityError(KVDockError, MemoryError):
    """A memory budget, or a device, too small for what is asked. Nothing is left of what was made."""


class OutOfBlocksError(CapacityError):
    """A pool has fewer free blocks than asked for. Nothing was allocated."""


class UnsupportedError(KVDockError, NotImplementedError):
    """No kernel serves this request; the text lists why each did not."""


class FileAccessError(KVDockError, OSError):
    """A file that cannot be read or written. ``errno`` is the system's, the cause is chained. What was saved before is as it was."""


class FileContentError(KVDockError, ValueError):
    """A file that is none of kvdock's, is cut or damaged, or was saved by another version, cache or model. Nothing was loaded."""


class DroppedCacheError(KVDockError, RuntimeError):
    """A cache was used after `drop()` gave its memory back."""


class StaleHandleError(KVDockError, RuntimeError):
    """A handle that is stale, another cache's or not locked, or a sequence that is finished. Nothing was changed."""


class WrongThreadError(KVDockError, RuntimeError):
    """Something that belongs to one thread was used by another. Nothing was changed."""


class IntegrityError(KVDockError, RuntimeError):
    """Bookkeeping that contradicts itself: a bug in kvdock, or arrays written from outside."""


class TransferError(KVDockError, RuntimeError):
    """Blocks did not come from another pool, or not in time; or a peer is refused. What was held for them is given back."""


class BackendError(KVDockError, RuntimeError):
    """Base of what goes wrong in choosing a backend; and, as itself, a backend whose compiler or library failed."""


class NoBackendError(BackendError):
    """No backend that is ready claims the device; the text lists who is registered, and why each is not usable."""


class BackendUnavailableError(BackendError):
    """A backend that was asked for by name does not exist or is not ready."""


class AmbiguousBackendError(BackendError):
    """Several ready backends claim one device with equal priority; the text names the variable that decides."""


class PluginError(BackendError):
    """A plugin broke the contract of the group it registered in."""


class DiscoveryReentryError(PluginError):
    """Backends were asked for while they were being loaded, as by a plugin that calls an op when it is imported."""
