"""Who may import whom. The rule is design.md's: {errors, layout, rank, spec, interface} <- descriptors <- ops <- plugins <- runtime."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from support_sources import BACKENDS, CORE, Module, circle, kvdock_modules, modules_below, resolve

LEAVES = {"errors", "layout", "rank", "spec", "interface"}
ENGINE_SIDE = {"cache", "prefix", "scheduler", "tiers"}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "layout": set(),
    "checks": {"errors"},
    "layers": {"checks", "errors"},
    "hf_states": {"layers"},
    "hf_config": {"errors", "hf_states", "layers"},
    "spec": {"checks", "errors", "hf_config", "layers"},
    "rank": {"errors", "spec"},
    "interface": {"errors"},
    "bits": {"interface", "spec"},
    "guarded": {"errors", "interface"},
    "descriptors": LEAVES,
    "process": set(),
    "ops": LEAVES | {"bits", "descriptors", "guarded", "process"},
    "plugins": LEAVES | {"descriptors", "guarded", "ops"},
    "plugin": LEAVES | {"bits", "ops", "plugins", "prefix"},
    "runtime": LEAVES | {"descriptors", "guarded", "ops", "plugins"},
    "captured": LEAVES | {"runtime", "scheduler"},
    "cache": LEAVES | {"guarded", "layers", "ops"},
    "distributed": LEAVES | {"checks", "ops"},
    "prefix": {"errors", "spec", "process"},
    "scheduler": {"errors", "spec", "prefix", "layers"},
    "tiers": {"errors", "spec", "cache", "scheduler"},
    "replay": {"errors", "spec", "prefix", "scheduler"},
    "files": LEAVES | {"bits", "layers"} | ENGINE_SIDE,  # which blocks and which tensors, together: above both
    "transfer": LEAVES | {"cache", "checks", "layers", "prefix", "process", "scheduler"},
    "kvdock": LEAVES | {"descriptors", "layers", "ops", "plugin", "plugins", "runtime"} | ENGINE_SIDE,
    "integrations": LEAVES | {"captured", "checks", "files", "layers", "ops", "plugins", "runtime", "kvdock", "transfer"} | ENGINE_SIDE,
    "__main__": {"cli"},
    "cli": LEAVES | {"descriptors", "guarded", "ops", "plugins", "runtime", "kvdock", "replay", "integrations"} | ENGINE_SIDE,
}
"""For each part of the package, the others it may import. ``kvdock`` is the package's own ``__init__``: the public names."""

UPWARDS = frozenset(
    {
        ("kvdock.process", "kvdock.runtime"),
        ("kvdock.transfer.built_in", "kvdock.integrations.torch_distributed"),
    }
)
"""The imports that go up, and wait until they are asked for: what lies below the runtime may take the process's, and a transport that
is made by name may be an integration."""

MODULES = {module.name: module for module in kvdock_modules()}
KNOWN = frozenset(MODULES)


def part_of(name: str) -> str:
    """Return which part a module belongs to."""
    return name.split(".")[1] if "." in name else name


def inner_imports(module: Module) -> list[tuple[int, str]]:
    """Return line and module of what a module imports from the package."""
    found = [(line, resolve(name, KNOWN)) for line, name in module.imports() if name.split(".")[0] == "kvdock"]
    # `from kvdock import ops` takes a module, not a name of __init__.
    return [(line, name) for line, name in found if name != module.name]


def test_every_part_has_a_rule() -> None:
    parts = {part_of(name) for name in KNOWN}
    assert parts <= set(MAY_IMPORT), f"new parts need a rule: {sorted(parts - set(MAY_IMPORT))}"
    assert {"errors", "ops", "plugins", "runtime", "cache", "scheduler", "integrations", "cli", "kvdock"} <= parts


def test_the_rule_itself_has_no_circle() -> None:
    done: set[str] = set()
    left = dict(MAY_IMPORT)
    while left:
        free = {part for part, may in left.items() if may <= done}
        assert free, f"these import each other: {sorted(left)}"
        done |= free
        left = {part: may for part, may in left.items() if part not in free}


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_module_imports_only_what_is_below_it(name: str) -> None:
    part = part_of(name)
    wrong = [
        f"{MODULES[name].where}:{line} imports {other}, but {part} may import only {sorted(MAY_IMPORT[part])}"
        for line, other in inner_imports(MODULES[name])
        if part_of(other) != part and part_of(other) not in MAY_IMPORT[part] and (name, other) not in UPWARDS
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ["kvdock", "kvdock_conformance"])
def test_no_module_is_in_a_circle(package: str) -> None:
    # Stricter than the parts: within one part modules have an order too.
    assert not circle((module for module in modules_below(CORE) if module.name.split(".")[0] == package), UPWARDS)


@pytest.mark.parametrize(("name", "other"), sorted(UPWARDS))  # in one order, in each worker
def test_an_import_upwards_waits_until_it_is_asked_for(name: str, other: str) -> None:
    tree = MODULES[name].tree
    runs_at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    (for_types,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    (function,) = MODULES[name].functions()
    both = [node for part in (for_types, function) for node in part.body if isinstance(node, ast.ImportFrom)]
    assert [node.module for node in both] == [other, other], "the exemption is still needed, and for nothing else"
    assert not [node for node in runs_at_import if "kvdock" in ast.unparse(node)]


def test_a_circle_is_found_wherever_its_imports_are(tmp_path: Path) -> None:
    texts = {
        "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.b import B\n",
        "b": "def f():\n    from p.c import g\n",
        "c": "from p import A\n",
        "__init__": "from p.a import A\n",
        "d": "import p.c\n",
        "e": "import os\n",
    }
    (tmp_path / "p").mkdir()
    for name, text in texts.items():
        (tmp_path / "p" / f"{name}.py").write_text(text, encoding="utf-8")
    found = circle(modules_below(tmp_path))
    assert found == {"p": ["p.a"], "p.a": ["p.b"], "p.b": ["p.c"], "p.c": ["p"], "p.d": ["p.c"]}, "and who imports one that is in it"
    assert not circle(modules_below(tmp_path), frozenset({("p.b", "p.c")}))


KIT_DOORS = ("kvdock.cli.conformance", "kvdock.cli.new_backend")
"""The modules that import the kit: the commands that run it, and that write a project which does."""


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_core_imports_no_backend_and_no_kit(name: str) -> None:
    shipped = {module.name.split(".")[0] for module in modules_below(BACKENDS / "cpu")} if BACKENDS.is_dir() else set()
    assert BACKENDS.is_dir() == bool(shipped)
    for line, other in MODULES[name].imports():
        top = other.split(".")[0]
        assert top not in shipped, f"{MODULES[name].where}:{line} imports {other}"
        allowed = ("kvdock", "kvdock_conformance") if name in KIT_DOORS else ("kvdock",)
        assert top in allowed or not top.startswith("kvdock"), f"{MODULES[name].where}:{line} imports {other}"


THIRD_PARTY = {
    "attrs": set(MAY_IMPORT),
    "matplotlib": {"replay"},
    "msgpack": {"integrations"},
    "numpy": {"layers", "ops", "scheduler", "prefix", "replay", "integrations", "files", "transfer"},
    "pluggy": {"plugins"},
    "safetensors": {"files"},
    "torch": set(MAY_IMPORT) - {"errors", "layout", "descriptors", "process", "scheduler", "prefix", "replay"},
    "transformers": {"integrations"},
    "typer": {"cli"},
    "rich": {"cli"},
    "zmq": {"integrations"},
}
"""Which parts may use a distribution. Blocks and prefixes are integers: they know no tensor and no device."""

TENSORS_OF_INTEGERS = {("kvdock.scheduler.batch_tables", "torch"), ("kvdock.scheduler.table_views", "torch")}
"""The module that puts integers where kernels read them."""


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_part_uses_only_the_distributions_meant_for_it(name: str) -> None:
    for line, other in MODULES[name].imports():
        top = other.split(".")[0]
        if top in sys.stdlib_module_names or top == "kvdock" or (name in KIT_DOORS and top == "kvdock_conformance"):
            continue
        assert top in THIRD_PARTY, f"{MODULES[name].where}:{line} imports {other}, which is no dependency"
        may = part_of(name) in THIRD_PARTY[top] or (name, top) in TENSORS_OF_INTEGERS
        assert may, f"{MODULES[name].where}:{line}: {part_of(name)} must do without {top}"


def test_transformers_is_imported_by_its_own_integration_only() -> None:
    users = {name for name, module in MODULES.items() for _, other in module.imports() if other.split(".")[0] == "transformers"}
    assert users
    assert all(name.startswith("kvdock.integrations.transformers") for name in users), users


def test_the_slow_reference_is_for_tests_only() -> None:
    kit = [module for module in modules_below(CORE) if module.name.split(".")[0] == "kvdock_conformance"]
    assert kit
    tests = [module for folder in BACKENDS.iterdir() if folder.is_dir() for module in modules_below(folder)]
    for module in tests:
        assert not [name for _, name in module.imports() if name.startswith("kvdock_conformance")], module.where
