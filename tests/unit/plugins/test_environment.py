"""An environment that no longer says what plugins were loaded with is reported once. Child processes: `tests/packaging`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from kvdock.errors import ArgumentValueError, KVDockWarning
from kvdock.plugins import environment
from kvdock.plugins.registry import Registry
from support_plugins import QUIET, InProcessBackend, plugin

META = torch.device("meta")


def test_change_after_loading_is_reported_once_and_changes_nothing() -> None:
    environ = dict(QUIET)
    registry = Registry(environ)
    registry.register(plugin(InProcessBackend("acme")), "acme")
    environ["KVDOCK_BACKEND_META"] = "other"
    with pytest.warns(KVDockWarning) as caught:
        assert registry.choose("copy_blocks_", META).backend.name == "acme"
    assert [str(item.message) for item in caught] == [
        "plugins were loaded with [allow all; deny none; autoload off]; [allow all; deny none; autoload off; meta: other] came too "
        "late and changes nothing in this process. Fix: set KVDOCK_* variables before the first process uses kvdock"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.records()
        registry.choose("gather_paged", META)


def test_change_to_something_unreadable_is_a_warning_after_loading_and_an_error_before() -> None:
    environ = dict(QUIET)
    registry = Registry(environ)
    registry.records()
    environ["KVDOCK_BACKENDS"] = "@"
    with pytest.warns(KVDockWarning, match="plugins are loaded already, and keep what they were loaded with: KVDOCK_BACKENDS: expected"):
        registry.records()
    with pytest.raises(ArgumentValueError, match="KVDOCK_BACKENDS: expected plugin names"):
        Registry(environ).records()


def test_failed_first_question_is_not_remembered() -> None:
    environ = {**QUIET, "KVDOCK_BACKENDS": "@"}
    registry = Registry(environ)
    with pytest.raises(ArgumentValueError):
        registry.records()
    del environ["KVDOCK_BACKENDS"]
    assert all(record.state.name == "BLOCKED" for record in registry.records())


WORKERS = """
import json, multiprocessing, os, sys, warnings
BEFORE = dict(os.environ)

def work(queue, parents, changes):
    os.environ.update(changes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import kvdock, torch
        kvdock.ops.copy_blocks_(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8), [(0, 1)])
    said = [str(item.message) for item in caught if item.category.__name__ == "KVDockWarning"]
    queue.put([BEFORE == parents, dict(os.environ) == {**BEFORE, **changes}, said])

def ask(method, changes):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    worker = context.Process(target=work, args=(queue, BEFORE, changes))
    worker.start()
    answer = queue.get(timeout=100)
    worker.join()
    return answer

if __name__ == "__main__":
    import kvdock, kvdock.runtime, torch
    seen = [dict(os.environ) == BEFORE]
    kvdock.runtime.default().registry.records()
    seen.append(dict(os.environ) == BEFORE)
    kvdock.ops.copy_blocks_(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8), [(0, 1)])
    seen.append(dict(os.environ) == BEFORE)
    asked = [ask(method, {"KVDOCK_BACKENDS_DENY": "other"}) for method in sys.argv[1:]]
    print(json.dumps([*seen, dict(os.environ) == BEFORE, asked]))
"""


FIX = "Fix: set KVDOCK_* variables before the first process uses kvdock"
FORKED = (
    "plugins were loaded with [allow all; deny none; autoload on]; [allow all; deny other; autoload on] came too late and changes "
    f"nothing in this process. {FIX}"
)
NEW = (
    "this child process loads other plugins than its parent: allow all; deny other; autoload on here, allow all; deny none; "
    f"autoload on there. {FIX}"
)


@pytest.mark.skipif(importlib.util.find_spec("kvdock_cpu") is None, reason="kvdock_cpu is not installed")
@pytest.mark.parametrize(
    "said", [{"fork": FORKED, "spawn": NEW}, pytest.param({"forkserver": NEW}, marks=pytest.mark.slow)], ids=lambda said: "-".join(said)
)
def test_no_variable_is_written_and_children_still_notice_what_their_parent_loaded_with(tmp_path: Path, said: dict[str, str]) -> None:
    script = tmp_path / "workers.py"
    script.write_text(WORKERS, encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVDOCK_")}
    command = [sys.executable, str(script), *said]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=200)
    *unchanged, asked = json.loads(done.stdout)
    assert unchanged == [True] * 4, "after the import, after loading plugins, after an op, after the children"
    # A child gets the parent's environment, which stays as it is but for what the child puts into it.
    assert asked == [[True, True, [text]] for text in said.values()]


def test_a_registry_with_an_environment_of_its_own_says_nothing_to_children() -> None:
    before = dict(environment._handed_on())
    Registry(dict(QUIET)).records()
    assert environment._handed_on() == before
