"""Rules of retention: which blocks of a sequence later tokens still read. Layers with one rule can share a block table.

::

    position    0 ........................ n - 1 | n        the next token, whose query is to come
    KeepAll     ################################
    KeepWindow  ##                    ##########            the first `sinks`, and the last `window - 1`
    KeepChunk                    ###############            what is in the chunk of position n
    KeepState   one state, whatever n is
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.checks import check_int

__all__ = ["KeepAll", "KeepChunk", "KeepState", "KeepWindow", "Retention"]


class Retention(ABC):
    """A rule. Equal rules are interchangeable; a new one is a subclass, frozen and hashable.

    Attributes:
        is_state: whether a block holds one state of a sequence, and not the tokens at its place.
        keeps_all: whether nothing is ever let go.
    """

    is_state = False
    keeps_all = False

    @property
    def leading(self) -> int:
        """So many first tokens of a sequence are never let go."""
        return 0

    def first_kept(self, num_tokens: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return for each number of tokens from which position on all are kept, beside the leading ones. It never falls as they grow.

        This is what `spans` says, for many sequences at once; a rule that is asked in each step has it as one operation of numpy.
        """
        lasts = ((count, self.spans(count)) for count in np.ravel(num_tokens).tolist())
        return np.array([spans[-1].start if spans else count for count, spans in lasts], dtype=np.intp).reshape(np.shape(num_tokens))

    @abstractmethod
    def spans(self, num_tokens: int) -> tuple[range, ...]:
        """Return which of the first ``num_tokens`` positions the next tokens may read, as ascending ranges that do not touch.

        A prefix of ``num_tokens`` tokens can be gone on with if these are cached, and what is in no range may be freed.
        """

    def kept(self, num_tokens: int) -> int:
        """Return how many tokens those are."""
        return sum(map(len, self.spans(num_tokens)))

    def blocks(self, num_tokens: int, block_size: int) -> tuple[range, ...]:
        """Return the blocks that hold them, by their place in the block table, as ascending ranges that do not touch."""
        found: list[range] = []
        for span in self.spans(num_tokens):
            start, stop = span.start // block_size, -(-span.stop // block_size)
            if found and start <= found[-1].stop:
                start = found.pop().start
            found.append(range(start, stop))
        return tuple(found)


@attrs.frozen
class KeepAll(Retention):
    """Every token: full attention."""

    keeps_all = True

    def spans(self, num_tokens: int) -> tuple[range, ...]:
        """Return all of them."""
        return _spans((0, num_tokens))


@attrs.frozen
class KeepWindow(Retention):
    """The last tokens, and a few of the first: sliding windows.

    Args:
        window: tokens that a query sees, its own included.
        sinks: first tokens of the sequence that all see, as in attention with sink tokens (Xiao et al., 2023, arXiv:2309.17453).

    Raises:
        ArgumentTypeError, ArgumentValueError: a window below 1, sinks below 0.
    """

    window: int
    sinks: int = 0

    def __attrs_post_init__(self) -> None:
        check_int("KeepWindow: window", self.window, 1)
        check_int("KeepWindow: sinks", self.sinks, 0)

    @property
    def leading(self) -> int:
        """The sinks."""
        return self.sinks

    def first_kept(self, num_tokens: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return where the window of the next token begins."""
        return np.maximum(num_tokens - (self.window - 1), 0)

    def spans(self, num_tokens: int) -> tuple[range, ...]:
        """Return the sinks, and what the window of the next token reaches."""
        return _spans((0, min(self.sinks, num_tokens)), (max(num_tokens - self.window + 1, 0), num_tokens))


@attrs.frozen
class KeepChunk(Retention):
    """The tokens of the chunk that the next one is in: chunked attention, in which nobody sees the chunk before.

    Args:
        chunk: tokens of a chunk; the first begins at position 0.

    Raises:
        ArgumentTypeError, ArgumentValueError: a chunk below 1.
    """

    chunk: int

    def __attrs_post_init__(self) -> None:
        check_int("KeepChunk: chunk", self.chunk, 1)

    def first_kept(self, num_tokens: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return where the chunk of the next token begins."""
        return num_tokens - num_tokens % self.chunk

    def spans(self, num_tokens: int) -> tuple[range, ...]:
        """Return what is in the chunk of the next token."""
        return _spans((num_tokens - num_tokens % self.chunk, num_tokens))


@attrs.frozen
class KeepState(Retention):
    """One state, of a size that does not grow: convolutions, linear attention, state spaces."""

    is_state = True

    def spans(self, num_tokens: int) -> tuple[range, ...]:
        """Return the last token, which the state is of."""
        return _spans((max(num_tokens - 1, 0), num_tokens))

    def blocks(self, num_tokens: int, block_size: int) -> tuple[range, ...]:
        """Return the one block, whatever the length."""
        return (range(1),) if num_tokens else ()


def _spans(*bounds: tuple[int, int]) -> tuple[range, ...]:
    """Return ranges of given bounds, without the empty ones, joined where they touch."""
    found: list[range] = []
    for start, stop in bounds:
        if found and start <= found[-1].stop:
            start = found.pop().start
        if start < stop:
            found.append(range(start, stop))
    return tuple(found)
