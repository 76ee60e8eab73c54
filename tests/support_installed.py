"""Packages that examples need and kvdock's environment lacks: installed from the registry into a folder, for slow tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from support_docs import ROOT

__all__ = ["environ", "install", "passed"]

UNREACHABLE = ("NewConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "Temporary failure in name resolution", "ProxyError")


def install(folder: Path, *wanted: str) -> None:
    """Install what is wanted, or skip the test where the registry cannot be reached; everything else fails."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "--retries", "1"]
    command += ["--target", str(folder), *wanted]
    if "--no-deps" not in wanted:
        command.append(f"numpy=={np.__version__}")
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    reasons = [text for text in UNREACHABLE if text in done.stderr]
    if done.returncode and reasons:
        pytest.skip(f"the package registry cannot be reached: {reasons[0]}")
    assert done.returncode == 0, done.stderr


def environ(*folders: Path, **others: str) -> dict[str, str]:
    """Return an environment in which these folders come first."""
    path = os.pathsep.join([*map(str, folders), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **others}


def passed(tests: Path, env: dict[str, str], timeout: float, options: Sequence[str] = ()) -> str:
    """Run tests, all of which must pass and none be skipped; return what pytest printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "default", *options, str(tests)]
    done = subprocess.run(command, env=env, cwd=ROOT, check=False, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout.splitlines()[-1], done.stdout
    return done.stdout
