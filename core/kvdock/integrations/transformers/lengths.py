"""How many tokens each layer has.

A step is one forward pass, in which each layer writes once, in any order::

    layer 0  ############----        written    - this step
    layer 1  ############            the batch already has room for this step
"""

from __future__ import annotations

from kvdock.errors import ArgumentValueError

__all__ = ["Lengths"]


class Lengths:
    """The lengths of all layers.

    Args:
        layers: number of layers.

    Attributes:
        of: tokens of each layer.
        start: tokens before the current step, or the last one.
    """

    def __init__(self, layers: int) -> None:
        self.of = [0] * layers
        self.start = 0
        self._behind = 0  # layers that have not written in the current step

    @property
    def is_whole(self) -> bool:
        """Whether no step is under way."""
        return not self._behind

    def set(self, length: int) -> None:
        """Let all layers have so many tokens."""
        self.of = [length] * len(self.of)
        self._behind = 0

    def begin(self, start: int) -> None:
        """Start a step behind ``start`` tokens."""
        self.start, self._behind = start, len(self.of)

    def written(self, layer: int, stop: int) -> bool:
        """Note that a layer has tokens up to ``stop``; return whether that ends the step."""
        self.of[layer] = stop
        self._behind -= 1
        return not self._behind

    def undo(self) -> None:
        """Go back to before a step that failed."""
        self.of = [min(length, self.start) for length in self.of]

    def check_whole(self, what: str) -> None:
        """Raise if a step is under way."""
        if self._behind:
            raise ArgumentValueError(
                f"PagedCacheForTransformers: {what}",
                expected="layers of one length",
                got=f"lengths from {min(self.of)} to {max(self.of)}: a forward pass was interrupted, or two run at once",
                fix=f"go back with truncate({min(self.of)}), or reset()",
            )
