"""What of a bound batch was seen to be computed: which tokens, and whether from nothing but tokens and positions.

The hook announces each pass, the first layer that writes takes the announcement. What nobody announced was computed by something
that is not watched, so nothing is known of it.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Oddity", "Seen"]


@attrs.frozen
class Oddity:
    """Why keys and values of a pass may be others than those of the tokens at their positions.

    Args:
        why: what was odd about the pass, behind "one that was computed ...".
        fix: what to do instead.
    """

    why: str
    fix: str


UNWATCHED = Oddity(
    "by a model that is not watched, or in a call that passes its hooks by",
    "make the cache for the model that is called, and call it as generate() does; what torch.compile traced before has no hook",
)
HIDDEN = Oddity(
    "with another attention_mask or other position_ids than its prompts have", "leave out what bind() does not return, or do not commit"
)


@attrs.define(eq=False)
class Seen:
    """The tokens that passes fed behind what was cached, and what was odd about these passes.

    Args:
        start: tokens of each row that were not fed.
        oddity: the first thing that was odd, or None.
    """

    start: int
    oddity: Oddity | None = None
    _tokens: int = 0
    _fed: list[torch.Tensor] = attrs.Factory(list)  # [rows, tokens] each
    _announced: torch.Tensor | None = None
    _doubt: torch.Tensor | None = None  # a boolean on the device: whether a mask or positions were odd

    def fork(self) -> Seen:
        """Return the same for another future."""
        return attrs.evolve(self, fed=list(self._fed), announced=None)

    def announce(self, ids: torch.Tensor, doubt: torch.Tensor | None) -> None:
        """Note the tokens ``[rows, tokens]`` of the pass that comes, and a boolean on the device: whether it is odd.

        The boolean is read when somebody asks: a decoding step does not wait for the device.
        """
        self._announced = ids
        if doubt is not None:
            self._doubt = doubt if self._doubt is None else self._doubt | doubt

    def note(self, oddity: Oddity) -> None:
        """Note what is odd."""
        self.oddity = self.oddity or oddity

    def take(self, rows: int, tokens: int) -> None:
        """Count what was announced as fed: a pass begins to write."""
        ids, self._announced = self._announced, None
        if ids is None or ids.shape != (rows, tokens):
            self.note(UNWATCHED)
            ids = torch.full((rows, tokens), -1, device="cpu")
        self._fed.append(ids)
        self._tokens += tokens

    def cut(self, length: int) -> None:
        """Forget tokens of each row from ``length`` on."""
        self._announced = None
        left = max(length - self.start, 0)
        self.start = min(self.start, length)
        while self._tokens > left:
            last = self._fed.pop()
            self._tokens -= last.shape[1]
            if self._tokens < left:
                self._fed.append(last[:, : left - self._tokens])
                self._tokens = left

    def select(self, rows: npt.NDArray[np.intp]) -> None:
        """Make row ``rows[i]`` the new row i."""
        if self._fed:
            fed = torch.cat([ids.to(self._fed[0].device) for ids in self._fed], dim=1)
            self._fed = [fed[torch.from_numpy(rows).to(fed.device)]]

    def judge(self) -> Oddity | None:
        """Return what is odd about all passes so far, or None; waits for the device."""
        if self._doubt is not None and bool(self._doubt):
            self.note(HIDDEN)
        return self.oddity

    def fed(self, rows: int) -> npt.NDArray[np.int64]:
        """Return the tokens that were fed to each row, int64 ``[rows, tokens]``."""
        parts = [ids.detach().cpu().numpy().astype(np.int64) for ids in self._fed]
        return np.concatenate([np.empty((rows, 0), dtype=np.int64), *parts], axis=1)
