"""The transports in `examples/`, with the real wheels of their engines, in real processes: what one machine without their hardware shows.

The wheels come from the package registry, so this needs a network, as no other test does.
"""

from __future__ import annotations

import ctypes.util
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest

from support_projects import Environment, once, run
from support_sources import ROOT
from support_two_sides import RIGHT, play

WHEELS = {
    "nixl": ("nixl==1.5.1", "nixl-cu12==1.5.1"),
    "mooncake": ("mooncake-transfer-engine-non-cuda==0.3.13.post1",),
}
VERBS = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
"""Debian's packages of the library that Mooncake's wheel needs beside it, and of what that needs."""

UNREACHABLE = re.compile("Retrying|NewConnectionError|ConnectTimeout|Temporary failure|Could not resolve")

pytestmark = pytest.mark.slow


@attrs.frozen
class Engine:
    """An environment with an engine's wheel and its example, and the variables that its processes need."""

    name: str
    environment: Environment
    environ: dict[str, str]

    def play(self, prefills: int, decodes: int, scene: str, **environ: str) -> tuple[list[int], list[str]]:
        """Run the processes of both sides."""
        return play(prefills, decodes, scene, self.name, self.environment.python, self.environ | environ)


def fetched(command: Sequence[str], folder: Path) -> str:
    """Run what fetches something; returns why it could not, where that is the machine's fault and not this repository's."""
    done = run(command, timeout=600, folder=folder)
    said = done.stdout + done.stderr
    if done.returncode == 0:
        return ""
    if UNREACHABLE.search(said) or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"{command[0]}: {said.strip().splitlines()[-1]}"
    raise AssertionError(said)


def with_verbs(folder: Path) -> dict[str, str]:
    """Return the variables by which libibverbs is found: this machine's, or Debian's unpacked below a folder."""
    if ctypes.util.find_library("ibverbs"):
        return {}
    run(["apt-get", "download", *VERBS], folder=folder, timeout=300, check=True)
    for package in folder.glob("*.deb"):
        run(["dpkg", "-x", str(package), str(folder / "root")], check=True)
    paths = sorted({str(path.parent) for path in folder.glob("root/**/*.so.*")})
    return {"LD_LIBRARY_PATH": os.pathsep.join(paths)}


@pytest.fixture(scope="session", params=sorted(WHEELS))
def engine(request: pytest.FixtureRequest, shared: Path) -> Engine:
    """Each engine, from the registry. Without it there is nothing to test."""
    name: str = request.param

    def make(folder: Path) -> dict[str, object]:
        made = Environment.create(folder / "env")
        options = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--wheel-dir", str(folder))
        run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT / "examples" / f"kvdock_{name}")], check=True)
        made.install(*folder.glob("*.whl"))
        install = [sys.executable, "-m", "pip", "--python", made.python, "install", "--no-deps", "--only-binary", ":all:", *WHEELS[name]]
        if reason := fetched(install, folder):
            return {"reason": reason}
        if name != "mooncake":
            return {"root": str(made.root), "environ": {}}
        try:
            return {"root": str(made.root), "environ": with_verbs(folder)}
        except (AssertionError, OSError) as error:
            return {"reason": f"libibverbs.so.1, which Mooncake's wheel needs, is not here and cannot be fetched: {error}"}

    found = once(shared, f"transport-{name}", make)
    if "reason" in found:
        pytest.skip(found["reason"])
    return Engine(name, Environment(Path(found["root"])), found["environ"])


def test_what_every_transport_is_asked(engine: Engine, tmp_path: Path) -> None:
    """Their own tests, without their sources: what is tested is the wheel."""
    folder = ROOT / "examples" / f"kvdock_{engine.name}"
    for name in ("tests", "pyproject.toml"):
        (tmp_path / name).symlink_to(folder / name)
    command = [engine.environment.python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = run(command, environ=engine.environ, folder=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d\d passed in", done.stdout), "none is skipped"


def test_their_types_are_clean(engine: Engine, tmp_path: Path) -> None:
    done = engine.environment.typed(f"mypy --cache-dir {tmp_path}", ROOT / "examples" / f"kvdock_{engine.name}")
    assert "Success" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 2), (2, 1), (2, 4)])
def test_two_sides_generate_what_one_process_does(prefills: int, decodes: int, engine: Engine) -> None:
    """Blocks of 16 tokens, heads outermost, go into blocks of 8, tokens outermost."""
    codes, said = engine.play(prefills, decodes, "whole")
    assert codes == [0] * (prefills + decodes)
    for out in said[:prefills]:
        assert out.splitlines()[-1] == "prefill"
    for out in said[prefills:]:
        assert RIGHT in out
        assert [line for line in out.splitlines() if line.startswith("decode r")] == [f"decode r{number}: None" for number in range(3)]


def test_nixl_over_tcp_as_between_machines(engine: Engine) -> None:
    if engine.name != "nixl":
        pytest.skip("Mooncake's transport here is TCP anyway")
    codes, said = engine.play(1, 2, "whole", UCX_TLS="tcp")
    assert codes == [0, 0, 0]
    for out in said[1:]:
        assert RIGHT in out
        assert out.count(": None") == 3


@pytest.mark.parametrize("scene", ["prefill dies", "prefill hangs"])
def test_a_prefill_process_that_is_lost(scene: str, engine: Engine) -> None:
    """What it had not sent is computed where it is needed: no token is wrong, and nobody waits for ever."""
    codes, said = engine.play(1, 2, scene)
    assert codes == [9 if scene == "prefill dies" else -9, 0, 0]
    for out in said[1:]:
        assert "decode r0: None" in out
        (second,) = (line for line in out.splitlines() if line.startswith("decode r1: "))
        assert "peer 'p0'" in second, "which transfer failed, or which connection is broken"
        assert RIGHT in out


def test_a_decode_process_that_dies(engine: Engine) -> None:
    codes, said = engine.play(2, 1, "decode dies")
    assert codes == [0, 0, 9]
    for out in said[:2]:
        assert "blocks of 'r1' to peer 'd0': expected all of them, got its process is gone" in out


def test_the_benchmark_runs(engine: Engine) -> None:
    command = [engine.environment.python, str(ROOT / "benchmarks" / "transports.py"), "--small", "--direct", "--transports", engine.name]
    done = run(command, environ={**engine.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^\| (alike|resharded): \d MiB in \d+ runs \| (.+?) \|", done.stdout, re.MULTILINE)
    ways = ["torch.distributed", engine.name, f"{engine.name}, each run by itself"]
    assert rows == [(case, way) for case in ("alike", "resharded") for way in ways]
