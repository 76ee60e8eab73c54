"""What `kvdock explain` and `kvdock doctor` show of descriptors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvdock import runtime
from kvdock.cli.app import build
from kvdock.cli.counters import counters
from kvdock.ops.catalog import CATALOG
from kvdock.plugins.registry import Registry
from opskit import active
from support_descriptors import Pool, WatchingBackend, in_thread
from support_plugins import QUIET, plugin

OPTIONS = ("--heads", "2", "--head-dim", "8", "--block-size", "4", "--dtype", "float32")


@pytest.fixture
def backend() -> Iterator[WatchingBackend]:
    """Make the process's runtime one that has this backend alone, and has been used."""
    made = WatchingBackend()
    registry = Registry(QUIET)
    registry.register(plugin(made), "made by a test")
    with active(runtime.Runtime(registry)):
        yield made


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(build(arguments), arguments)
    assert result.exit_code == code, result.output
    return result.stdout


def answer(*arguments: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json", code=code))
    return found


@pytest.mark.parametrize("op", CATALOG)
def test_explain_runs_the_example(backend: WatchingBackend, op: str) -> None:
    found = answer("explain", op, "--run", "4", *OPTIONS)
    (row,) = found["descriptors"]
    assert row["prepare_s"] > 0
    assert row == {
        "op": op,
        "device": "host",
        "hits": 3,
        "misses": 1,
        "evictions": 0,
        "destroyed": 0,
        "failures": 0,
        "size": 1,
        "capacity": 100,
        "prepare_s": row["prepare_s"],
    }
    assert found["run"]["calls"] == 4
    assert found["run"]["first_call_s"] > row["prepare_s"]
    assert found["run"]["later_call_s"] > 0
    assert (len(backend.own[op].prepared), backend.ledger.faults) == (1, [])


def test_explain_prepares_nothing_unless_asked(backend: WatchingBackend) -> None:
    found = answer("explain", "gather_paged")
    assert found["descriptors"] == []
    assert "run" not in found
    assert backend.ledger.made == []
    assert run("explain", "gather_paged").splitlines()[-1] == (
        "descriptors: none yet; --run 3 calls the op three times and shows the counters"
    )


def test_explain_runs_on_the_backend_that_is_named(backend: WatchingBackend) -> None:
    assert answer("explain", "copy_blocks_", "--run", "1", "--backend", "portable")["served_by"] == "portable"
    assert backend.own["copy_blocks_"].prepared == []
    found = answer("explain", "copy_blocks_", "--run", "1", "--backend", "watching")
    assert (found["descriptors"][0]["misses"], found["run"]["later_call_s"]) == (2, None)
    assert len(backend.own["copy_blocks_"].prepared) == 1


def test_explain_for_people(backend: WatchingBackend) -> None:
    text = run("explain", "paged_caching_", "--run", "3", *OPTIONS)
    assert re.search(r"^called 3 times: the first took [0-9.]+ ms of host time, each later one [0-9.]+ us$", text, re.MULTILINE)
    header, row = (re.split(r"\s*[│┃]\s*", line)[1:-1] for line in text.splitlines() if line[0] in "│┃")
    assert header == ["op", "device", "hits", "misses", "evictions", "held", "of", "destroyed", "failures", "prepare ms"]
    assert row[:-1] == ["paged_caching_", "host", "2", "1", "0", "1", "100", "0", "0"]
    assert float(row[-1]) > 0


@pytest.mark.parametrize("bad", ["-1", "many"])
def test_a_number_of_calls_that_makes_no_sense(backend: WatchingBackend, bad: str) -> None:
    result = CliRunner().invoke(build(["explain"]), ["explain", "copy_blocks_", "--run", bad])
    assert result.exit_code == 2
    assert "--run" in result.stderr


def test_doctor_shows_what_this_process_has_prepared(backend: WatchingBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDOCK_DISABLE_AUTOLOAD", "1")
    dispatcher = runtime.default().dispatcher
    pools = [Pool(device, heads) for device in ("cpu", "privateuseone:1") for heads in (1, 2, 1)]
    for pool in pools:
        assert pool.write(dispatcher, 1.0)
    in_thread(pools[0].write, dispatcher, 2.0)
    rows = answer("doctor", code=1)["descriptors"]  # without plugins, doctor has something to say
    assert [(row["op"], row["device"], row["hits"], row["misses"], row["destroyed"], row["size"]) for row in rows] == [
        ("paged_caching_", "host", 1, 3, 1, 2),
        ("paged_caching_", str(torch.device("privateuseone:1")), 1, 2, 0, 2),
    ]
    text = run("doctor", code=1)
    assert "prepare ms" in text
    assert re.search(r"│ paged_caching_ │ host +│ 1 +│ 3 +│ 0 +│ 2 +│ 100 +│ 1 +│ 0 ", text)


def test_doctor_in_a_process_that_has_called_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDOCK_DISABLE_AUTOLOAD", "1")
    runtime.set_default(None)
    assert answer("doctor", code=1)["descriptors"] == []
    assert "descriptors: none yet; `kvdock explain OP --run 3` calls an op three times and shows the counters" in run("doctor", code=1)
    assert runtime.made() is None, "doctor loads nothing into this process"
    assert counters(None) == []
