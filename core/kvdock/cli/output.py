"""How commands print: tables for people, one JSON object for programs, and errors of kvdock without a traceback."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdock.errors import KVDockError

__all__ = ["SCHEMA", "UNWRITTEN", "JsonFlag", "errors_shown", "prepare_terminal", "show_json", "show_lines", "show_table"]

SCHEMA = 1
"""Version of the JSON objects: counted up when a field changes its meaning or goes; new fields do not count."""

UNWRITTEN = 4
"""Exit code of a command whose answer could not be written: a pipe that nobody reads any more, a full disk."""

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]

_WIDE = 200  # columns when nobody looks: a pipe or a file must not cut reasons into pieces
_NARROW = 40  # columns below which nothing can be read; the terminal may break longer lines itself
_STDOUT, _STDERR = 1, 2


def prepare_terminal() -> None:
    """Make this process's streams take any text, and its terminal wide enough for some, whatever the environment says."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where it is closed
            stream.reconfigure(errors="backslashreplace")
    said = os.environ.get("COLUMNS", "")
    if shutil.get_terminal_size().columns < _NARROW or (said.isdecimal() and int(said) < _NARROW):  # to the one, 0 is no answer
        os.environ["COLUMNS"] = str(2 * _NARROW)


def show_json(command: str, content: Mapping[str, Any]) -> None:
    """Print the JSON object of a command: its schema version, its name, and ``content``. The last thing on stdout."""
    _write(json.dumps({"schema": SCHEMA, "command": command, **content}, indent=2) + "\n")
    _redirect_stdout()  # what a plugin prints when the process ends would spoil it


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; cells may hold several lines."""
    table = Table(show_lines=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = _Console()
    if not console.is_terminal:
        console = _Console(width=_WIDE)
    try:
        console.print(table)
    except OSError as error:
        _give_up(error)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """End the command as `_write` does."""
        _give_up(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)))


def show_lines(*lines: str) -> None:
    """Print lines as they are."""
    for line in lines:
        _write(f"{line}\n")


def _write(text: str) -> None:
    """Print a text; where that is not possible, end the command, which has nobody left to tell."""
    try:
        typer.echo(text, nl=False)
    except OSError as error:
        _give_up(error)


def _give_up(error: OSError) -> NoReturn:
    if error.errno != errno.EPIPE:
        with contextlib.suppress(OSError):
            typer.echo(f"kvdock: the answer cannot be written: {error.strerror}", err=True)
    # What is left in the buffer would raise once more when the interpreter ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
    raise SystemExit(UNWRITTEN) from None


@contextmanager
def errors_shown(command: str, as_json: bool) -> Iterator[None]:
    """Print an error of kvdock in one line, or as JSON, and exit with 2.

    With JSON, what anything else prints in the block goes to stderr: stdout is for the one object.
    """
    try:
        with _stdout_kept() if as_json else contextlib.nullcontext():
            yield
    except KVDockError as error:
        if as_json:
            show_json(command, {"error": {"type": type(error).__name__, "text": str(error)}})
        else:
            typer.echo(f"kvdock {command}: {error}", err=True)
        raise typer.Exit(2) from None


@contextmanager
def _stdout_kept() -> Iterator[None]:
    """Send what is printed in a block to stderr, by Python and by libraries alike."""
    kept = _redirect_stdout()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, _STDOUT)
            os.close(kept)


def _redirect_stdout() -> int | None:
    """Let file descriptor 1 lead to stderr, if it is what this process prints to; returns another descriptor for what it was."""
    stdout = sys.__stdout__
    try:
        if stdout is None or stdout is not sys.stdout or stdout.fileno() != _STDOUT:
            return None
        stdout.flush()
        kept = os.dup(_STDOUT)
        os.dup2(_STDERR, _STDOUT)
    except OSError:  # one of them is closed, or cannot be written to
        return None
    return kept
