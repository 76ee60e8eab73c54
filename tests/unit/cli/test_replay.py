from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvdock.cli.app import build
from kvdock.cli.replay import replay_file
from kvdock.replay import ReplaySettings
from support_docs import ROOT, blocks
from support_replay import AZURE, CONVERSATION, row, write_rows


def call(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(build(["replay"]), ["replay", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def answer(*arguments: object, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call(*arguments, "--json", code=code).stdout)
    assert (found["schema"], found["command"]) == (1, "replay")
    return found


def same(found: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without times and memory."""
    volatile = ("operations", "seconds", "tokens_per_s", "peak_memory_bytes")
    runs = [{key: value for key, value in run.items() if key not in volatile} for run in found["runs"]]
    return found | {"runs": runs}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A trace of which all is worked out by hand: in blocks of 512, a pool of 3 hits 3 of 8 blocks; see test_run."""
    return write_rows(tmp_path / "small.jsonl", [row([1, 2], output=9), row([1, 2]), row([3, 4]), row([1, 2])])


def test_by_hand(small: Path) -> None:
    found = answer(small, "--pool", "1536,10e6", "--block-size", 512)
    assert found["trace"] == {"path": str(small), "format": "mooncake", "requests": 4, "input_tokens": 4096, "output_tokens": 9}
    assert found["settings"] == {"block_size": 512, "prefix": "radix", "policy": None, "rates": None, "host_tokens": 0}
    assert found["ceiling"] == {"tokens": 0.5, "blocks": 0.5}
    tight, wide = found["runs"]
    assert (tight["pool_tokens"], tight["hit_tokens"], tight["hit_rate"]) == (1536, 1536, 0.375)
    assert (tight["evicted_tokens"], tight["cached_tokens"], tight["waits"]) == (1024, 1536, None)
    assert tight["block_lru"] == {"tokens": 0.375, "blocks": 0.375}
    assert (wide["pool_tokens"], wide["hit_rate"], wide["evicted_tokens"]) == (10**7 // 512 * 512, 0.5, 0)


def test_the_fields_of_the_json_object() -> None:
    found = answer(CONVERSATION, "--limit", 30, "--timed", "--prefill-rate", 5000, "--decode-rate", 50, "--policy", "lfu")
    assert set(found) == {"schema", "command", "trace", "settings", "ceiling", "peak_memory_method", "runs"}
    rates = {"prefill": 5000.0, "decode": 50.0}
    assert found["settings"] == {"block_size": 16, "prefix": "radix", "policy": "lfu", "rates": rates, "host_tokens": 0}
    (run,) = found["runs"]
    assert set(run) == {
        "pool_tokens",
        "requests",
        "input_tokens",
        "hit_tokens",
        "hit_rate",
        "loaded_tokens",
        "evicted_tokens",
        "cached_tokens",
        "operations",
        "seconds",
        "tokens_per_s",
        "waits",
        "peak_memory_bytes",
        "block_lru",
    }
    assert run["requests"] == 30
    assert list(run["operations"]) == ["plan", "begin", "extend", "commit", "finish"]
    assert all(set(one) == {"calls", "total_s", "mean_s", "p50_s", "p99_s", "max_s"} for one in run["operations"].values())
    assert run["waits"]["most_running"] > 1


def test_a_tier_behind_the_pool(small: Path) -> None:
    alone, behind = (answer(small, "--pool", 1024, "--block-size", 512, "--host-tokens", size) for size in (0, "10k"))
    assert (alone["runs"][0]["hit_rate"], alone["runs"][0]["loaded_tokens"]) == (0.25, 0)
    assert (behind["runs"][0]["hit_rate"], behind["runs"][0]["loaded_tokens"]) == (0.5, 1024), "all that a cache without end hits"
    assert behind["settings"]["host_tokens"] == 10_000
    shown = call(small, "--pool", 1024, "--block-size", 512, "--host-tokens", "10k").stdout
    assert "one request after the other; behind the pool a tier of 10k tokens" in shown
    assert "from the tier" in shown


@pytest.mark.parametrize("size", ["1k,2k", "few", "-1"])
def test_what_is_no_size_of_a_tier_is_refused(small: Path, size: str) -> None:
    assert "--host-tokens" in call(small, "--host-tokens", size, code=2).output


def test_pools_may_be_said_in_two_ways_and_the_same_run_finds_the_same() -> None:
    once = answer(CONVERSATION, "--pool", "300k", "--pool", "1M")
    again = answer(CONVERSATION, "--pool", "300000,1e6")
    assert same(once) == same(again)
    assert once["runs"][0]["hit_rate"] <= once["runs"][1]["hit_rate"] <= once["ceiling"]["tokens"]


def test_the_function_behind_the_command() -> None:
    found = replay_file(AZURE, [20_000], ReplaySettings(prefix="naive"), limit=10)
    assert (found["trace"]["format"], found["trace"]["requests"]) == ("azure", 10)
    assert found["runs"][0]["hit_tokens"] == 0


def test_lines_for_people(small: Path) -> None:
    lines = call(small, "--pool", "1536,8k", "--block-size", 512).stdout.splitlines()
    assert lines[:3] == [
        f"{small}: mooncake, 4 requests, 4,096 input tokens",
        "prefix cache: radix, blocks of 512; one request after the other",
        "ceiling (a cache that never evicts): 0.5000 of the tokens, 0.5000 of the trace's blocks",
    ]
    cells = [re.sub(r"\s+", " ", line.strip("│┃ ")) for line in lines]
    assert any(re.match(r"1,536 │ 0\.3750 │ 0\.3750 │ [\d.]+ │ 1,024 │ \d+ MiB", cell) for cell in cells), cells
    assert any(re.match(r"7,680 │ 0\.5000 │ 0\.5000 ", cell) for cell in cells), cells
    rows = [line.split() for line in lines if re.match(r"(1,536|7,680) +\w", line)]
    assert [(one[0], one[1], one[2]) for one in rows[:5]] == [
        ("1,536", "plan", "4"),
        ("1,536", "begin", "4"),
        ("1,536", "extend", "0"),
        ("1,536", "commit", "4"),
        ("1,536", "finish", "4"),
    ]
    assert "waited" not in "".join(lines)


def test_lines_for_people_with_times() -> None:
    text = call(AZURE, "--pool", "20k", "--timed", "--policy", "fifo").stdout
    assert "prefix cache: radix, fifo, blocks of 16; at the trace's times, prefill 10000 and decode 30 tokens/s for each request" in text
    assert re.search(r"waited .* longest wait .* most running", text)


def test_the_json_object_also_goes_to_a_file(tmp_path: Path, small: Path) -> None:
    path = tmp_path / "found.json"
    assert call(small, "--pool", "1536", "--out", path).stdout.startswith(str(small))
    found = json.loads(path.read_text(encoding="utf-8"))
    assert same(found) == same(answer(small, "--pool", "1536"))


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_plot_goes_to_a_file(tmp_path: Path, small: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    path = tmp_path / f"rates.{suffix}"
    call(small, "--pool", "1536,3k,6k", "--plot", path)
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


BAD = {
    "no such file": (
        ["/nowhere/trace.jsonl"],
        "trace: expected a text file that can be read, got '/nowhere/trace.jsonl' (No such file or directory)",
    ),
    "no trace": ([ROOT / "README.md"], "line 1: expected the beginning of a trace, got '# kvdock'"),
    "pool": ([CONVERSATION, "--pool", "many"], "--pool: expected a whole number of tokens such as 3000000, 3M, 512k or 10e6, got 'many'"),
    "pool of no block": ([CONVERSATION, "--pool", "15"], "replay: pool: expected at least a block of 16 tokens"),
    "request larger than the pool": (
        [CONVERSATION, "--pool", "1k"],
        "trace: line 1: expected a request of at most the pool's 992 tokens (62 blocks of 16), got 6758",
    ),
    "policy": ([CONVERSATION, "--policy", "mru"], "policy: expected one of 'lru', 'lfu', 'fifo', 'priority', got 'mru'"),
    "prefix": ([CONVERSATION, "--prefix", "nobodys"], "create_prefix_cache: name: expected one of naive, radix"),
    "speed": ([CONVERSATION, "--timed", "--decode-rate", "0"], "Rates: decode: expected tokens per second, above 0, got 0.0"),
    "kind of plot": ([CONVERSATION, "--plot", "rates.pdf"], "--plot: expected a file that ends in .png or .svg, got 'rates.pdf'"),
    "place of plot": (
        [CONVERSATION, "--plot", "/nowhere/rates.png"],
        "--plot: expected a file in a folder that exists, got '/nowhere/rates.png'. Fix: mkdir -p /nowhere",
    ),
    "place of out": (
        [CONVERSATION, "--out", "/nowhere/found.json"],
        "--out: expected a file in a folder that exists, got '/nowhere/found.json'",
    ),
    "out is a folder": ([CONVERSATION, "--out", ROOT], f"--out: expected a file in a folder that exists, got '{ROOT}'"),
}  # fmt: skip - one line each, as a table


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_nothing_on_stdout(case: str) -> None:
    arguments, text = BAD[case]
    if "plot" in case:
        pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    result = call(*arguments, code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("kvdock replay: ")
    assert text in result.stderr
    error = answer(*arguments, code=2)["error"]
    assert text in error["text"]


@pytest.mark.parametrize("arguments", [["--limit", "0"], ["--block-size", "0"], ["--block-size", "513"]])
def test_options_out_of_range(arguments: list[str]) -> None:
    assert call(CONVERSATION, *arguments, code=2).stdout == ""


def test_all_pools_are_looked_at_before_the_first_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdock.cli.replay.replay", lambda *_: pytest.fail("replayed"))
    assert "the pool's 992 tokens" in call(CONVERSATION, "--pool", "3M,1k", code=2).stderr
    assert "expected one of naive, radix" in call("/nowhere", "--prefix", "nobodys", code=2).stderr, "settings come before the trace"


def test_a_broken_line_is_named_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(CONVERSATION.read_text(encoding="utf-8").replace('"hash_ids"', '"hashes"', 1), encoding="utf-8")
    assert f"kvdock replay: {path}: line 1: expected an object with " in call(path, code=2).stderr


def test_an_out_file_that_cannot_be_written(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    assert (
        "--out: expected a file that can be written, got 'found.json' (Permission denied)"
        in call(small, "--out", "found.json", code=2).stderr
    )


def program(arguments: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "kvdock.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, **settings)


@pytest.mark.slow
def test_progress_is_shown_on_stderr_and_never_on_stdout() -> None:
    arguments = ["replay", str(CONVERSATION), "--pool", "300k", "--json"]
    quiet = program(arguments)
    shown = program(arguments, env={**os.environ, "FORCE_COLOR": "1", "COLUMNS": "100", "TERM": "xterm"})
    assert "pool 300k" in shown.stderr
    assert "300/300" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.stderr)
    assert quiet.stderr.strip() == "", "nobody looks"
    assert same(json.loads(shown.stdout)) == same(json.loads(quiet.stdout))


PAGE_COMMANDS = [
    (block, line) for block in blocks(Path("docs/command-line.md"), "sh") for line in block.text.splitlines() if " replay " in line
]


def test_the_page_shows_what_it_prints() -> None:
    """All but times and memory, which differ each time."""
    (block, line), *more = PAGE_COMMANDS
    assert not more
    assert block.output is not None
    done = program(shlex.split(line, comments=True)[1:], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    volatile = r"(?<=│ )[\d.]+ +(?=│ [\d,]+ +│ \d+ MiB)|\d+ MiB|[━─]+|(?m:^(\S+ +\w+ +[\d,]+) .*$)"
    kept = [re.sub(r"\s+", " ", re.sub(volatile, lambda match: match[1] or "", text)) for text in (block.output, done.stdout)]
    assert kept[0] == kept[1]
