"""A model that is split over processes: each rank has its share of the heads in a pool of its own, and its attention reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from integration import zoo
from kvdock.integrations.transformers.compat import CROPS_TO_LENGTH

SCRIPT = Path(__file__).with_name("tensor_parallel.py")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "heads"), [("llama-mha", 2, 2), ("llama-mha", 4, 1), ("deepseek-v3", 2, 1)])
def test_each_rank_reads_its_own_pages(name: str, ranks: int, heads: int, tmp_path: Path) -> None:
    """Latents have one head, which all ranks hold."""
    if name == "deepseek-v3" and CROPS_TO_LENGTH:
        pytest.skip("before Transformers 5.16 every head's keys are cached of latent attention, too")
    family, changes = zoo.MODELS[name]
    zoo.build(family, {**changes, "vocab_size": 64}).save_pretrained(tmp_path)  # some versions want a head that ranks can share
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "0", "--standalone"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[1]), env.get("PYTHONPATH", "")])
    done = subprocess.run([*launch, str(SCRIPT), str(tmp_path)], env=env, check=False, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(ranks):
        assert f"rank {rank} of {ranks} with {heads} heads is right" in done.stdout
