"""The commands. A new one is a new module with a function `command`, and a line in `COMMANDS`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import MappingProxyType

import typer

__all__ = ["COMMANDS", "build"]

COMMANDS = MappingProxyType(
    {
        "doctor": "kvdock.cli.doctor",
        "backends": "kvdock.cli.backends",
        "explain": "kvdock.cli.explain",
        "conformance": "kvdock.cli.conformance",
        "new-backend": "kvdock.cli.new_backend",
        "replay": "kvdock.cli.replay",
    }
)
"""Module of each command, by its name on the command line."""


def build(arguments: Sequence[str] = ()) -> typer.Typer:
    """Return the command line.

    Args:
        arguments: what was typed. If it begins with a command, only that one's module is imported, so that `doctor` runs
            whatever state the rest is in.
    """
    app = typer.Typer(
        name="kvdock",
        help="Show what kvdock runs on this machine, check backends, and replay traces.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    wanted = [name for name in COMMANDS if name in arguments[:1]] or list(COMMANDS)
    for name in wanted:
        app.command(name)(importlib.import_module(COMMANDS[name]).command)
    return app


def _root() -> None:
    """Show what kvdock runs on this machine, check backends, and replay traces."""  # its presence keeps a lone command a sub-command
