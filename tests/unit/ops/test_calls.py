"""The code of calls is committed, and is what its schema says: `make calls` writes it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path

import attrs
import pytest
import torch

import kvdock
from kvdock.ops import calls
from kvdock.ops.calls.__main__ import formatted
from kvdock.ops.catalog import CATALOG
from kvdock.ops.dispatcher import OpDispatcher
from opskit import runtime_of
from support_plugins import InProcessBackend

FOLDER = Path(calls.__file__).parent
WRITERS = {"__init__", "__main__", "variant", "writer"}
each_op = pytest.mark.parametrize("op", CATALOG)


@each_op
def test_the_committed_code_is_what_its_schema_says(op: str) -> None:
    assert (FOLDER / f"{op}.py").read_text() == formatted(CATALOG[op]), "run `make calls`"


def test_there_is_a_module_for_each_op_and_no_other() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*CATALOG, *WRITERS}


@each_op
def test_a_newcomer_finds_the_code_of_a_call_in_one_step(op: str) -> None:
    entry = runtime_of(InProcessBackend("plain", claims=("cpu",), devices=("cpu",), kernels={})).dispatcher.op(op)
    assert inspect.getsourcefile(entry.call) == str(FOLDER / f"{op}.py")
    tree = ast.parse(textwrap.dedent(inspect.getsource(entry.call))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    assert (tree.name, [arg.arg for arg in tree.args.args][: len(CATALOG[op].arg_names)]) == ("call", [*CATALOG[op].arg_names])
    bound = entry.bind(*[torch.zeros(2, 2, 1, 8)] * 2)
    assert inspect.getsourcefile(bound) == str(FOLDER / f"{op}.py")


def test_a_schema_that_differs_from_the_catalog_gets_code_of_its_own() -> None:
    """Under the same name: a committed module is for kvdock's own schema only."""
    schema = attrs.evolve(CATALOG["copy_blocks_"], args=CATALOG["copy_blocks_"].args[:2])
    runtime = runtime_of(InProcessBackend("plain", claims=("cpu",), devices=("cpu",), kernels={}))
    call = OpDispatcher(runtime.registry, {"copy_blocks_": schema}).op("copy_blocks_").call
    assert call.__code__.co_filename == "<kvdock call of copy_blocks_>"
    assert kvdock.ops.copy_blocks_.__module__ == "kvdock.ops.api"
