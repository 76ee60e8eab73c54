"""What torch finds as ``torch.twocards``; importing it, which torch does by itself, makes the device known."""

from __future__ import annotations

from typing import Any

import torch

from . import _device

CARDS = 2


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return False


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return CARDS


def current_device() -> int:
    return int(_device.current_device())


def set_device(device: Any) -> None:
    _device.set_device(device if isinstance(device, int) else torch.device(device).index or 0)


def synchronize(device: Any = None) -> None:
    """Nothing is waited for: calls are done when they return."""


def manual_seed_all(seed: int) -> None:
    """Random numbers are the host's."""


class device:  # noqa: N801 - as torch calls it
    """Makes a card the current one in a block."""

    def __init__(self, wanted: Any) -> None:
        self._wanted = wanted

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._wanted)

    def __exit__(self, *error: object) -> None:
        set_device(self._before)


def known() -> None:
    """Tell torch. The entry point of the group ``torch.backends``."""
    import twocards

    torch.utils.rename_privateuse1_backend("twocards")
    torch._register_device_module("twocards", twocards)
