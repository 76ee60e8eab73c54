"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[1]
_FOLDERS = ("", "docs/", "docs/backends/", "docs/benchmarks/", "docs/benchmarks/*/", "examples/", "examples/*/", "tests/data/")
PAGES = sorted(path.relative_to(ROOT) for folder in _FOLDERS for path in ROOT.glob(f"{folder}*.md"))

_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@attrs.frozen
class Block:
    """A fenced block: ``page`` and ``line`` where it begins, its language, its text, and the text block right behind it."""

    page: Path
    line: int
    language: str
    text: str
    output: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> Iterator[Block]:
    """Yield the blocks of one language; a block of "text" behind one of them is what it prints."""
    content = read(page)
    found = list(_FENCE.finditer(content))
    for match, behind in itertools.zip_longest(found, found[1:]):
        if match["language"] == language:
            line = content.count("\n", 0, match.start()) + 1
            printed = behind and behind["language"] == "text" and not content[match.end() : behind.start()].strip()
            yield Block(page, line, language, match["text"], behind["text"] if behind and printed else None)


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return _FENCE.sub("", read(page))
