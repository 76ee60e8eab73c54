"""``kvdock new-backend NAME --device-type TYPE``: writes a project for a backend, which passes the conformance kit at once."""

from __future__ import annotations

import shlex
import warnings
from pathlib import Path
from typing import Annotated

import typer

from kvdock import runtime
from kvdock.cli.output import JsonFlag, errors_shown, show_json, show_lines
from kvdock.errors import KVDockWarning
from kvdock_conformance.new_backend import NewBackend

__all__ = ["command"]


def command(
    name: Annotated[str, typer.Argument(help="Name of the backend, such as acme.")],
    device_type: Annotated[str, typer.Option(help="torch's name for the device type that it serves.")],
    folder: Annotated[Path | None, typer.Option("--dir", help="Where to write it. Default: kvdock-NAME in this folder.")] = None,
    license_id: Annotated[str | None, typer.Option("--license", help="SPDX id of its licence, such as Apache-2.0.")] = None,
    json_output: JsonFlag = False,
) -> None:
    """Write a project for a new backend: kernels in torch, tests, CI. Exits with 2 if a name cannot be used or files exist already."""
    project = NewBackend(name, device_type, license_id)
    with errors_shown("new-backend", json_output):
        root = folder if folder is not None else Path(project.distribution)
        files = [path.relative_to(root).as_posix() for path in project.write(root)]
        notes = _notes(name, device_type)
    then = [f"pip install -e {shlex.quote(str(root))}", f"kvdock conformance --backend {name}"]
    if json_output:
        names = {"name": name, "device_type": device_type, "distribution": project.distribution, "package": project.package}
        show_json("new-backend", {**names, "folder": str(root), "files": files, "next": then, "notes": notes})
    else:
        show_lines(f"{root}: {project.distribution}, a backend for {device_type} devices", *(f"  {path}" for path in files))
        show_lines("", "Next:", *(f"  {line}" for line in then), *notes)


def _notes(name: str, device_type: str) -> list[str]:
    """Return a note about installed backends that are for the same type of device: nobody is chosen between two by chance."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KVDockWarning)  # a broken plugin is not this command's business
        records = runtime.default().registry.records()
    others = [item.name for record in records for item in record.backends if item.device_type == device_type]
    if not others:
        return []
    chosen = f"KVDOCK_BACKEND_{device_type.upper()}={name}"
    return [
        f"Note: {', '.join(others)} serves {device_type} devices too. If two backends claim a device, calls on it are refused until "
        f"you choose one: set {chosen}, or change the priority in the backend's capabilities."
    ]
