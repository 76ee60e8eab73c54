"""What is forked from `support_forked.Server` looks like what `subprocess.Popen` starts, but for torch, which is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support_forked import Forked, Server, forking
from support_sources import ROOT

ABOUT = """import os, sys, warnings
print([__name__, sys.argv, sys.path[0], os.getcwd(), os.environ.get("COLOUR"), os.getppid(), input()])
print(sys.path[-3:], sorted(number for number in os.listdir("/proc/self/fd"))[:3], file=sys.stderr)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture(scope="module")
def forks(server: Server) -> Iterator[None]:
    """Fork in `make test-all` too: here it is what is tested."""
    with forking(server):
        yield


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script, which is a module, too."""
    folder = tmp_path_factory.mktemp("started")
    (folder / "about.py").write_text(ABOUT, encoding="utf-8")
    return folder


def both(command: list[str], folder: Path, **settings: object) -> list[tuple[int, str, str]]:
    """Return exit code, output and errors of a command that is started, and of one that is forked."""
    how = {"cwd": folder, "env": {**os.environ, "COLOUR": "blue"}, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE} | settings
    found = []
    for kind in (Forked.__base__, Forked):
        with kind([sys.executable, *command], **how, stderr=subprocess.PIPE, text=True) as process:  # type: ignore[misc, call-overload] - a class
            output, errors = process.communicate("hello\n", timeout=100)
        found.append((process.returncode, output, errors))
    return found


@pytest.mark.parametrize("command", [["-c", ABOUT, "x", "-y"], ["-m", "about", "x"], ["about.py", "x"], ["-W", "error", "-P", "-c", ABOUT]])
def test_a_script_sees_what_it_would_see(started: Path, command: list[str]) -> None:
    real, forked = both(command, started)
    assert real[0] == 0, real
    assert forked == real


@pytest.mark.parametrize(
    "code",
    ["import sys; sys.exit(7)", "import os; os._exit(3)", "import os; os.kill(os.getpid(), 11)", "import sys; sys.exit('no')", "1 / 0"],
)
def test_it_ends_as_it_would_end(started: Path, code: str) -> None:
    real, forked = both(["-c", code], started)
    assert forked[0] == real[0] != 0
    assert forked[2].splitlines()[-1:] == real[2].splitlines()[-1:]


def test_it_is_a_child_that_can_be_ended_and_has_a_group_of_its_own_where_it_is_asked_for(started: Path) -> None:
    code = "import os, sys, time; print(os.getpid(), os.getsid(0), 'torch' in sys.modules, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{process.pid} {process.pid} True\n"
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("options", "environ"), [(["-I"], {}), (["-X", "utf8"], {}), ([], {"PYTHONHASHSEED": "3"}), ([], {"OMP_NUM_THREADS": "13"})]
)
def test_what_only_a_new_interpreter_can_have_is_started(options: list[str], environ: dict[str, str]) -> None:
    command = [sys.executable, *options, "-c", "import sys; print('torch' in sys.modules)"]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "False\n"
