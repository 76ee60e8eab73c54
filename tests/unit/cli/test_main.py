from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kvdock.cli.app import COMMANDS, build


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_one_line_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from kvdock.cli import main; sys.argv = ['kvdock', 'doctor']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f'kvdock: the command line needs {missing}. Fix: pip install "kvdock[cli]"\n'


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json_and_help_alone_and_among_the_others(name: str) -> None:
    for app in (build(), build([name])):
        result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
        assert result.exit_code == 0, result.output
        assert "--json" in result.output


def test_unknown_command_fails_and_lists_none_silently() -> None:
    assert CliRunner().invoke(build(["frob"]), ["frob"]).exit_code == 2


def test_a_command_that_is_named_imports_no_other() -> None:
    code = "import sys; from kvdock.cli.app import build; build(['doctor']); print([name in sys.modules for name in sys.argv[1:]])"
    modules = ("kvdock.cli.doctor", "kvdock.cli.explain", "kvdock.cli.backends")
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[True, False, False]"
