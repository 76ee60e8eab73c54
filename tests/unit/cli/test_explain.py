from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from kvdock.cli.app import build
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock.plugin import Priority
from kvdock.runtime import Runtime
from support_plugins import CallKernel, InProcessBackend, plugin


def explain(*arguments: str, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(build(["explain"]), ["explain", *arguments, "--json"])
    assert result.exit_code == code, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    assert (answer["schema"], answer["command"]) == (1, "explain")
    return answer


def test_own_kernel(acme_runtime: Runtime) -> None:
    answer = explain("copy_blocks_")
    assert (answer["op"], answer["device"], answer["backend"], answer["served_by"]) == ("copy_blocks_", "cpu", "acme", "acme")
    assert answer["kernel"].endswith("support_plugins.CallKernel")
    assert answer["backend_reason"] == "only ready backend that claims cpu"
    candidates = {item["name"]: (item["state"], item["claims"], item["reason"]) for item in answer["candidates"]}
    assert candidates["acme"] == ("ready", True, "claims cpu with priority 10")
    assert candidates["absent"] == ("absent", False, "ABSENT: no card")
    assert candidates["broken"] == ("unusable", False, "UNUSABLE: driver 3 is too old")


def test_portable_kernel_with_the_reason(acme_runtime: Runtime) -> None:
    answer = explain("gather_paged", "--heads", "2", "--head-dim", "64", "--block-size", "8", "--dtype", "torch.float32")
    assert answer["served_by"] == "portable"
    assert answer["rejected"] == [["acme", ["it has no kernel for this op"]]]


def test_another_backend_that_serves_what_the_chosen_one_does_not(acme_runtime: Runtime) -> None:
    other = InProcessBackend("other", claims=("cpu",), devices=("cpu",), kernels=PORTABLE_KERNELS, priority=Priority.FALLBACK)
    last = InProcessBackend("last", claims=("cpu",), devices=("cpu",), priority=Priority.FALLBACK)
    acme_runtime.registry.register(plugin(other, last), "two")
    answer = explain("gather_paged", "--run", "1")
    assert (answer["backend"], answer["served_by"], answer["run"]["calls"]) == ("acme", "other", 1)
    assert answer["rejected"] == [["acme", ["it has no kernel for this op"]], ["last", ["it has no kernel for this op"]]]
    text = CliRunner().invoke(build(["explain"]), ["explain", "gather_paged"]).stdout
    assert text.startswith("gather_paged on cpu is served by other: kvdock.ops.portable.")
    told = [line.split(":")[0] for line in text.splitlines()]
    assert told[2:4] == ["not acme", "not last"]
    assert "other backend other" in told
    assert not {"other backend acme", "other backend last"} & {*told}, "they were told before"
    assert explain("gather_paged", "--backend", "acme")["served_by"] == "portable"


def test_overridden_kernel_shows(acme_runtime: Runtime) -> None:
    acme_runtime.registry.register_kernel("acme", "copy_blocks_", CallKernel(lambda *args: None), override=True)
    assert "its own kernel for 'copy_blocks_' was overridden by a registered one" in explain("copy_blocks_")["backend_reason"]


def test_named_backend(acme_runtime: Runtime) -> None:
    assert explain("copy_blocks_", "--backend", "acme")["backend_reason"] == "asked for by name"
    error = explain("copy_blocks_", "--backend", "absent", code=2)["error"]
    assert error == {
        "type": "BackendUnavailableError",
        "text": "backend 'absent', asked for by name: ABSENT: no card (plugin 'others' (registered in this process))",
    }


def test_unknown_op_lists_the_ops(acme_runtime: Runtime) -> None:
    error = explain("frobnicate", code=2)["error"]
    assert error["type"] == "ArgumentValueError"
    ops = "copy_blocks_, gather_paged, mla_caching_, mla_gather, paged_attention, paged_caching_, static_update_, swap_blocks_"
    assert f"expected one of {ops}, got 'frobnicate'" in error["text"]


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--dtype", "bfloat17", "--dtype: expected torch's name of a dtype, such as bfloat16, got 'bfloat17'"),
        ("--dtype", "int32", "--dtype: expected a dtype that copy_blocks_ takes: torch.float16, "),
        ("--dtype", "nn", "--dtype: expected torch's name of a dtype, such as bfloat16, got 'nn'"),
        (
            "--device",
            "acme:0",
            "--device and --dtype: expected a device on which torch can allocate that dtype, got 'acme:0' and ",
        ),
    ],
)
def test_options_that_make_no_sense(acme_runtime: Runtime, option: str, value: str, text: str) -> None:
    error = explain("copy_blocks_", option, value, code=2)["error"]
    assert error["type"] == "ArgumentValueError"
    assert error["text"].startswith(text)


def test_lines_for_people(acme_runtime: Runtime) -> None:
    result = CliRunner().invoke(build(["explain"]), ["explain", "gather_paged"])
    lines = result.stdout.splitlines()
    assert lines[0].startswith("gather_paged on cpu is served by portable: kvdock.ops.portable.")
    assert lines[1:3] == ["backend: acme (only ready backend that claims cpu)", "not acme: it has no kernel for this op"]
    assert "other backend broken: UNUSABLE: driver 3 is too old" in lines


def test_error_for_people_is_one_line_without_traceback(acme_runtime: Runtime) -> None:
    result = CliRunner().invoke(build(["explain"]), ["explain", "frobnicate"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("kvdock explain: op: expected one of ")
    assert "Traceback" not in result.stderr
