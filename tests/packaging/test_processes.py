"""Plugins across processes and threads: fork, spawn, an environment that differs, and discovery that is entered again."""

from __future__ import annotations

import pytest

from support_distributions import Environments
from support_projects import Environment

WORKERS = """
import json, multiprocessing, os, sys, warnings

def work(queue, changes):
    os.environ.update(changes)
    import kvdock, kvdock.runtime, torch
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        registry = kvdock.runtime.default().registry
        states = {record.name: record.state.name for record in registry.records() if record.distribution == "kvdock-first"}
        chosen = registry.choose("copy_blocks_", torch.device("meta")).backend.name
    queue.put([states, chosen, [str(item.message) for item in caught if item.category.__name__ == "KVDockWarning"]])

def ask(method, changes):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    worker = context.Process(target=work, args=(queue, changes))
    worker.start()
    answer = queue.get(timeout=100)
    worker.join()
    return answer

if __name__ == "__main__":
    import kvdock.runtime, torch
    kvdock.runtime.default().registry.choose("copy_blocks_", torch.device("meta"))
    print(json.dumps([ask(sys.argv[1], json.loads(changes)) for changes in sys.argv[2:]]))
"""


@pytest.fixture(scope="module")
def first(environments: Environments) -> Environment:
    """An environment with one healthy plugin."""
    return environments.with_projects("kvdock-first")


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_find_the_same_backends_and_a_differing_environment_is_reported(first: Environment, method: str) -> None:
    same, denied = first.json(WORKERS, method, "{}", '{"KVDOCK_BACKENDS_DENY": "cpu"}')
    assert same == [{"first": "READY"}, "first", []]
    assert denied[:2] == [{"first": "READY"}, "first"]
    assert len(denied[2]) == 1
    expected = {
        "fork": "plugins were loaded with [allow all; deny none; autoload on]; [allow all; deny cpu; autoload on] came too late and "
        "changes nothing in this process. Fix: set KVDOCK_* variables before the first process uses kvdock",
        "spawn": "this child process loads other plugins than its parent: allow all; deny cpu; autoload on here, allow all; deny none; "
        "autoload on there. Fix: set KVDOCK_* variables before the first process uses kvdock",
    }
    assert denied[2][0] == expected[method]


@pytest.mark.slow
def test_program_of_its_own_is_not_compared_with_whoever_started_it(first: Environment) -> None:
    code = """
import json, subprocess, sys, os, warnings
import kvdock.runtime
if len(sys.argv) == 1:
    kvdock.runtime.default().registry.records()
    command = [sys.executable, "-P", "-W", "error", __file__, "child"]
    print(subprocess.run(command, env={**os.environ, "KVDOCK_BACKENDS": "first"}, stdout=subprocess.PIPE, check=True, text=True).stdout)
else:
    records = kvdock.runtime.default().registry.records()
    print(json.dumps([record.name for record in records if record.state.name == "READY"]))
"""
    assert first.script(code).stdout.strip() == '["first"]'


STUCK = """
import json, os, threading
import torch
from kvdock.errors import PluginError
from kvdock.plugins.registry import Registry

arrived, go_on = threading.Event(), threading.Event()
here = os.getpid()

def watch(step, subject):
    if os.getpid() == here and step == "probe":
        arrived.set()
        go_on.wait(60)

registry = Registry({"KVDOCK_BACKENDS": "first"}, watch=watch, wait_s=0.2)
loader = threading.Thread(target=registry.records)
loader.start()
assert arrived.wait(60)
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.write(writer, registry.choose("copy_blocks_", torch.device("meta")).backend.name.encode())
    os._exit(0)
name = os.read(reader, 100).decode()
os.waitpid(child, 0)
try:
    registry.records()
except PluginError as error:
    text = str(error)
go_on.set()
loader.join()
print(json.dumps({"in_child": name, "error": text, "later": registry.choose("copy_blocks_", torch.device("meta")).backend.name}))
"""


@pytest.fixture(scope="module")
def stuck(first: Environment, environments: Environments) -> dict[str, str]:
    """What others get while one thread is stuck in a probe: a forked child, another thread, and that thread afterwards."""
    answer: dict[str, str] = environments.once("stuck", lambda: first.json(STUCK))
    return answer


def test_fork_while_another_thread_loads_plugins_does_not_hang_the_child(stuck: dict[str, str]) -> None:
    assert stuck["in_child"] == "first"


def test_thread_that_waits_too_long_says_where_the_other_one_is(stuck: dict[str, str]) -> None:
    assert stuck["error"] == (
        "another thread has been loading plugins for 0.2 s; it is at: probe of first. Fix: `kvdock doctor` shows the plugin "
        "that hangs; KVDOCK_BACKENDS_DENY=<name> leaves it out"
    )
    assert stuck["later"] == "first"


def test_threads_that_ask_at_once_load_each_plugin_once(first: Environment) -> None:
    code = """
import collections, json, threading
from kvdock.plugins.registry import Registry
steps = collections.Counter()
registry = Registry({"KVDOCK_BACKENDS": "first"}, watch=lambda step, subject: steps.update([step]))
barrier, seen = threading.Barrier(8), []
def ask():
    barrier.wait()
    seen.append(registry.records())
threads = [threading.Thread(target=ask) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps([dict(steps), len(seen), all(records is seen[0] for records in seen)]))
"""
    assert first.json(code) == [{"import": 1, "hooks": 1, "probe": 1, "kernels": 1}, 8, True]


@pytest.mark.slow
def test_plugin_half_imported_is_an_error_that_names_it_and_heals(environments: Environments) -> None:
    # The user's program imports the plugin's package, whose body asks for backends: its entry module is not usable yet.
    code = """
import json, os
import kvdock, kvdock.runtime
os.environ["EAGER"] = "1"
try:
    import kvdock_eager
except kvdock.errors.DiscoveryReentryError as error:
    text = str(error)
del os.environ["EAGER"]
print(json.dumps([text, kvdock.runtime.default().registry.backend("eager").name]))
"""
    text, healed = environments.with_projects("kvdock-eager").json(code)
    assert text == (
        "backends were asked for while 'kvdock_eager', which belongs to plugin 'eager', is being imported. "
        "Fix: do not call ops, create caches or ask for backends when a module is imported; do it in a function"
    )
    assert healed == "eager"


@pytest.mark.slow
def test_package_that_asks_for_backends_while_it_is_loaded_as_a_plugin_is_load_failed(environments: Environments) -> None:
    # Loading `kvdock_eager.entry` runs `kvdock_eager/__init__`.
    code = """
import json, kvdock.runtime
record = next(item for item in kvdock.runtime.default().registry.records() if item.name == "eager")
print(json.dumps([record.state.name, record.reason]))
"""
    state, reason = environments.with_projects("kvdock-eager").json(code, environ={"EAGER": "1"})
    assert state == "LOAD_FAILED"
    assert reason.startswith(
        "importing kvdock_eager.entry raised DiscoveryReentryError: backends were asked for while they are being loaded"
    )


@pytest.mark.slow
def test_asking_while_kvdock_is_being_imported(first: Environment) -> None:
    """Its names are imported one by one when they are asked for: a plugin that is loaded meanwhile finds all that it needs."""
    code = """
import json, sys

class Hook:
    asked = None
    def find_spec(self, name, path=None, target=None):
        if name == "kvdock.runtime" and Hook.asked is None:
            Hook.asked = "asking"
            from kvdock.plugins.registry import Registry
            Hook.asked = [record.state.name for record in Registry({"KVDOCK_BACKENDS": "first"}).records() if record.name == "first"]
        return None

sys.meta_path.insert(0, Hook())
import kvdock
kvdock.Runtime
print(json.dumps([Hook.asked, kvdock.runtime.default().registry.backend("first").name]))
"""
    assert first.json(code) == [["READY"], "first"]


@pytest.mark.slow
def test_distribution_under_a_program_that_makes_warnings_errors_is_usable_afterwards(environments: Environments) -> None:
    code = """
import json, warnings
warnings.simplefilter("error")
import kvdock
from kvdock.plugins.registry import Registry
registry = Registry({"KVDOCK_BACKENDS": "healthy,sys_exit"})
try:
    registry.records()
except kvdock.KVDockWarning as warning:
    text = str(warning)
print(json.dumps([text.split(":")[0], registry.backend("healthy").name]))
"""
    answer = environments.with_projects("kvdock-faults").json(code)
    assert answer == ["plugin 'sys_exit' (kvdock-faults 1.0) is LOAD_FAILED", "healthy"]
