"""Running the processes of `integration/prefill_decode.py`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["RIGHT", "play"]

SCRIPT = Path(__file__).with_name("integration") / "prefill_decode.py"

RIGHT = "decode 36 tokens are right"
"""What a decode process says at its end."""


def play(
    prefills: int,
    decodes: int,
    scene: str,
    transport: str = "torch.distributed",
    python: str = sys.executable,
    environ: Mapping[str, str] | None = None,
) -> tuple[list[int], list[str]]:
    """Run all processes, and return their exit codes and what they said. One that hangs is killed behind the others."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **(environ or {})}
    env["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[1]), env.get("PYTHONPATH", "")])
    options = [str(prefills), str(decodes), scene, transport]
    processes = [
        subprocess.Popen(
            [python, str(SCRIPT), str(port), str(rank), *options], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(prefills + decodes)
    ]
    said = [("", "")] * len(processes)
    try:
        for rank in reversed(range(len(processes))):
            if rank < prefills and scene == "prefill hangs":
                processes[rank].kill()
            said[rank] = processes[rank].communicate(timeout=300)
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert set(codes) <= {0, 9, -9}, [errors[-2500:] for _, errors in said]
    return codes, [out for out, _ in said]
