"""Prompts computed in one set of processes and gone on with in another, that shares the heads otherwise: the tokens of one process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("prefill_decode.py")


def play(prefills: int, decodes: int, scene: str) -> tuple[list[int], list[str]]:
    """Run all processes, and return their exit codes and what they said."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[1]), env.get("PYTHONPATH", "")])
    start = [sys.executable, str(SCRIPT), str(port)]
    processes = [
        subprocess.Popen(
            [*start, str(rank), str(prefills), str(decodes), scene], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(prefills + decodes)
    ]
    try:
        said = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert set(codes) <= {0, 9}, [errors[-2500:] for _, errors in said]
    return codes, [out for out, _ in said]


RIGHT = "decode 36 tokens are right"


@pytest.mark.slow
@pytest.mark.parametrize(("prefills", "decodes"), [(1, 2), (2, 1), (2, 4)])
def test_two_sides_generate_what_one_process_does(prefills: int, decodes: int) -> None:
    """With 4 ranks for 2 heads each head is there twice, and comes from one owner."""
    codes, said = play(prefills, decodes, "whole")
    assert codes == [0] * (prefills + decodes)
    for out in said[:prefills]:
        assert out == "prefill\n"
    for out in said[prefills:]:
        assert RIGHT in out
        assert [line for line in out.splitlines() if ": " in line] == [f"decode r{number}: None" for number in range(3)]


@pytest.mark.slow
def test_a_prefill_process_that_dies() -> None:
    """What it had not sent is computed where it is needed: no token is wrong, and nobody waits for ever."""
    codes, said = play(1, 2, "prefill dies")
    assert codes == [9, 0, 0]
    for out in said[1:]:
        assert "decode r0: None" in out
        (second,) = (line for line in out.splitlines() if line.startswith("decode r1: "))
        assert "peer 'p0'" in second, "which transfer failed, or which connection is broken"
        assert RIGHT in out


@pytest.mark.slow
def test_a_decode_process_that_dies() -> None:
    codes, said = play(2, 1, "decode dies")
    assert codes == [0, 0, 9]
    for out in said[:2]:
        assert "blocks of 'r1' to peer 'd0': expected all of them, got its process is gone" in out
