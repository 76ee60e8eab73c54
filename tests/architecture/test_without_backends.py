"""Core alone: without ``backends/`` and without any entry point it imports, says what is missing, and its tests are green."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support_isolated import dependencies
from support_sources import ROOT

OWN_TESTS = ["errors", "layout", "rank", "spec", "runtime", "modes"]
OWN_FOLDERS = ["cache", "plugins", "scheduler"]
"""What of ``tests/unit`` is about core."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of core, and with the distributions that it needs: all that are installed but kvdock's own."""
    root = tmp_path_factory.mktemp("alone")
    shutil.copytree(ROOT / "core", root / "core", ignore=shutil.ignore_patterns("__pycache__"))
    dependencies(root / "site")
    return root


def run(alone: Path, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run Python with nothing on its path but core and what it needs: ``-S`` keeps site-packages and .pth files out."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("KVDOCK_", "PYTEST_"))}
    environ["PYTHONPATH"] = os.pathsep.join([str(alone / "core"), str(alone / "site")])
    command = [sys.executable, "-S", "-P", *arguments]
    return subprocess.run(command, env=environ, cwd=alone, capture_output=True, text=True, check=False, timeout=timeout)


SCRIPT = """
import importlib.metadata, importlib.util, json, sys
import kvdock, torch
answers = {"file": kvdock.__file__}
answers["backends"] = [name for name in ("kvdock_cpu", "kvdock_cuda", "kvdock_rocm", "kvdock_triton") if importlib.util.find_spec(name)]
answers["entry points"] = len(importlib.metadata.entry_points(group="kvdock.backends"))
spec = kvdock.KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=4, max_positions=8, dtype=torch.float32)
for name, config in (("paged", kvdock.PagedKVCacheConfig(num_blocks=1)), ("static", kvdock.StaticKVCacheConfig())):
    try:
        kvdock.create_cache(spec, config, kvdock.RankInfo("cpu"))
    except kvdock.NoBackendError as error:
        answers[name] = str(error)
try:
    kvdock.ops.copy_blocks_(torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 1, 1), [(0, 1)])
except kvdock.NoBackendError as error:
    answers["op"] = str(error)
print(json.dumps(answers))
"""


def test_core_imports_and_says_that_there_is_no_backend(alone: Path) -> None:
    done = run(alone, "-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert answers["file"] == str(alone / "core" / "kvdock" / "__init__.py")
    assert answers["backends"] == []
    assert answers["entry points"] == 0
    for use in ("paged", "static", "op"):
        assert "no backend that is ready claims cpu. Installed: " in answers[use]
        assert "Fix: install a plugin" in answers[use]
    assert not done.stderr, "having no plugin is nothing to warn of"


@pytest.mark.slow  # imports torch and Transformers, and runs a few hundred tests
def test_its_own_tests_are_green(alone: Path) -> None:
    shutil.copytree(ROOT / "tests", alone / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", alone)
    unit = alone / "tests" / "unit"
    own = [str(path) for path in (*(unit / f"test_{name}.py" for name in OWN_TESTS), *(unit / name for name in OWN_FOLDERS))]
    done = run(alone, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not backend", *own, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1]
    assert "error" not in done.stdout.splitlines()[-1]
