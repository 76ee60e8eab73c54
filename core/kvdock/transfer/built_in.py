"""The transport that comes with kvdock, for what lies below the integrations."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdock.integrations.torch_distributed import TorchDistributed

__all__ = ["torch_distributed"]


def torch_distributed() -> type[TorchDistributed]:
    """Return the class; imported when it is asked for, since integrations lie above."""
    from kvdock.integrations.torch_distributed import TorchDistributed

    return TorchDistributed
