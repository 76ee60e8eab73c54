"""The page on writing a backend: its commands one after the other, as a reader types them, and its excerpts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from support_docs import blocks, read
from support_projects import Environment
from support_sources import ROOT

PAGE = Path("docs/backends/writing-a-backend.md")
EXAMPLE = ROOT / "examples" / "acme_backend"
COMMANDS = [line for block in blocks(PAGE, "sh") for line in block.text.splitlines()]


@pytest.mark.slow  # the whole road, with several runs of the kit
def test_the_commands_do_what_the_page_says(stranger: Callable[..., Environment], tmp_path: Path) -> None:
    environment = stranger("page")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "acme_backend").symlink_to(EXAMPLE)
    for line in COMMANDS:
        wanted = re.search(r"# exits with (\d)", line)
        done = environment.typed(line, tmp_path)
        assert done.returncode == int(wanted[1] if wanted else 0), f"{line}\n{done.stdout}{done.stderr}"
    assert list((tmp_path / "dist").glob("kvdock_acme-1.0.0-*.whl"))


def test_there_are_commands_for_each_step() -> None:
    assert {shlex.split(line)[0] for line in COMMANDS} >= {"kvdock", "pip", "pytest"}
    assert len(COMMANDS) > 12


def excerpts() -> list[tuple[str, str]]:
    """Return the blocks that stand for files of the example."""
    return [(language, block.text) for language in ("py", "toml") for block in blocks(PAGE, language)]


@pytest.mark.parametrize(("language", "text"), excerpts(), ids=[text.strip().splitlines()[0][:40] for _, text in excerpts()])
def test_excerpts_are_what_the_example_has(language: str, text: str) -> None:
    files = [path for path in EXAMPLE.rglob(f"*.{language}") if "build" not in path.parts]
    assert any(text in path.read_text(encoding="utf-8") for path in files), f"no file of the example has\n{text}"


def test_every_method_of_the_contract_is_mentioned() -> None:
    text = read(PAGE)
    for name in ("claims", "devices", "probe", "capabilities", "kernels", "skipped_writes", "is_capturing", "supports", "prepare", "notes"):
        assert name in text.lower(), name
