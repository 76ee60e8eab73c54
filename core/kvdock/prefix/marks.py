"""How the parts of a node were used.

::

    positions of a node:    start ........................ end
    how it was used:        | earlier[0] | earlier[1] | the rest |

Prompts that end within a node use only what is before their end. So a node knows, for each of its parts that was used
alike, how: what is behind such an end may be worth less. The last part is described by the node itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Mark", "Marked"]


class Mark:
    """How a part of a node was used, as a policy looks at it; see `kvdock.prefix.eviction.Usage`.

    Attributes:
        end: position behind the part.
    """

    __slots__ = ("created", "end", "last_use", "priority", "uses")

    created: int
    end: int
    last_use: int
    priority: int
    uses: int

    def __init__(self, end: int, like: Mark) -> None:
        self.end = end
        self.be_like(like)

    def be_like(self, other: Mark) -> None:
        """Take over how another was used."""
        self.last_use, self.uses, self.created, self.priority = other.last_use, other.uses, other.created, other.priority

    def note_use(self, now: int, priority: int | None) -> None:
        """Note a use of the part."""
        self.last_use = now
        self.uses += 1
        if priority is not None and priority > self.priority:
            self.priority = priority


class Marked(Mark):
    """What has parts that were used differently, and is the last of them itself.

    Attributes:
        earlier: how its parts but the last were used, in order; None where all of it was used alike.
    """

    __slots__ = ("earlier",)

    earlier: list[Mark] | None

    def use(self, upto: int, now: int, priority: int | None, key: Callable[[Any], Any]) -> None:
        """Note a use of the blocks before position ``upto``, now. Parts that ``key`` does not tell apart become one."""
        if upto == self.end:
            self.note_use(now, priority)
            if not self.earlier:
                return
        else:
            self._mark(upto)
        for mark in self.earlier or ():
            if mark.end > upto:
                break
            mark.note_use(now, priority)
        self.join_marks(key)

    def _mark(self, end: int) -> None:
        """See to it that a part ends at position ``end``."""
        marks = self.earlier = self.earlier or []
        index = next((i for i, mark in enumerate(marks) if mark.end >= end), len(marks))
        if index == len(marks) or marks[index].end != end:
            marks.insert(index, Mark(end, marks[index] if index < len(marks) else self))

    def mark_end(self) -> None:
        """Let what grows from here on be a part of its own."""
        self.earlier = [*(self.earlier or ()), Mark(self.end, self)]

    def end_at(self, end: int) -> None:
        """Let all end at position ``end``: the part that is there becomes the last."""
        self.end = end
        while self.earlier and end <= self.earlier[-1].end:
            self.be_like(self.earlier.pop())

    def join_marks(self, key: Callable[[Any], Any]) -> None:
        """Make one part of neighbours that were used alike, and of one priority: what grows there is compared with it."""
        if not self.earlier:
            return
        marks, kept, later = self.earlier, list[Mark](), (key(self), self.priority)
        for mark in reversed(marks):
            if (this := (key(mark), mark.priority)) != later:
                kept.append(mark)
                later = this
        self.earlier = kept[::-1] or None

    def share_marks(self, upper: Marked) -> None:
        """Give what is above, and ends within, what is known of it."""
        marks = self.earlier
        if not marks:
            upper.be_like(self)
            return
        above = [mark for mark in marks if mark.end < upper.end]
        below = [mark for mark in marks if mark.end > upper.end]
        at_end = marks[len(above)] if len(above) < len(marks) else self
        upper.be_like(at_end)
        upper.earlier, self.earlier = above or None, below or None
