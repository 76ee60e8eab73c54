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
from pathlib import Path
from typing import Any

SERVER = """
import json, os, sys, warnings
import kvdock.runtime, support_descriptors
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # its threads are OpenBLAS's
for line in sys.stdin:
    code, arguments, streams = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, path in enumerate([os.devnull, *streams]):
            os.dup2(os.open(path, os.O_RDWR), number)
        sys.argv = ["script", *arguments]
        exec(compile(code, "<script>", "exec"), globals())
        break
    print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), flush=True)
"""


class Interpreters:
    """Runs scripts, one after the other.

    Args:
        folder: for what they print.
    """

    def __init__(self, folder: Path) -> None:
        self.streams = [folder / name for name in ("stdout", "stderr")]
        tests = str(Path(__file__).parent)
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]), "OPENBLAS_NUM_THREADS": "1"}
        self.server = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            start_new_session=True,
        )

    def run(self, code: str, *arguments: str, timeout: float = 100) -> tuple[list[Any], str]:
        """Run a script that must end well; returns the lines of JSON that it prints, and what it says on stderr."""
        for path in self.streams:
            path.write_bytes(b"")
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps([code, arguments, list(map(str, self.streams))]).encode() + b"\n")
        self.server.stdin.flush()
        ready, _, _ = select.select([self.server.stdout], [], [], timeout)
        status = self.server.stdout.readline() if ready else b"it did not end\n"
        output, errors = (path.read_text(encoding="utf-8") for path in self.streams)
        assert status == b"0\n", f"{status.decode()}\n{output}\n{errors}"
        return [json.loads(line) for line in output.splitlines()], errors

    def answers(self, code: str, *arguments: str) -> list[Any]:
        """Run a script that must end well and say nothing on stderr; returns the lines of JSON that it prints."""
        lines, errors = self.run(code, *arguments)
        assert not errors, errors
        return lines

    def close(self) -> None:
        """End it, and a script that did not end."""
        os.killpg(self.server.pid, signal.SIGKILL)
        self.server.communicate()
