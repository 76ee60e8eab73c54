"""A model that is split over processes: each rank has its share of the heads in a pool of its own, and its attention reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from integration import zoo
from kvdock.integrations.transformers.compat import CROPS_TO_LENGTH

SCRIPT = Path(__file__).with_name("tensor_parallel.py")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "heads"), [("llama-mha", 2, 2), ("llama-mha", 4, 1), ("deepseek-v3", 2, 1)])
def test_each_rank_reads_its_own_pages(name: str, ranks: int, heads: int, tmp_path: Path) -> None:
    """Latents have one head, which all ranks hold."""
    if name == "deepseek-v3" and CROPS_TO_LENGTH:
        pytest.skip("before Transformers 5.16 every head's keys are cached of latent attention, too")
    said = launched(name, ranks, tmp_path, CUDA_VISIBLE_DEVICES="")
    for rank in range(ranks):
        assert f"rank {rank} of {ranks} with {heads} heads is right" in said


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_generate_what_one_process_does(tmp_path: Path) -> None:
    said = launched("llama-mha", 2, tmp_path)
    assert all(f"rank {rank} of 2 with 2 heads is right" in said for rank in (0, 1))


def launched(name: str, ranks: int, folder: Path, **variables: str) -> str:
    """What ranks say that generate with a model, which one process has generated with before."""
    family, changes = zoo.MODELS[name]
    model = zoo.build(family, {**changes, "vocab_size": 64}).eval()  # some versions want a head that ranks can share
    model.save_pretrained(folder)
    one = model.generate(**zoo.prompt(4, 9), do_sample=False, max_new_tokens=9, min_new_tokens=9)
    torch.save(one, folder / "one.pt")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "0", "--standalone"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}
    env["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[1]), env.get("PYTHONPATH", "")])
    done = subprocess.run([*launch, str(SCRIPT), str(folder)], env=env, check=False, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
