"""A stranger's prefix cache, installed as a distribution of its own and certified by the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support_projects import Environment, Project, build, run

pytestmark = pytest.mark.slow  # each starts processes that import torch

SOURCE = """
import os

import kvdock
from kvdock.prefix import PrefixCache, RadixPrefixCache

KVDOCK_API = (1, 0)


class Theirs(RadixPrefixCache):
    def evict(self, num_blocks):
        blocks = super().evict(num_blocks)
        return blocks[::-1][1:] if "ACME_WRONG" in os.environ else blocks


class OfLongAgo(RadixPrefixCache):
    def insert_prefix(self, tokens, slots, namespace=(), *, priority=0):
        return super().insert_prefix(tokens, slots, namespace, priority=priority)


class Unfinished(PrefixCache):
    def __init__(self, block_size=16):
        self.block_size = block_size


@kvdock.plugin.hookimpl
def kvdock_prefix_caches():
    return {"acme-tree": Theirs, "acme-old": OfLongAgo, "acme-begun": Unfinished}
"""
"""A cache that loses a block at each eviction where ACME_WRONG is set, and two that are not what the contract asks for."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    root: Path = tmp_path_factory.mktemp("certify-prefix")
    project = Project("kvdock-acme-tree", "1.0", {"acme_tree": "kvdock_acme_tree"}, {"kvdock_acme_tree/__init__.py": SOURCE})
    made = Environment.create(root / "env")
    made.install(*build([project], root).values())
    return made


def certify(environment: Environment, *options: str, **environ: str) -> tuple[int, dict[str, Any]]:
    """Certify the cache; returns the exit code and the JSON report."""
    done = environment.kvdock("conformance", "--prefix", "acme-tree", "--json", *options, environ=environ)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_right_one_is_certified(environment: Environment) -> None:
    code, told = certify(environment)
    assert code == 0, [item for item in told["requirements"] if item["verdict"] not in ("passed", "unsupported")]
    assert (told["kind"], told["backend"], told["complete"]) == ("prefix", "acme-tree", True)
    assert told["about"]["class"] == "kvdock_acme_tree.Theirs"
    assert told["counts"]["passed"] == len(told["requirements"]) > 10
    assert {item["area"] for item in told["requirements"]} == {"prefix"}


@pytest.mark.slow
def test_a_wrong_one_is_not_and_its_script_runs_without_the_kit(environment: Environment, tmp_path: Path) -> None:
    code, told = certify(environment, "--report", str(tmp_path), ACME_WRONG="1")
    assert code == 1
    verdicts = {item["id"]: item["verdict"] for item in told["requirements"]}
    assert verdicts["KVD-PREFIX-006"] == "failed", "evicting n blocks frees exactly so many"
    assert verdicts["KVD-PREFIX-003"] == "passed", "what does not evict is as it was"
    blocked = "import sys, runpy; sys.modules['kvdock_conformance'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    command = [environment.python, "-P", "-c", blocked, str(tmp_path / "failures" / "KVD-PREFIX-006" / "repro.py")]
    broken = run(command, environ={"ACME_WRONG": "1"})
    assert broken.returncode == 1
    assert "NonconformanceError" in broken.stderr
    assert "evict(" in broken.stderr
    assert run(command, check=True).stdout.startswith("passes now: KVD-PREFIX-006")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("acme-old", "OfLongAgo.insert_prefix: expected (self, tokens: 'npt.ArrayLike', blocks: "),
        ("acme-begun", "prefix cache 'acme-begun': expected every method of PrefixCache"),
    ],
)
def test_one_that_is_not_what_the_contract_asks_for_is_told_so(environment: Environment, name: str, text: str) -> None:
    done = environment.kvdock("conformance", "--prefix", name)
    assert done.returncode == 3, "nothing was run"
    assert text in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_one_that_nobody_brings_is_a_wrong_option(environment: Environment) -> None:
    done = environment.kvdock("conformance", "--prefix", "acme-forest")
    assert done.returncode == 2
    assert "prefix: expected the name of a prefix cache as create_prefix_cache takes it, got 'acme-forest'" in done.stderr
