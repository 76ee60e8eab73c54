"""The lengths that this project aims for. Docstrings count as lines."""

from __future__ import annotations

import ast
import statistics

import pytest

from support_sources import BACKENDS, CORE, ROOT, Module, modules_below

FOLDERS = [folder for folder in (CORE, *sorted(BACKENDS.iterdir())) if folder.is_dir()]
SOURCES = [module for folder in FOLDERS for module in modules_below(folder) if not module.is_written]
MODULE_LINES = sorted(module.text.count("\n") for module in SOURCES)
FUNCTIONS = sorted(
    ((node.end_lineno or node.lineno) - node.lineno + 1, f"{module.where}:{node.lineno} {node.name}")
    for module in SOURCES
    for node in module.functions()
)
LENGTHS = [length for length, _ in FUNCTIONS]


MOST_LINES = 5247
"""Of ops and descriptors. Raise it for what is worth it, such as another op."""

SHIPPED_TESTS = ("requirements", "cases", "checking", "faults")
"""Folders of the conformance kit that are tests themselves, of backends, and ship so that others can run them."""


def p90(values: list[int]) -> int:
    """Return the value that nine of ten do not exceed."""
    return values[min(len(values) - 1, int(len(values) * 0.9))]


def test_there_is_something_to_measure() -> None:
    assert len(SOURCES) > 60
    assert len(FUNCTIONS) > 400


def test_modules() -> None:
    longest = sorted(((module.text.count("\n"), module.where) for module in SOURCES), reverse=True)[:5]
    assert p90(MODULE_LINES) <= 250, longest
    assert MODULE_LINES[-1] <= 500, longest


def test_functions() -> None:
    assert statistics.median(LENGTHS) <= 8
    assert p90(LENGTHS) <= 30, FUNCTIONS[-10:]


def test_tests_are_longer_than_what_they_test() -> None:
    """What the kit asks of backends, and the faults that prove it, are on neither side: no test is held to be its own source."""
    tests = sum(module.text.count("\n") for module in modules_below(ROOT / "tests"))
    shipped = sum(module.text.count("\n") for name in SHIPPED_TESTS for module in modules_below(CORE / "kvdock_conformance" / name))
    source = sum(MODULE_LINES) - shipped
    assert shipped > 0
    assert tests >= 1.5 * source, f"{tests} lines of tests for {source} lines of source"


def test_the_middle_of_the_house_is_light() -> None:
    """Ops and descriptors together, without what ``make calls`` writes."""
    folders = (CORE / "kvdock" / "ops", CORE / "kvdock" / "descriptors")
    lines = sum(module.text.count("\n") for folder in folders for module in modules_below(folder) if not module.is_written)
    assert lines <= MOST_LINES


REASON_NEARBY: dict[tuple[str, str], str] = {
    ("core/kvdock/ops/calls/writer.py", "S102"): "the docstring of the function is the reason",
    ("core/kvdock/integrations/transformers/layer.py", "untyped-decorator"): "torch does not annotate torch.compiler.disable",
}
"""Exemptions from lint whose reason does not stand behind them, by a part of the comment."""


def exemptions(module: Module) -> list[tuple[int, str]]:
    """Return line and comment of each exemption from lint or type checks."""
    lines = enumerate(module.text.splitlines(), 1)
    return [(number, line[line.index(mark) :]) for number, line in lines for mark in ("# noqa", "# type: ignore") if mark in line]


@pytest.mark.parametrize("module", SOURCES, ids=[module.where for module in SOURCES])
def test_an_exemption_from_lint_carries_its_reason(module: Module) -> None:
    for number, comment in exemptions(module):
        reasoned = " - " in comment or comment.count("#") > 1
        nearby = any(where == module.where and part in comment for where, part in REASON_NEARBY)
        assert reasoned or nearby, f"{module.where}:{number}: say why: {comment}"


@pytest.mark.parametrize("module", SOURCES, ids=[module.where for module in SOURCES])
def test_no_error_is_swallowed_whole(module: Module) -> None:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            silent = all(isinstance(part, ast.Pass | ast.Continue) for part in node.body)
            assert not (broad and silent), f"{module.where}:{node.lineno}"
