"""How far a long command is, on stderr, where somebody looks: in a pipe or a file there is nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["progress"]


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar in a block, if stderr is a terminal; it is gone behind it.

    Args:
        what: what is counted, in the plural.
        total: how many there are.

    Yields:
        A function that counts one more, and shows what was last.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.fields[what]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("", total=total, what=what)
        yield lambda last: shown.update(task, advance=1, description=last)
