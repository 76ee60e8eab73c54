"""``kvdock new-backend NAME --device-type TYPE``: writes a project for a backend, which passes the conformance kit at once."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from kvdock.cli.output import JsonFlag, errors_shown, show_json, show_lines
from kvdock_conformance.new_backend import NewBackend

__all__ = ["command"]


def command(
    name: Annotated[str, typer.Argument(help="Name of the backend, such as acme.")],
    device_type: Annotated[str, typer.Option(help="torch's name for the type of device that it serves.")],
    folder: Annotated[Path | None, typer.Option("--dir", help="Where to write it. Default: kvdock-NAME in this folder.")] = None,
    license_id: Annotated[str | None, typer.Option("--license", help="SPDX id for its metadata, such as Apache-2.0.")] = None,
    json_output: JsonFlag = False,
) -> None:
    """Write a project for a new backend: kernels in torch, tests, CI. Exits with 2 if a name cannot be used, or files are there."""
    project = NewBackend(name, device_type, license_id)
    with errors_shown("new-backend", json_output):
        root = folder if folder is not None else Path(project.distribution)
        files = [path.relative_to(root).as_posix() for path in project.write(root)]
    then = [f"pip install -e {shlex.quote(str(root))}", f"kvdock conformance --backend {name}"]
    if json_output:
        names = {"name": name, "device_type": device_type, "distribution": project.distribution, "package": project.package}
        show_json("new-backend", {**names, "folder": str(root), "files": files, "next": then})
    else:
        show_lines(f"{root}: {project.distribution}, a backend for {device_type} devices", *(f"  {path}" for path in files))
        show_lines("", "Next:", *(f"  {line}" for line in then))
