"""Prefix caches that installed projects bring."""

from __future__ import annotations

from pathlib import Path

import pytest

from support_projects import Environment, Project, build

SOURCE = """
import kvdock
from kvdock.prefix import NaivePrefixCache


class Theirs(NaivePrefixCache):
    pass


@kvdock.plugin.hookimpl
def kvdock_prefix_caches():
    return {names}
"""

ASK = """
import json, kvdock
found = []
for name in ("one", "both", "nobody"):
    try:
        found.append(type(kvdock.create_prefix_cache(name, block_size=4)).__module__)
    except kvdock.KVDockError as error:
        found.append(str(error))
try:
    manager = kvdock.CacheManager(4, 4, prefix="one")
    found.append(manager.begin([1]).cached_len)
except kvdock.KVDockError as error:
    found.append(str(error))
print(json.dumps(found))
"""


def project(name: str, *caches: str) -> Project:
    """A distribution that brings prefix caches only."""
    module = f"kvdock_{name}"
    names = "{" + ", ".join(f'"{cache}": Theirs' for cache in caches) + "}"
    files = {f"{module}/__init__.py": "KVDOCK_API = (1, 0)\n" + SOURCE.replace("{names}", names)}
    return Project(f"kvdock-{name}", "1.0", {name: module}, files)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Two projects, with one name in both."""
    root: Path = tmp_path_factory.mktemp("prefix")
    made = Environment.create(root / "env")
    made.install(*build([project("pone", "one", "both"), project("ptwo", "both")], root).values())
    return made


@pytest.mark.slow  # in make test, test_factory has caches of plugins
def test_installed_prefix_caches_are_found_by_name(environment: Environment) -> None:
    one, both, nobody, cached = environment.json(ASK)
    assert one == "kvdock_pone"
    assert "'both' from pone, ptwo" in both
    assert "one of both, naive, one, radix, got 'nobody'" in nobody
    assert cached == 0


@pytest.mark.slow
def test_a_plugin_that_is_denied_leaves_the_name_to_the_other(environment: Environment) -> None:
    assert environment.json(ASK, environ={"KVDOCK_BACKENDS_DENY": "pone"})[1] == "kvdock_ptwo"
