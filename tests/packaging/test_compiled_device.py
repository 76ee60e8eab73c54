"""A scaffolded backend, unedited, on hardware that torch knows as PrivateUse1: the only way to see what needs two cards and a host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import support_twocards
from support_projects import Environment, run

pytestmark = [
    pytest.mark.slow,  # compiles for a minute or two, and certifies for another
    pytest.mark.skipif(bool(support_twocards.why_not()), reason=support_twocards.why_not() or "it can be built"),
]


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the device, and with a backend for it as `kvdock new-backend` writes it."""
    folder = tmp_path_factory.mktemp("cards")
    environment = Environment.create(folder / "env")
    support_twocards.install(environment, folder)
    project = folder / "kvdock-newcards"
    done = environment.kvdock("new-backend", "newcards", "--device-type", "twocards", "--dir", str(project))
    assert done.returncode == 0, done.stderr
    environment.install(project)
    return environment


def test_the_device_is_one(cards: Environment) -> None:
    code = """
import json, torch
x = torch.arange(6, dtype=torch.float32).reshape(2, 3).to("twocards:1")
with torch.twocards.device(1):
    inside = torch.twocards.current_device()
print(json.dumps([str(x.device), x.t().contiguous().tolist(), (x * 2)[0, 1].item(), inside, torch.twocards.current_device()]))
"""
    assert cards.json(code) == ["twocards:1", [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], 2.0, 1, 0]


def test_what_new_backend_writes_conforms_on_two_cards_and_a_host(cards: Environment, tmp_path: Path) -> None:
    command = [cards.python, "-P", "-m", "kvdock", "conformance", "--backend", "newcards", "--report", str(tmp_path / "report")]
    done = run(command, environ={"KVDOCK_BACKENDS": "newcards,cpu"}, timeout=900)
    report = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    wrong = {item["id"]: item["cases"] for item in report["requirements"] if item["verdict"] not in ("passed", "unsupported")}
    assert (done.returncode, wrong) == (0, {}), done.stdout[-6000:]
    assert report["about"]["device"] == "twocards:0"
    verdicts = {item["id"]: item["verdict"] for item in report["requirements"]}
    assert verdicts["KVD-DEVICE-001"] == "passed", "it needs two devices, and has them"
