"""The examples, and every block of Python and every `kvdock` command in the documentation: run as a reader runs them."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from support_docs import PAGES, ROOT, Block, blocks
from support_scripts import Interpreters
from support_slow import first_of

MODELS = ("kvdock.integrations.transformers", "transformers.generation.continuous_batching", "transformers.models.llama.modeling_llama")
OPTIONAL = ("transformers", "typer", "rich")
PYTHON = {page: found for page in PAGES if (found := [*blocks(page, "python")])}
SHELL = [block for page in PAGES for block in blocks(page, "sh")]
NEED_A_PROJECT = ("docs/backends", "examples/")
"""Pages whose commands need what those before them have installed: tests/packaging runs those."""
COMMANDS = [
    pytest.param(block, line, marks=[pytest.mark.slow] if line.startswith("kvdock doctor") else [])  # it starts a process for each plugin
    for block in SHELL
    if not str(block.page).startswith(NEED_A_PROJECT)
    for line in block.text.splitlines()
    if line.startswith("kvdock ")
]


def needs(text: str) -> None:
    """Skip where an extra is missing that a text imports."""
    wanted = [name for name in OPTIONAL if re.search(rf"^(from|import) {name}\b", text, re.MULTILINE)]
    missing = [name for name in wanted if not importlib.util.find_spec(name)]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


@pytest.fixture(scope="module")
def interpreters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreters]:
    """Run what a user runs; no variable of kvdock's is set."""
    made = Interpreters(tmp_path_factory.mktemp("scripts"), warnings="default")
    yield made
    made.close()


@pytest.fixture(scope="module")
def with_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreters]:
    """Run what needs Transformers' models, or the compiler, which they import: for seconds."""
    made = Interpreters(tmp_path_factory.mktemp("scripts"), warnings="default", imports=MODELS)
    yield made
    made.close()


FILE = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
MODULE = "import runpy; runpy.run_module('kvdock.cli', run_name='__main__', alter_sys=True)"


@pytest.mark.parametrize("block", [param for found in PYTHON.values() for param in first_of(found)], ids=str)
def test_python_in_the_documentation_runs_and_prints_what_it_says(request: pytest.FixtureRequest, block: Block, tmp_path: Path) -> None:
    needs(block.text)
    (tmp_path / "block.py").write_text(block.text, encoding="utf-8")
    wanted = "with_models" if re.search(r"^from transformers|torch\.compile", block.text, re.MULTILINE) else "interpreters"
    interpreters: Interpreters = request.getfixturevalue(wanted)
    done = interpreters.ended(FILE, "block.py", folder=tmp_path)
    assert done.code == 0, done.errors
    assert block.output is not None, f"{block}: say in a block of text behind it what it prints"
    assert done.output == block.output


@pytest.mark.parametrize("page", ["README.md", "docs/caches.md", "docs/transformers.md", "docs/prefix-and-scheduler.md"])
def test_the_pages_of_use_have_code(page: str) -> None:
    assert any(str(block.page) == page for found in PYTHON.values() for block in found)


@pytest.mark.parametrize(("block", "line"), COMMANDS, ids=lambda value: value if isinstance(value, str) else "")
def test_commands_in_the_documentation_run(interpreters: Interpreters, block: Block, line: str, tmp_path: Path) -> None:
    needs("import typer\nimport rich")
    done = interpreters.ended(MODULE, *shlex.split(line, comments=True)[1:], folder=tmp_path)
    assert done.code == 0, f"{block}: {line}\n{done.output}{done.errors}"
    if "--json" in line:
        assert json.loads(done.output)["schema"] == 1


def test_paged_loop_gives_the_tokens_of_the_model_without_a_cache(interpreters: Interpreters) -> None:
    done = interpreters.ended("import warnings; warnings.simplefilter('error'); " + FILE, str(ROOT / "examples" / "paged_loop.py"))
    assert done.code == 0, done.output + done.errors
    assert "8 of 8 continuations have the tokens that the model gives without a cache" in done.output
    waiting = [int(count) for count in re.findall(r"(\d+) wait,", done.output)]
    assert waiting[0] > 0, "the pool is too small for all requests at once"
    assert waiting[-1] == 0


def test_paged_loop_notices_a_token_that_differs(interpreters: Interpreters, tmp_path: Path) -> None:
    """Keys that are lost must show: a comparison that cannot fail proves nothing."""
    source = (ROOT / "examples" / "paged_loop.py").read_text(encoding="utf-8")
    broken = source.replace("cache.update(layer, k, v, slots)", "cache.update(layer, 0 * k, v, slots)")
    assert broken != source
    (tmp_path / "broken.py").write_text(broken)
    done = interpreters.ended(FILE, "broken.py", folder=tmp_path)
    assert done.code == 1, done.output + done.errors
