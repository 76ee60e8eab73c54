"""The page on writing a backend: its commands one after the other, as a reader types them, and its excerpts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

import kvdock
from support_docs import blocks, read
from support_projects import Environment
from support_sources import ROOT

PAGE = Path("docs/backends/writing-a-backend.md")
EXAMPLE = ROOT / "examples" / "acme_backend"
COMMANDS = [line for block in blocks(PAGE, "sh") for line in block.text.splitlines()]
PRINTED = {block.text.splitlines()[-1]: block.output.splitlines() for block in blocks(PAGE, "sh") if block.output}
"""By command, lines that the page says it prints, among others."""


@pytest.mark.slow  # the whole road, with several runs of the kit
def test_the_commands_do_what_the_page_says(stranger: Callable[..., Environment], tmp_path: Path) -> None:
    environment = stranger("page")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "acme_backend").symlink_to(EXAMPLE)
    for line in COMMANDS:
        wanted = re.search(r"# exits with (\d)", line)
        done = environment.typed(line, tmp_path)
        assert done.returncode == int(wanted[1] if wanted else 0), f"{line}\n{done.stdout}{done.stderr}"
        assert_among(PRINTED.get(line, []), done.stdout)
    assert list((tmp_path / "dist").glob("kvdock_acme-1.0.0-*.whl"))


def assert_among(lines: list[str], printed: str) -> None:
    """Check that each line was printed, in this order; a line of the page may leave out what comes at its end."""
    at = 0
    for line in lines:
        found = printed.find(f"\n{line}", at)
        assert found >= 0, f"not printed, or not here: {line}\n{printed}"
        at = found + 1


def test_there_are_commands_for_each_step() -> None:
    assert {shlex.split(line)[0] for line in COMMANDS} >= {"kvdock", "pip", "pytest"}
    assert len(COMMANDS) > 12
    assert [command for command in PRINTED if "--report report" in command], "what a failure looks like"


def excerpts() -> list[tuple[str, str]]:
    """Return the blocks that stand for files of the example."""
    return [(language, block.text) for language in ("py", "toml") for block in blocks(PAGE, language)]


@pytest.mark.parametrize(("language", "text"), excerpts(), ids=[text.strip().splitlines()[0][:40] for _, text in excerpts()])
def test_excerpts_are_what_the_example_has(language: str, text: str) -> None:
    files = [path for path in EXAMPLE.rglob(f"*.{language}") if "build" not in path.parts]
    assert any(text in path.read_text(encoding="utf-8") for path in files), f"no file of the example has\n{text}"


def test_every_method_of_the_contract_is_mentioned() -> None:
    text = read(PAGE)
    for kind in (kvdock.plugin.Backend, kvdock.plugin.Kernel):
        for name in vars(kind):
            assert name.startswith("_") or f"`{name}`" in text, name
