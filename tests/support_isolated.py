"""Running small scripts in a fresh interpreter, and reading what they print."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def answer(code: str, *arguments: str, options: Sequence[str] = (), timeout: float = 120, **settings: Any) -> Any:
    """Run a script that must end well and say nothing on stderr; returns its last line as JSON."""
    command = [sys.executable, *options, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout, **settings)
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    assert not done.stderr, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def dependencies(folder: Path) -> Path:
    """Fill a folder with links to all that is installed beside this interpreter, but for kvdock, however that is installed."""
    folder.mkdir()
    for installed in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(installed).iterdir():
            if not path.name.startswith(("kvdock", "_kvdock", "__")) and path.suffix != ".pth":
                (folder / path.name).symlink_to(path)
    return folder
