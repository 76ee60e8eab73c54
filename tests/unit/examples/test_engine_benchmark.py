"""`benchmarks/engine.py`: what it asks, and that it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from support_docs import ROOT

pytestmark = pytest.mark.slow
PROGRAM = ROOT / "benchmarks" / "engine.py"


def test_all_sides_give_the_same_tokens(tmp_path: Path) -> None:
    small = ["--requests", "5", "--layers", "1", "--rounds", "1", "--longest-prompt", "40", "--longest-answer", "8", "--device", "cpu"]
    command = [sys.executable, str(PROGRAM), *small, "--out", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,), (page,) = tmp_path.glob("*-engine.json"), tmp_path.glob("*-engine.md")
    rows = json.loads(record.read_text())["rows"]
    assert [row["answers as of generate()"] for row in rows] == ["5 of 5"] * 3
    assert rows[0]["the engine is quicker by"] == 1
    assert all(row["from"] <= row["tokens/s"] <= row["to"] for row in rows)
    assert page.read_text().count("\n| ") == 4


def test_prompts_share_what_they_share_in_the_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [(1024, 100, [1, 2]), (1300, 50, [1, 2, 3]), (512, 1, [7])]
    trace.write_text("\n".join(json.dumps({"input_length": i, "output_length": o, "hash_ids": ids}) for i, o, ids in rows))
    code = f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r}); from engine import load_of; from pathlib import Path; import json; "
    code += f"load = load_of(Path({str(trace)!r}), 3, 130, 10, 50); print(json.dumps([load.prompts, load.answers]))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300)
    prompts, answers = json.loads(done.stdout)
    assert ([len(prompt) for prompt in prompts], answers) == ([102, 130, 51], [10, 5, 1])
    assert prompts[1][:102] == prompts[0]
    assert prompts[2] != prompts[0][:51]
