"""`kvdock explain transformers MODEL`: the reasons that the caches themselves give, by the real command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from integration import zoo
from kvdock.cli.app import build
from kvdock.integrations.transformers import PagedCacheForTransformers
from kvdock.integrations.transformers.explanation import CacheExplanation

EAGER = dict.fromkeys(zoo.EAGER_ONLY, "eager")


def saved(name: str, folder: Path) -> Path:
    """Write a model's configuration, and nothing else."""
    zoo.model(name, EAGER.get(name, "sdpa")).config.save_pretrained(folder)
    return folder


def explain(*arguments: object, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(build(["explain"]), ["explain", *map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def kvdock(*arguments: object, code: int = 0, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    call = f"{before}\nfrom kvdock.cli import main; import sys; sys.argv = ['kvdock', *sys.argv[1:]]; main()"
    done = subprocess.run([sys.executable, "-c", call, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("name", zoo.MODELS)
def test_the_answer_is_what_the_cache_of_the_model_itself_says(name: str, tmp_path: Path) -> None:
    """Though the command draws the weights itself, and has only the configuration."""
    cache = zoo.paged(zoo.model(name, EAGER.get(name, "sdpa")), block_size=16)
    own = cache.explain()
    answer = explain("transformers", saved(name, tmp_path))
    assert (answer["attention"], answer["reason"]) == (own.attention, own.reason)
    assert [layer["reason"] for layer in answer["layers"]] == [*own.layers]
    assert answer["architecture"] == type(zoo.model(name, EAGER.get(name, "sdpa"))).__name__
    assert answer["transformers"] == transformers.__version__
    layers = [layer["attention"] for layer in answer["layers"]]
    assert layers == ["gather" if reason else "pages" for reason in own.layers]
    readers = {"pages": "paged_attention", "gather": "gather_paged"}
    assert {found["op"] for found in answer["ops"]} == {readers[layer] for layer in layers}
    assert {found["served_by"] for found in answer["ops"]} == {"cpu"}


def test_a_cache_explains_itself_in_one_way() -> None:
    """`attention`, `repr` and `explain` say the same, and the last says it of each layer."""
    pages, gathers = zoo.paged(zoo.model("llama-gqa")), zoo.paged(zoo.model("falcon"))
    mixed = zoo.paged(zoo.model("llama4-chunked"))
    assert (pages.attention, pages.explain().reason, pages.explain().layers) == ("pages", "", ("", ""))
    assert gathers.attention == "gather"
    assert gathers.explain().layers == (gathers.explain().reason,) * 2
    assert mixed.attention == "pages"
    assert mixed.explain().layers == ("a mask that is not plain", "")
    for cache in (pages, gathers, mixed):
        assert f"attention={cache.explain()}, " in repr(cache)


def test_the_last_pass_is_explained_too() -> None:
    made = zoo.model("llama-gqa")
    cache = zoo.paged(made)
    made(**cache.bind(input_ids=torch.full((1, 5), 7)))
    one = {"input_ids": torch.full((1, 1), 7), zoo.CACHE_KEYWORD: cache}
    made(**one)
    assert cache.explain() == CacheExplanation("pages", "", ("", ""), "gradients are recorded: wrap the call in torch.no_grad()")
    with torch.no_grad():
        made(**one)
    assert cache.explain() == CacheExplanation("pages", "", ("", ""), "")


@pytest.mark.slow
def test_the_real_command_line_answers_people(tmp_path: Path) -> None:
    lines = kvdock("explain", "transformers", saved("falcon", tmp_path)).stdout.splitlines()
    reason = zoo.paged(zoo.model("falcon")).explain().reason
    assert lines[0] == f"FalconForCausalLM with transformers {transformers.__version__}: attention gathers keys and values"
    assert lines[1] == f"why: {reason}"
    assert lines[2].startswith("gather_paged on cpu is served by cpu: kvdock_cpu.")
    told = CliRunner().invoke(build(["explain"]), ["explain", "transformers", str(saved("llama4-chunked", tmp_path))]).stdout.splitlines()
    assert told[0] == f"Llama4ForCausalLM with transformers {transformers.__version__}: attention reads pages"
    assert told[1] == "but layers 0 gather: a mask that is not plain"
    assert [line.partition(" ")[0] for line in told if "is served by" in line] == ["gather_paged", "paged_attention"]
    told = CliRunner().invoke(build(["explain"]), ["explain", "transformers", str(saved("llama-gqa", tmp_path))]).stdout.splitlines()
    assert told[1].startswith("paged_attention on cpu is served by cpu"), "there is nothing to give reasons for"


@pytest.mark.slow
def test_the_real_command_line_answers_programs(tmp_path: Path) -> None:
    done = kvdock("explain", "transformers", saved("llama-gqa", tmp_path) / "config.json", "--dtype", "bfloat16", "--run", 2, "--json")
    answer = json.loads(done.stdout)
    assert (answer["schema"], answer["command"], answer["attention"]) == (1, "explain", "pages")
    assert answer["cache"] == {"dtype": "torch.bfloat16", "heads": 2, "head_dim": 8, "block_size": 16}
    assert answer["ops"][0]["run"]["calls"] == 2


def test_the_dtype_is_that_of_the_model_unless_another_is_asked_for(tmp_path: Path) -> None:
    config = zoo.model("llama-gqa").config.to_dict() | {"dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert explain("transformers", tmp_path)["cache"]["dtype"] == "torch.float16"
    assert explain("transformers", tmp_path, "--dtype", "float32", "--block-size", 4)["cache"] == {
        "dtype": "torch.float32",
        "heads": 2,
        "head_dim": 8,
        "block_size": 4,
    }


def test_random_numbers_of_the_process_stay(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    explain("transformers", saved("llama-gqa", tmp_path))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_model_that_is_refused_is_an_error_that_says_why(tmp_path: Path) -> None:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    error = explain("transformers", tmp_path, code=2)["error"]
    with pytest.raises(NotImplementedError) as caught:
        PagedCacheForTransformers.for_model(transformers.MambaForCausalLM(config), zoo.conf())
    assert error == {"type": "UnsupportedError", "text": str(caught.value)}


def test_what_is_no_model(tmp_path: Path) -> None:
    expected = "expected a folder with a config.json, such a file, or a name on the hub, of a causal model that fits on"
    for name, device, told in (("nothing", "cpu", ""), (".", "cpu", ""), ("llama", "acme:0", "acme")):
        saved("llama-gqa", tmp_path / "llama")
        error = explain("transformers", tmp_path / name, "--device", device, code=2)["error"]
        assert error["type"] == "ArgumentValueError"
        assert error["text"].startswith(f"MODEL: {expected} {device}, got '{tmp_path / name}' (")
        assert told in error["text"]
    transformers.ViTConfig().save_pretrained(tmp_path)
    assert "Unrecognized configuration class" in explain("transformers", tmp_path, code=2)["error"]["text"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["transformers"], "MODEL: expected a model behind 'transformers', and nothing behind an op, got nothing"),
        (["copy_blocks_", "x"], "MODEL: expected a model behind 'transformers', and nothing behind an op, got 'x' behind 'copy_blocks_'"),
        (["transformers", "x", "--heads", "3"], "--heads: expected no such option with a model, which has sizes of its own, got 3"),
        (["transformers", "x", "--head-dim", "8"], "--head-dim: expected no such option with a model, which has sizes of its own, got 8"),
        (["transformers", "x", "--dtype", "nn"], "--dtype: expected torch's name of a dtype, such as bfloat16, got 'nn'"),
    ],
)
def test_questions_that_make_no_sense(arguments: list[str], told: str) -> None:
    assert explain(*arguments, code=2)["error"] == {"type": "ArgumentValueError", "text": told}


@pytest.mark.slow
def test_without_transformers_the_fix_is_said_and_ops_are_explained_as_ever(tmp_path: Path) -> None:
    missing = "import sys; sys.modules['transformers'] = None"
    done = kvdock("explain", "transformers", tmp_path, code=2, before=missing)
    assert done.stderr.startswith("kvdock explain: MODEL: expected transformers to be installed, got ")
    assert done.stderr.endswith("Fix: pip install 'kvdock[transformers]'\n")
    assert "is served by" in kvdock("explain", "copy_blocks_", before=missing).stdout
