"""This folder's quick tests on other versions of Transformers, each installed beside the one of this environment.

What is slow are more models, dtypes and seeds of the same kinds. Both halves of a version take more than half an hour.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers

ROOT = Path(__file__).parents[2]
VERSIONS = ("5.14.1", "5.16.1", "5.18.0", "5.23.0", "5.24.0")
"""The oldest that is supported, one on each side of every change that `compat` lists, and the newest."""

LEFT_OUT = ("test_versions.py", "test_demo.py")


def install(version: str, folder: Path) -> None:
    """Install a version and what it needs (huggingface-hub and tokenizers have ranges that exclude one another)."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    command += ["--target", str(folder), f"transformers=={version}", f"numpy=={np.__version__}"]
    subprocess.run(command, check=True, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("version", [version for version in VERSIONS if version != transformers.__version__])
def test_all_of_this_folder_passes_on_another_version(version: str, tmp_path: Path) -> None:
    install(version, tmp_path)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]), "HF_HUB_OFFLINE": "1"}
    asked = subprocess.run(
        [sys.executable, "-c", "import transformers; print(transformers.__version__)"], env=env, check=True, capture_output=True, text=True
    )
    assert asked.stdout.strip() == version
    left_out = [f"--ignore=tests/integration/{name}" for name in LEFT_OUT]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        "not slow",
        *left_out,
        "tests/integration",
    ]
    done = subprocess.run(command, env=env, cwd=ROOT, check=False, capture_output=True, text=True, timeout=1500)
    print(done.stdout[-4000:], done.stderr[-2000:])
    assert done.returncode == 0
