"""What a process has one of, and what therefore is not copied along with what refers to it."""

from __future__ import annotations

from typing import Any, NoReturn, Self

from kvdock.errors import UnsupportedError

__all__ = ["Shared"]


class Shared:
    """A part of a runtime. What keeps one can be copied: a copy, shallow or deep, keeps the same one. It cannot be pickled."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            f"pickling a {type(self).__name__}",
            expected="what holds no backends and threads of this process",
            got="pickle",
            fix="leave it out, and take that of the other process there",
        )
