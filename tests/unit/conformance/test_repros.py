"""Scripts of failures, for a sample of every area: they run without the kit, fail with the fault, and pass without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvdock_conformance import reports
from kvdock_conformance.requirement import Requirements
from kvdock_conformance.requirements import load
from kvdock_conformance.run import ConformanceRun, run
from kvdock_conformance.session import ConformancePlan
from support_conformance import install

PLUGIN = """
import atexit
import itertools
import os
import sys
from types import SimpleNamespace

import kvdock
import torch
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock.prefix import RadixPrefixCache

KVDOCK_API = (1, 0)
FAULTS = os.environ.get("FAULTS", "").split(",")
KEPT = []


class ConformancePlan(kvdock.plugin.Descriptor):
    def __init__(self, op, inner):
        self.op, self.inner, self.first = op, inner, None

    def __call__(self, *args):
        if "stale" in FAULTS and self.op == "static_update_":
            self.first = args = self.first or args
        if "late" in FAULTS and self.op == "paged_caching_":
            args[0].view(torch.uint8).view(-1)[0] ^= 1
        self.inner(*args)
        if "late" in FAULTS and self.op == "paged_caching_":
            args[0].view(torch.uint8).view(-1)[0] ^= 1
        if "byte" in FAULTS and self.op == "gather_paged" and args[5].numel():
            args[5].view(torch.uint8).reshape(-1)[0] ^= 1
        if "doubled" in FAULTS and self.op == "paged_attention":
            args[15].mul_(2)
        if "keeps" in FAULTS:
            KEPT.append(args[0][:1])
        if "dense" in FAULTS and self.op == "paged_caching_" and args[0].dtype == torch.float32:
            args[0].zero_()
        if {"settings", "dtype"} & set(FAULTS) and self.op == "copy_blocks_":
            torch.set_default_dtype(torch.float16)

    def destroy(self):
        self.inner.destroy()


class Kernel(kvdock.plugin.Kernel):
    def __init__(self, op):
        self.op = op

    def supports(self, request):
        return PORTABLE_KERNELS[self.op].supports(request)

    def prepare(self, request):
        return ConformancePlan(self.op, PORTABLE_KERNELS[self.op].prepare(request))


class Backend(kvdock.plugin.Backend):
    name = "wrapping"
    device_type = "acme"
    count = itertools.count()

    def probe(self):
        return kvdock.plugin.Probe.ready(str(next(self.count)) if "probe" in FAULTS else "")

    def claims(self, device):
        return False

    def devices(self):
        return [torch.device("cpu")]

    def is_capturing(self, device):
        return "capturing" in FAULTS

    def kernels(self):
        return {op: Kernel(op) for op in PORTABLE_KERNELS}


class Cache(RadixPrefixCache):
    def evict(self, num_blocks):
        gone = super().evict(num_blocks)
        if "salted" in FAULTS:
            gone = gone[sorted(range(len(gone)), key=lambda at: hash(str(gone[at])))]
        return gone[1:] if "evict" in FAULTS else gone


if "end" in FAULTS:
    atexit.register(os._exit, 3)


@kvdock.plugin.hookimpl
def kvdock_backends():
    return [Backend()]


@kvdock.plugin.hookimpl
def kvdock_prefix_caches():
    return {"wrapping": Cache}


def register():
    kvdock.runtime.default().registry.register(sys.modules[__name__], "wrapping")
"""
"""A plugin that has the faults that the environment names."""

BLOCKED = "import sys, runpy; sys.modules['kvdock_conformance'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
"""Runs a script where the kit cannot be imported."""

SAMPLE = {
    "byte": "KVD-GATHER-001",
    "late": "KVD-ERROR-012",
    "stale": "KVD-DESC-011",
    "capturing": "KVD-DEVICE-006",
    "settings": "KVD-HYGIENE-013",
    "dtype": "KVD-COPY-001",
    "probe": "KVD-HYGIENE-006",
    "end": "KVD-HYGIENE-014",
    "evict": "KVD-PREFIX-006",
    "salted": "KVD-PREFIX-015",
    "keeps": "KVD-RESOURCE-001",
    "dense": "KVD-FUZZ-001",
    "doubled": "KVD-ATTN-001",
}


def environ(folder: Path, *, with_metadata: bool, faults: str) -> dict[str, str]:
    """Return an environment in which the plugin is installed, or only on the path."""
    found = install(folder, "wrapping", PLUGIN)
    if not with_metadata:
        for path in (folder / "wrapping-1.0.dist-info").iterdir():
            path.unlink()
    return {**found, "FAULTS": faults, "PYTHONDONTWRITEBYTECODE": "1"}


def certify(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], names: list[str], setup: str | None = None) -> ConformanceRun:
    """Run some requirements."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    every = Requirements(load()[name] for name in names)
    return run(ConformancePlan("wrapping", every, setup=setup, kind=next(iter(every)).kind))


def repro(report: Path, name: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the script of a failure, from its own folder."""
    path = report / "failures" / name / "repro.py"
    command = [sys.executable, "-P", "-c", BLOCKED, str(path)]
    return subprocess.run(command, env=env, cwd=path.parent, capture_output=True, text=True, check=False, timeout=200)


@pytest.mark.slow  # three processes each; in make test, test_reports runs such a script
@pytest.mark.parametrize("setup", [None, "kvdock_wrapping:register"])
@pytest.mark.parametrize("fault", SAMPLE)
def test_a_script_of_each_area_fails_with_the_fault_and_passes_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, setup: str | None
) -> None:
    name = SAMPLE[fault]
    env = environ(tmp_path / "site", with_metadata=setup is None, faults=fault)
    found = certify(monkeypatch, env, [name], setup)
    (outcome,) = found.outcomes
    assert outcome.failed, f"{name} does not notice {fault}: {outcome.reason}"
    reports.write(found, tmp_path / "report")
    told = outcome.failed[0].failure
    assert told is not None
    broken = repro(tmp_path / "report", name, env)
    assert broken.returncode != 0, broken.stdout
    assert "NonconformanceError" in broken.stderr, broken.stderr
    assert told["what"] in broken.stderr, "the same place"
    mended = repro(tmp_path / "report", name, {**env, "FAULTS": ""})
    assert mended.returncode == 0, mended.stderr
    assert mended.stdout.startswith(f"passes now: {name}, ")


def test_the_sample_has_every_area() -> None:
    areas = {load()[name].area for name in SAMPLE.values()} | {
        *("mla_caching_", "mla_gather", "paged_caching_", "static_update_", "swap_blocks_", "reads", "threads")
    }
    assert areas == set(load().areas), (
        "the ops are all told alike, test_reports runs one; what reads beside a tensor crashes; races show now and then"
    )


def test_a_script_for_another_device_asks_for_it() -> None:
    from kvdock_conformance.reports.repro import script
    from kvdock_conformance.verdict import CaseOutcome, Verdict

    case = CaseOutcome("x", Verdict.FAILED, {}, {})
    item, prefix = load()["KVD-HYGIENE-013"], load()["KVD-PREFIX-001"]
    assert "    target = Target('acme', None, 'acme:1')\n" in script(item, case, name="acme", device="acme:1")
    assert "    target = Target('acme', 'a.b:c')\n" in script(item, case, name="acme", setup="a.b:c")
    assert "    target = PrefixTarget('acme', 'a.b:c')\n" in script(prefix, case, name="acme", setup="a.b:c")


def test_a_script_can_hold_whatever_came(tmp_path: Path) -> None:
    from kvdock_conformance.reports.repro import script
    from kvdock_conformance.verdict import CaseOutcome, Verdict

    odd = {"what": 'a \x00 \x0c """ \\', "expected": "\u2028 \ufffe", "got": '\x1b[31m "'}
    text = script(load()["KVD-WRITE-001"], CaseOutcome('"""\x00', Verdict.FAILED, {"name": "\x00"}, odd), name="acme")
    path = tmp_path / "repro.py"
    path.write_text(text, encoding="utf-8")
    compile(path.read_bytes(), str(path), "exec")
    assert os.path.getsize(path) > 1000
