"""Every error of what talks to other processes says how to fix it: read off the sources, since no test provokes them all."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator

import pytest

import kvdock
from kvdock.errors import KVDockError, TransferError
from support_sources import Function, Module, kvdock_modules

PACKAGES = ("kvdock.transfer", "kvdock.integrations.torch_", "kvdock.integrations.kv_events", "kvdock.distributed", "kvdock.tiers")
MODULES = [module for module in kvdock_modules() if module.name.startswith(PACKAGES)]


def without_fix(tree: ast.Module, names: dict[str, object]) -> Iterator[int]:
    """Yield the lines where an error is made that may come without a fix. ``names`` are the module's own, so that no alias hides one."""
    for scope in [node for node in ast.walk(tree) if isinstance(node, Function | ast.Module)]:
        inside = list(_own(scope))
        texts = [(target.id, value) for node in inside if isinstance(node, ast.Assign) for target, value in _pairs(node)]
        for call in [node for node in inside if isinstance(node, ast.Call) and _is_error(node.func, names)]:
            given = next((keyword.value for keyword in call.keywords if keyword.arg == "fix"), None)
            if not _is_text(given, {name: [value for key, value in texts if key == name] for name, _ in texts}, names):
                yield call.lineno


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield what is in a scope, but not in functions in it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, Function):
            yield from _own(child)


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.Name, ast.expr]]:
    for target in node.targets:
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] * len(names)
        yield from ((name, value) for name, value in zip(names, values, strict=False) if isinstance(name, ast.Name))


def _is_error(func: ast.expr, names: dict[str, object]) -> bool:
    found = eval(compile(ast.Expression(func), "", "eval"), {}, dict(names)) if _is_dotted(func, names) else None  # noqa: S307 - a dotted name
    return isinstance(found, type) and issubclass(found, KVDockError)


def _is_dotted(node: ast.expr, names: dict[str, object]) -> bool:
    if isinstance(node, ast.Attribute):
        return _is_dotted(node.value, names) and "__" not in node.attr and not isinstance(node.value, ast.Call)
    return isinstance(node, ast.Name) and isinstance(names.get(node.id), type | type(ast))


def _is_text(node: ast.expr | None, texts: dict[str, list[ast.expr]], names: dict[str, object]) -> bool:
    """Whether an expression is a text that is not empty, whichever way it goes."""
    if isinstance(node, ast.IfExp):
        return all(_is_text(each, texts, names) for each in (node.body, node.orelse))
    if isinstance(node, ast.BoolOp):
        return isinstance(node.op, ast.Or) and _is_text(node.values[-1], texts, names)
    if isinstance(node, ast.Name):
        found = texts.get(node.id, [])
        last = found[-1:] if len(found) > 1 and isinstance(found[-1], ast.BoolOp) else found  # it was made whole by `or`
        return all(_is_text(each, texts, names) for each in last) if found else bool(isinstance(names.get(node.id), str) and names[node.id])
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(node.value))


@pytest.mark.parametrize("module", MODULES, ids=[module.name for module in MODULES])
def test_every_error_says_how_to_fix_it(module: Module) -> None:
    assert list(without_fix(module.tree, vars(importlib.import_module(module.name)))) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("raise TransferError('s', got=1)", 1),
        ("raise kvdock.errors.TransferError('s', fix='')", 1),
        ("other = Again('s', fix=None)", 1),
        ("def f():\n    fix = 'a' if x else ''\n    raise TransferError('s', fix=fix)", 1),
        ("def f():\n    fix = 'a'\n    def g(fix):\n        raise TransferError('s', fix=fix)", 1),
        ("def f():\n    got, fix = 1, None\n    raise TransferError('s', got=got, fix=fix)", 1),
        ("raise TransferError('s', fix=TEXT)", 0),
        ("def f():\n    got, fix = 1, f'{x}'\n    raise TransferError('s', got=got, fix=fix)", 0),
        ("def f(fix):\n    fix = fix or 'b'\n    raise TransferError('s', fix=fix)", 0),
        ("raise ValueError('s')", 0),
    ],
)
def test_the_check_sees_what_has_none(text: str, count: int) -> None:
    names = {"kvdock": kvdock, "TransferError": TransferError, "Again": TransferError, "TEXT": "do this", "ValueError": ValueError}
    assert len(list(without_fix(ast.parse(text), names))) == count
