"""Every command in odd places: plugins that print, odd names, terminals nobody can read, streams that are closed, full or ASCII."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support_distributions import report
from support_plugins import source
from support_projects import Environment, Project, build
from support_slow import first_of

pytestmark = pytest.mark.slow  # each starts processes that import torch

LOUD = """
import atexit, os, sys
def say(text):
    print(text)
    sys.stdout.flush()
    os.write(1, text.encode())
    os.system(f"echo {text}")
say("imported")
atexit.register(say, "the end")
"""
NAMES = ["a,b", "a@b", "sp ace", "日本", "100%"]
ODD = Project(
    "kvdock-odd",
    "1.0",
    {
        "extras": "kvdock_odd.extras [gpu,more]",
        "object": "kvdock_odd.held : plugin [gpu]",
        "loud": "kvdock_odd.loud",
        **{name: f"kvdock_odd.named{index}" for index, name in enumerate(NAMES)},
    },
    {
        "kvdock_odd/__init__.py": "",
        "kvdock_odd/extras.py": source("extras"),
        "kvdock_odd/held.py": "from kvdock_odd import held_in as plugin\n",
        "kvdock_odd/held_in.py": source("held"),
        "kvdock_odd/loud.py": LOUD + source("loud", probe="say('probed'); return kvdock.plugin.Probe.ready()"),
        **{f"kvdock_odd/named{index}.py": source(f"named{index}") for index in range(len(NAMES))},
    },
)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("odd")
    environment = Environment.create(folder / "env")
    environment.install(*build([ODD], folder).values())
    return environment


def in_doctor(environment: Environment, **environ: str) -> dict[str, str]:
    done = environment.kvdock("doctor", "--json", environ=environ)
    assert done.stdout, done.stderr
    answer = json.loads(done.stdout)
    return {plugin["name"]: plugin["state"] for plugin in answer["plugins"] if plugin["distribution"] != "kvdock"}


def test_odd_names_and_extras_are_ready_in_the_process_and_in_doctor(odd: Environment) -> None:
    denied = "cpu,cuda,rocm,loud"  # what `loud` prints at its end would spoil the report
    here = {name.rpartition("@")[0]: state.lower() for name, state in report(odd, KVDOCK_BACKENDS_DENY=denied).states.items()}
    assert here == dict.fromkeys(ODD.entry_points, "ready") | {"loud": "blocked"}
    # A locale without these letters, which the names still have to reach the child processes through.
    assert in_doctor(odd, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", KVDOCK_BACKENDS_DENY=denied) == here


COMMANDS = [
    ["doctor"],
    ["backends"],
    ["explain", "copy_blocks_"],
    ["new-backend", "acme", "--device-type", "npu", "--dir", "{tmp}/made"],
    ["conformance", "--backend", "nobody"],
    ["explain", "copy_blocks_", "--backend", "nobody"],
]


@pytest.mark.parametrize("command", first_of(COMMANDS), ids=" ".join)
def test_json_is_one_object_whatever_a_plugin_prints(odd: Environment, tmp_path: Path, command: Sequence[str]) -> None:
    arguments = [word.format(tmp=tmp_path) for word in command]
    done = odd.kvdock(*arguments, "--json", environ={"KVDOCK_BACKENDS": "loud,cpu"})
    assert json.loads(done.stdout)["command"] == command[0]
    if command[0] in ("backends", "explain", "new-backend"):  # these load plugins into their own process
        assert done.stderr.count("imported") == 3
        assert done.stderr.count("the end") == 3


def run(environment: Environment, line: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in which ``kvdock`` is the command line."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KVDOCK_")}
    text = f'kvdock() {{ {environment.python} -P -m kvdock "$@"; }}; {line}'
    settings = clean | {"KVDOCK_BACKENDS": "cpu"} | environ
    return subprocess.run(["bash", "-c", text], env=settings, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("command", first_of(["backends --json", "backends", "explain copy_blocks_"]))
def test_answers_that_cannot_be_written_have_an_exit_code_of_their_own(odd: Environment, command: str) -> None:
    full = run(odd, f"kvdock {command} > /dev/full")
    assert (full.returncode, full.stderr) == (4, "kvdock: the answer cannot be written: No space left on device\n")
    pipe = run(odd, f"kvdock {command} | sleep 0; exit ${{PIPESTATUS[0]}}")
    assert (pipe.returncode, pipe.stderr) == (4, "")


def test_closed_streams_are_no_error(odd: Environment) -> None:
    for line in ("kvdock backends >&-", "kvdock backends --json >&- 2>&-", "kvdock backends <&-"):
        done = run(odd, line)
        assert (done.returncode, done.stderr) == (0, ""), line


@pytest.mark.parametrize(
    "environ", first_of([{"PYTHONIOENCODING": "latin-1"}, {"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "LANG": "tr_TR"}]), ids=str
)
def test_no_encoding_is_too_small_for_a_name(odd: Environment, environ: dict[str, str]) -> None:
    done = run(odd, "kvdock backends", KVDOCK_BACKENDS="日本,cpu", **environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert "named3" in done.stdout


def in_terminal(environment: Environment, *command: str, **environ: str) -> tuple[int, str]:
    """Run the command line with a terminal; returns the exit code, and what the terminal got."""
    ours, theirs = pty.openpty()
    settings = {**os.environ, "KVDOCK_BACKENDS": "cpu", **environ}
    child = subprocess.Popen([environment.python, "-P", "-m", "kvdock", *command], env=settings, stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    got = b""
    try:
        while part := os.read(ours, 4096):
            got += part
    except OSError:  # how a terminal says that nobody writes to it any more
        pass
    os.close(ours)
    return child.wait(60), got.decode()


@pytest.mark.parametrize(
    "environ", first_of([{"COLUMNS": "1"}, {"COLUMNS": "0"}, {"COLUMNS": "x"}, {"TERM": "dumb", "COLUMNS": "50"}]), ids=str
)
def test_nothing_of_the_answer_is_lost_in_a_narrow_terminal(odd: Environment, environ: dict[str, Any]) -> None:
    code, text = in_terminal(odd, "backends", **environ)
    letters = "".join(filter(str.isalnum, text))
    assert code == 0
    assert "…" not in text
    assert "cpu" in letters
    assert "doctor" in in_terminal(odd, "--help", **environ)[1]


def test_python_m_kvdock_is_the_command_line(odd: Environment) -> None:
    assert json.loads(run(odd, "kvdock backends --json").stdout)["command"] == "backends"


@pytest.mark.slow  # sleeps for 11 s
def test_a_slow_plugin_needs_attention_and_shows_its_seconds(tmp_path: Path) -> None:
    slow = Project("kvdock-drowsy", "1.0", {"drowsy": "kvdock_drowsy"}, {"kvdock_drowsy/__init__.py": source("drowsy", probe=SLEEP)})
    environment = Environment.create(tmp_path / "env")
    environment.install(*build([slow], tmp_path).values())
    done = environment.kvdock("doctor", "--json", environ={"KVDOCK_BACKENDS": "drowsy"})
    answer = json.loads(done.stdout)
    assert done.returncode == 1
    assert answer["seconds"]["drowsy@kvdock-drowsy"] > 11
    (problem,) = answer["problems"]
    assert problem.startswith("plugin drowsy@kvdock-drowsy took 11.")
    assert problem.endswith(" s to load and probe, and the first op of every process waits for that")


SLEEP = "import time; time.sleep(11); return kvdock.plugin.Probe.ready()"
