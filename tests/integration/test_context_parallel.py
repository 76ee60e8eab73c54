"""Processes that hold a share of the tokens each generate what one process does, and notice when they decide apart."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("context_parallel.py")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 1), (4, 1), (4, 2)])
def test_ranks_that_share_the_tokens_generate_what_one_process_does(ranks: int, kv_heads: int) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "0", "--standalone"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[1]), env.get("PYTHONPATH", "")])
    done = subprocess.run([*launch, str(SCRIPT), str(kv_heads)], env=env, check=False, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    held = re.findall(rf"rank (\d) of {ranks} is right, with \[(\d+), (\d+), (\d+)\] of \[9, 23, 46\] tokens", done.stdout)
    assert sorted(int(rank) for rank, *_ in held) == list(range(ranks)), done.stdout
    assert [sum(int(row[place]) for row in held) for place in (1, 2, 3)] == [kv_heads * tokens for tokens in (9, 23, 46)]
    wrong = re.findall(rf"rank (\d) reads: check_alike: rank 1 of {ranks}: expected the digest of rank 0", done.stdout)
    assert sorted(wrong) == [str(rank) for rank in range(ranks)], done.stdout
