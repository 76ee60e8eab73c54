"""Writes the modules beside this one anew: ``make calls``. Needs ruff, which lays them out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvdock.ops.calls.writer import source_of
from kvdock.ops.catalog import CATALOG
from kvdock.ops.schema import OpSchema

__all__ = ["formatted", "main"]


def formatted(schema: OpSchema) -> str:
    """Return the module of an op as it is committed."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(Path(__file__).with_name(f"{schema.name}.py")), "-"]
    return subprocess.run(command, input=source_of(schema), capture_output=True, text=True, check=True).stdout  # noqa: S603 - our own


def main() -> None:
    """Write every op's module."""
    for schema in CATALOG.values():
        Path(__file__).with_name(f"{schema.name}.py").write_text(formatted(schema))


if __name__ == "__main__":
    main()
