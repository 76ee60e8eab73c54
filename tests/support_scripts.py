"""Scripts in interpreters of their own, which really start, fork and exit, without paying for the imports each time.

One process imports what the scripts need and forks for each of them; the child runs the script as its main module and then
ends like any interpreter: threads are waited for, handlers run, modules are taken apart.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

SERVER = """
import gc, importlib, json, os, sys, warnings
import kvdock.runtime, support_descriptors
for name in sys.argv[1:]:
    importlib.import_module(name)
gc.collect()
gc.freeze()  # or each script's last collection, at its end, would look through it all, and copy every page
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # its threads are OpenBLAS's
for line in sys.stdin:
    code, arguments, streams, folder = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        for number, path in enumerate([os.devnull, *streams]):
            os.dup2(os.open(path, os.O_RDWR), number)
        sys.argv = ["script", *arguments]
        exec(compile(code, "<script>", "exec"), globals())
        break
    print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), flush=True)
"""


@attrs.frozen
class Ended:
    """How a script ended: its exit code, or in words that it did not end, and what it printed."""

    code: int | str
    output: str
    errors: str


class Interpreters:
    """Runs scripts, one after the other.

    Args:
        folder: for what they print.
        warnings: what to do with warnings, as Python's ``-W`` takes it.
        imports: modules that scripts need beside kvdock, and that take long.
    """

    def __init__(self, folder: Path, warnings: str = "error", imports: Sequence[str] = ()) -> None:
        self.folder = folder
        self.streams = [folder / name for name in ("stdout", "stderr")]
        tests = str(Path(__file__).parent)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVDOCK_")}
        environ |= {"PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]), "OPENBLAS_NUM_THREADS": "1"}
        self.server = subprocess.Popen(
            [sys.executable, "-W", warnings, "-c", SERVER, *imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            start_new_session=True,
        )

    def ended(self, code: str, *arguments: str, folder: Path | None = None, timeout: float = 100) -> Ended:
        """Run a script in a folder, the one that is for what scripts print if none is given."""
        for path in self.streams:
            path.write_bytes(b"")
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps([code, arguments, [*map(str, self.streams)], str(folder or self.folder)]).encode() + b"\n")
        self.server.stdin.flush()
        ready, _, _ = select.select([self.server.stdout], [], [], timeout)
        status = json.loads(self.server.stdout.readline()) if ready else "it did not end"
        return Ended(status, *(path.read_text(encoding="utf-8") for path in self.streams))

    def run(self, code: str, *arguments: str, timeout: float = 100) -> tuple[list[Any], str]:
        """Run a script that must end well; returns the lines of JSON that it prints, and what it says on stderr."""
        done = self.ended(code, *arguments, timeout=timeout)
        assert done.code == 0, f"{done.code}\n{done.output}\n{done.errors}"
        return [json.loads(line) for line in done.output.splitlines()], done.errors

    def answers(self, code: str, *arguments: str) -> list[Any]:
        """Run a script that must end well and say nothing on stderr; returns the lines of JSON that it prints."""
        lines, errors = self.run(code, *arguments)
        assert not errors, errors
        return lines

    def close(self) -> None:
        """End it, and a script that did not end."""
        os.killpg(self.server.pid, signal.SIGKILL)
        self.server.communicate()
