"""An op of a plugin's own: `rope_caching_` rotates the keys of new tokens and writes keys and values into a paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.plugin import Op, call_op, hookimpl

if TYPE_CHECKING:
    import torch

__all__ = ["KVDOCK_API", "kvdock_ops", "rope_caching_"]

KVDOCK_API = (1, 0)


@hookimpl
def kvdock_ops() -> list[Op]:
    """Return the op."""
    from .op import ROPE_CACHING

    return [ROPE_CACHING]


def rope_caching_(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Rotate keys by their positions, and write keys and values into their slots.

    Args:
        k_cache: ``[NB, block, Hk, Dk]``; written.
        v_cache: ``[NB, block, Hv, Dv]``; written.
        k: ``[T, Hk, Dk]`` in the cache's dtype. Its first half is rotated with its second one, in float32.
        v: ``[T, Hv, Dv]``.
        cos: ``[P, Dk / 2]`` float32, for each position.
        sin: ``[P, Dk / 2]`` float32.
        positions: ``[T]`` int32 or int64.
        slot_mapping: ``[T]`` int32 or int64; negative means padding, which is skipped.

    Raises:
        KVDockError: as kvdock's own ops do. On host memory a slot or position out of range raises before anything is written; on a
            device such a token is skipped and counted.
    """
    call_op("rope_caching_", k_cache, v_cache, k, v, cos, sin, positions, slot_mapping)
