"""Runs `tests/unit/triton`, and in full the tests of ops, under Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from support_sources import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install 'kvdock[triton]'")


def run(*arguments: str) -> None:
    """Run tests in a process of their own; what it printed is the failure's text."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert " passed" in text, text
    assert "skipped" not in text, text


def test_attention_with_windows_and_by_maps() -> None:
    run("tests/unit/triton/test_attention_kernels.py", "-k", "test_tiles_of_queries or (test_tiles_come_by_maps and float16-HND)")


@pytest.mark.slow
def test_kernels() -> None:
    run("tests/unit/triton", "-m", "not slow")


@pytest.mark.slow
def test_kernels_at_full_size() -> None:
    run("tests/unit/triton", "-m", "slow")


@pytest.mark.slow
def test_every_test_of_an_op() -> None:
    run("tests/unit/ops", "-k", "interpreted")
