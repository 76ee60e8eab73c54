"""What is public: listed, sorted, documented, annotated, and as design.md names it."""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any

import attrs
import pytest

import kvdock
from support_sources import BACKENDS, CORE, Function, Module, modules_below

PACKAGES = [CORE, *(folder for folder in sorted(BACKENDS.iterdir()) if folder.is_dir())]
MODULES = [module for package in PACKAGES for module in modules_below(package)]
IDS = [module.where for module in MODULES]

UNLISTED: dict[tuple[str, str], str] = {
    ("kvdock.ops.api", "BlockPairs"): "the type of an argument; `kvdock.ops` lists the ops and nothing else",
    ("kvdock.ops.api", "host_int"): "turns an argument into what an op takes; shared with the caches",
    ("kvdock.ops.api", "new_latents"): "makes what an op writes; shared with the caches",
    ("kvdock.ops.api", "output_pair"): "turns an argument into what an op takes; shared with the caches",
    ("kvdock.ops.api", "pairs_tensor"): "turns an argument into what an op takes; shared with the caches",
    ("kvdock.ops.entry", "Plan"): "what a table holds; never leaves its module",
}
"""Names without an underscore that are not in their module's ``__all__``, and why."""


def listed(module: Module) -> list[str] | None:
    """Return what a module's ``__all__`` says."""
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            value: list[str] = ast.literal_eval(node.value)
            return value
    return None


def rank(name: str) -> tuple[int, str]:
    """Return what ``__all__`` is sorted by: constants, then classes, then functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def defined(module: Module) -> set[str]:
    """Return the functions and classes of a module that have no underscore."""
    return {name for name, _ in module.public() if "." not in name}


@pytest.mark.parametrize("module", MODULES, ids=IDS)
def test_all_is_there_and_sorted(module: Module) -> None:
    names = listed(module)
    if names is None:
        assert not defined(module), "a module with public names lists them in __all__"
        return
    assert names == sorted(set(names), key=rank)


@pytest.mark.parametrize("module", MODULES, ids=IDS)
def test_everything_without_an_underscore_is_listed(module: Module) -> None:
    missing = {name for name in defined(module) - set(listed(module) or ()) if (module.name, name) not in UNLISTED}
    assert not missing, f"{module.where}: add to __all__, or begin with an underscore: {sorted(missing)}"


def test_every_exemption_is_still_needed() -> None:
    by_name = {module.name: module for module in MODULES}
    for module, name in UNLISTED:
        source = by_name[module]
        assert name in source.text, f"{module} no longer has {name}"
        assert name not in (listed(source) or ()), f"{module}.{name} is listed"


@pytest.mark.parametrize(
    "module", [m for m in MODULES if listed(m) and "integrations" not in m.name and "cli" not in m.name], ids=lambda m: m.where
)
def test_what_is_listed_exists(module: Module) -> None:
    loaded = importlib.import_module(module.name)
    for name in listed(module) or ():
        assert hasattr(loaded, name), f"{module.name}.{name}"
        assert not name.startswith("_")


@pytest.mark.parametrize("module", MODULES, ids=IDS)
def test_everything_public_is_documented(module: Module) -> None:
    assert ast.get_docstring(module.tree), f"{module.where} says nothing"
    bare = [name for name, node in module.public() if not ast.get_docstring(node) and not is_overload(node)]
    assert not bare, f"{module.where}: {bare}"


def is_overload(node: ast.AST) -> bool:
    """Whether a function only declares a signature."""
    return isinstance(node, Function) and any(ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list)


@pytest.mark.parametrize("module", MODULES, ids=IDS)
def test_everything_is_annotated(module: Module) -> None:
    bare = []
    for node in module.functions() if not module.is_written else ():
        if any(ast.unparse(decorator) in ("triton.jit", "gluon.jit") for decorator in node.decorator_list):
            continue  # a kernel's parameters have no Python type, and an annotation would tell Triton to specialise on it
        spec = node.args
        arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
        if node.returns is None or not all(argument.annotation or argument.arg in ("self", "cls") for argument in arguments):
            bare.append(f"{module.where}:{node.lineno} {node.name}")
    assert not bare


BARE_ERRORS: dict[tuple[str, str], str] = {
    ("core/kvdock/plugins/precedence.py", "why_unavailable"): "the text comes with a fix of its own, different for each state",
    ("core/kvdock/plugins/registry.py", "why_unavailable"): "the same text",
    ("core/kvdock/plugins/refusals.py", "record.verdict"): "the record has expected, got and fix, and its traceback follows",
}
"""Errors that are made without ``got=`` and without ``fix=``, by a part of their source, and why."""


@pytest.mark.parametrize("module", MODULES, ids=IDS)
def test_every_error_names_the_value_or_the_fix(module: Module) -> None:
    from kvdock import errors

    names = set(errors.__all__) - {"KVDockWarning"}
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func).split(".")[-1] not in names:
            continue
        parts = {keyword.arg for keyword in node.keywords}
        source = ast.unparse(node)
        excused = any(where == module.where and part in source for where, part in BARE_ERRORS)
        assert parts & {"got", "fix"} or excused, f"{module.where}:{node.lineno}: {source}"


ERRORS_ELSEWHERE = {
    ("core/kvdock_conformance/checking/failure.py", "NonconformanceError"): "a verdict on a case; stands in repro.py without the kit",
    ("core/kvdock_conformance/child.py", "ChildEndedError"): "becomes a verdict, or the reason for one that is missing",
    ("core/kvdock/plugins/contract.py", "BrokenContractError"): "becomes the reason of a record; a user meets it as PluginError",
}
"""Error classes that are not in errors.py, whose docstring draws the tree of all, and why."""


def test_errors_live_in_one_place() -> None:
    classes = {
        (module.where, node.name)
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith(("Error", "Exception", "Warning")) for base in node.bases)
    }
    elsewhere = {(where, name) for where, name in classes if where != "core/kvdock/errors.py" and not name.startswith("_")}
    assert elsewhere == set(ERRORS_ELSEWHERE)
    assert len(classes) > 14


SIGNATURES = {
    "paged_caching_": "(k_cache, v_cache, k, v, slot_mapping, *, k_scale=None, v_scale=None)",
    "static_update_": "(k_cache, v_cache, k, v, cache_lengths)",
    "gather_paged": "(k_cache, v_cache, slot_mapping, *, k_scale=None, v_scale=None, out=None)",
    "copy_blocks_": "(k_cache, v_cache, block_pairs)",
    "swap_blocks_": "(src_cache, dst_cache, block_pairs)",
    "paged_attention": (
        "(q, k_cache, v_cache, block_table, seq_lens, *, cu_query_lens=None, max_query_len=None, scale=None, causal=True, window=None, "
        "softcap=None, sinks=None, starts=None, k_scale=None, v_scale=None, return_lse=False, out=None)"
    ),
    "mla_caching_": "(kv_cache, kv_c, k_pe, slot_mapping, *, scale=None)",
    "mla_gather": "(kv_cache, slot_mapping, rank, *, scale=None, out=None)",
}


def bare_signature(call: Any) -> str:
    """Return a signature without annotations."""
    signature = inspect.signature(call)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


@pytest.mark.parametrize("op", SIGNATURES)
def test_the_ops_are_called_as_settled(op: str) -> None:
    assert bare_signature(getattr(kvdock.ops, op)) == SIGNATURES[op]


FIELDS: dict[str, dict[str, object]] = {
    "LayerSpec": {"num_k_heads": ..., "num_v_heads": ..., "k_dim": ..., "v_dim": ..., "window": None, "sinks": 0},
    "MLALayerSpec": {"kv_lora_rank": ..., "rope_dim": ...},
    "KVSpec": {"layers": ..., "max_positions": ..., "dtype": ...},
    "StaticKVCacheConfig": {"max_batch_size": 1, "max_cache_len": None},
    "PagedKVCacheConfig": {
        "max_kv_memory_bytes": None,
        "block_size": 16,
        "num_blocks": None,
        "cache_dtype": None,
        "layout": None,
        "head_layout": kvdock.HeadLayout.NHD,
        "alignment": 1,
        "keep_all": False,
        "pinned_for": None,
    },
    "RankInfo": {"device": ..., "tp_size": 1, "tp_rank": 0},
}


@pytest.mark.parametrize("name", FIELDS)
def test_the_values_have_the_settled_fields_and_defaults(name: str) -> None:
    fields = {field.name: ... if field.default is attrs.NOTHING else field.default for field in attrs.fields(getattr(kvdock, name))}
    assert fields == FIELDS[name]
    assert list(fields) == list(FIELDS[name]), "in this order"


PLUGINS = frozenset({"Backend", "Capabilities", "Descriptor", "Kernel", "Probe"})
"""Classes that a plugin knows and an engine does not: they are in `kvdock.plugin`."""

MEMBERS: dict[str, str] = {
    "Cache": "num_layers k_cache v_cache nbytes device dtype reset",
    "CacheConfig": "unique_copy",
    "PagedKVCache": "num_layers k_cache v_cache nbytes device dtype reset update copy_blocks",
    "StaticKVCache": "num_layers k_cache v_cache nbytes device dtype reset update",
    "ShardedKVCache": "create duplicate drop",
    "KVSpec": "uniform from_hf_config",
    "Backend": "probe claims devices device_guard capabilities kernels skipped_writes is_capturing",
    "Kernel": "supports prepare",
    "Descriptor": "__call__ workspace_bytes destroy",
    "Probe": "ready absent unusable",
    "OpDispatcher": "op explain",
}


def home_of(name: str) -> Any:
    """Return the module that lists a name."""
    return kvdock.plugin if name in PLUGINS else kvdock


@pytest.mark.parametrize("name", MEMBERS)
def test_the_classes_have_the_settled_members(name: str) -> None:
    home = home_of(name)
    assert name in home.__all__
    for member in MEMBERS[name].split():
        assert hasattr(getattr(home, name), member), member


CALLS = {
    "create_cache": "(spec, config, rank, *, ops=None)",
    "use_backend": "(name)",
    "debug": "(enabled=True)",
    "KVSpec.uniform": "(*, num_layers, num_kv_heads, head_dim, max_positions, dtype)",
    "KVSpec.from_hf_config": "(config, dtype=None)",
    "ShardedKVCache.create": "(spec, max_len, devices, *, ops=None)",
    "ShardedKVCache.duplicate": "(self, seq_len)",
    "ShardedKVCache.drop": "(self)",
    "PagedKVCache.update": "(self, layer, k, v, slot_mapping)",
    "PagedKVCache.copy_blocks": "(self, block_pairs)",
    "StaticKVCache.update": "(self, layer, k, v, cache_lengths)",
    "Backend.probe": "(self)",
    "Backend.claims": "(self, device)",
    "Backend.devices": "(self)",
    "Backend.device_guard": "(self, device)",
    "Backend.capabilities": "(self)",
    "Backend.kernels": "(self)",
    "Backend.skipped_writes": "(self, device)",
    "Backend.is_capturing": "(self, device)",
    "Kernel.supports": "(self, request)",
    "Kernel.prepare": "(self, request)",
    "Descriptor.destroy": "(self)",
}


@pytest.mark.parametrize("path", CALLS)
def test_the_calls_are_as_settled(path: str) -> None:
    found = home_of(path.partition(".")[0])
    for name in path.split("."):
        found = getattr(found, name)
    assert bare_signature(found) == CALLS[path]


def test_the_names_at_the_top() -> None:
    named = (
        set(FIELDS) | (set(MEMBERS) - PLUGINS) | {"create_cache", "use_backend", "debug", "ops", "plugin", "KVCacheLayout", "HeadLayout"}
    )
    assert named <= set(kvdock.__all__)
    assert PLUGINS | {"hookimpl", "KVDOCK_API"} <= set(kvdock.plugin.__all__)
    assert len(kvdock.__all__) <= 45, "what an engine needs, and no more"
    assert kvdock.plugin.KVDOCK_API == (1, 0)
    from kvdock.integrations.transformers import PagedCacheForTransformers

    assert bare_signature(PagedCacheForTransformers.for_model).startswith("(model, ")
