"""Two ready backends that claim one device: an error that names both and the variable that decides, whatever loaded first."""

from __future__ import annotations

import pytest

from support_distributions import Environments, reports
from support_projects import Environment

pytestmark = pytest.mark.slow  # each starts processes that import torch

TIE = (
    "copy_blocks_: several ready backends claim meta, and none is preferred: first (priority 10), second (priority 10). "
    "Fix: set KVDOCK_BACKEND_ACME=first (or another of them), or use kvdock.use_backend(name)"
)


@pytest.fixture(scope="module")
def pair(environments: Environments) -> Environment:
    """Two distributions whose backends claim the device that torch calls meta."""
    return environments.with_projects("kvdock-second", "kvdock-first")


VARIABLES = [{variable: name} for variable in ("KVDOCK_BACKEND_ACME", "KVDOCK_BACKEND_META") for name in ("first", "second", "third")]


@pytest.fixture(scope="module")
def answers(pair: Environment, environments: Environments) -> list[dict[str, str]]:
    """Who is chosen without and with each of the variables."""
    found = environments.once("variables", lambda: reports(pair, [{}, *VARIABLES], ("meta", None)))
    return [item["answers"][0] for item in found]


def test_tie_names_both_and_the_variable(answers: list[dict[str, str]]) -> None:
    assert answers[0] == {"error": "AmbiguousBackendError", "text": TIE}


@pytest.mark.parametrize("index", range(len(VARIABLES)))
def test_variable_decides_and_what_it_names_is_never_replaced(answers: list[dict[str, str]], index: int) -> None:
    ((variable, name),) = VARIABLES[index].items()
    if name != "third":
        assert answers[index + 1] == {"backend": name, "text": f"configured for meta by {variable}"}
    else:
        assert answers[index + 1]["error"] == "BackendUnavailableError"
        text = f"backend 'third', configured for meta by {variable}: there is none of this name. Ready: "
        assert answers[index + 1]["text"].startswith(text)


def test_load_order_never_decides(pair: Environment) -> None:
    code = """
import torch, json, kvdock
import kvdock_first, kvdock_second
from kvdock.plugins.registry import Registry
def ask(*modules):
    registry = Registry({"KVDOCK_DISABLE_AUTOLOAD": "1"})
    for module in modules:
        registry.register(module, module.__name__)
    try:
        return registry.choose("copy_blocks_", torch.device("meta")).backend.name
    except kvdock.AmbiguousBackendError as error:
        return type(error).__name__
print(json.dumps([ask(kvdock_first, kvdock_second), ask(kvdock_second, kvdock_first)]))
"""
    assert pair.json(code) == ["AmbiguousBackendError"] * 2
