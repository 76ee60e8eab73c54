"""How commands print: tables for people, one JSON object for programs, and errors of kvdock without a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdock.errors import KVDockError

__all__ = ["SCHEMA", "JsonFlag", "errors_shown", "show_json", "show_lines", "show_table"]

SCHEMA = 1
"""Version of the JSON objects: counted up when a field changes its meaning or goes; new fields do not count."""

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]

_WIDE = 200  # columns when nobody looks: a pipe or a file must not cut reasons into pieces


def show_json(command: str, content: Mapping[str, Any]) -> None:
    """Print the JSON object of a command: its schema version, its name, and ``content``."""
    typer.echo(json.dumps({"schema": SCHEMA, "command": command, **content}, indent=2))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; cells may hold several lines."""
    table = Table(*columns, show_lines=True)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    console.print(table)


def show_lines(*lines: str) -> None:
    """Print lines as they are."""
    for line in lines:
        typer.echo(line)


@contextmanager
def errors_shown(command: str, as_json: bool) -> Iterator[None]:
    """Print an error of kvdock in one line, or as JSON, and exit with 2."""
    try:
        yield
    except KVDockError as error:
        if as_json:
            show_json(command, {"error": {"type": type(error).__name__, "text": str(error)}})
        else:
            typer.echo(f"kvdock {command}: {error}", err=True)
        raise typer.Exit(2) from None
