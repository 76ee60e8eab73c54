"""Do the ranks decide alike?"""

from __future__ import annotations

import torch
import torch.distributed as dist

from kvdock.errors import ArgumentTypeError, ArgumentValueError, IntegrityError
from kvdock.rank import place_in

__all__ = ["check_alike"]

_BYTES = 32


def check_alike(digest: bytes, group: dist.ProcessGroup | None = None, *, device: torch.device | str = "cpu") -> None:
    """Raise unless all ranks of a group have the same digest, such as ``manager.digest()``. All of them call it, at the same step.

    It waits for the slowest, so an engine calls it now and then, not in each step.

    Args:
        digest: 32 bytes.
        group: whose ranks; None: all processes.
        device: where the group's backend can gather.

    Raises:
        IntegrityError: names the first rank that differs from rank 0; on every rank.
        ArgumentTypeError, ArgumentValueError: no bytes, or not 32 of them; no group with this process in it.
    """
    if not isinstance(digest, bytes):
        raise ArgumentTypeError("check_alike: digest", expected="bytes", got=repr(digest)[:80], fix="pass manager.digest()")
    if len(digest) != _BYTES:
        raise ArgumentValueError("check_alike: digest", expected=f"{_BYTES} bytes", got=f"{len(digest)} bytes", fix="pass manager.digest()")
    size, _ = place_in("check_alike: group", group)
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    found = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(found, mine, group=group)
    texts = [bytes(each.cpu().tolist()).hex()[:8] for each in found]
    wrong = [rank for rank, each in enumerate(found) if not torch.equal(each, found[0])]
    if wrong:
        shown = ", ".join(f"rank {rank} {text}" for rank, text in enumerate(texts[: max(8, wrong[0] + 1)]))
        raise IntegrityError(
            f"check_alike: rank {wrong[0]} of {len(texts)}",
            expected=f"the digest of rank 0, {texts[0]}",
            got=f"{texts[wrong[0]]} ({shown})",
            fix="feed all managers the same calls in the same order, with the same token ids, and pins a clock that counts steps",
        )
