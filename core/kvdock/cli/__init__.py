"""The command line: ``kvdock doctor``, ``backends``, ``explain OP``, ``conformance``, ``new-backend NAME``, ``replay TRACE``.

Needs the extra ``cli``.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; the console script calls this. Exits with 2 when typer and rich are not installed."""
    try:
        from kvdock.cli.app import build
        from kvdock.cli.output import prepare_terminal

        prepare_terminal()
        app = build(sys.argv[1:])
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        sys.stderr.write(f'kvdock: the command line needs {missing}. Fix: pip install "kvdock[cli]"\n')
        raise SystemExit(2) from None
    app()
