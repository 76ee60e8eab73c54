"""A compiled device of torch's kind PrivateUse1, installed as a vendor's distribution: two cards in host memory."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from support_projects import Environment
from support_sources import ROOT

SOURCES = ROOT / "tests" / "data" / "twocards"


def why_not() -> str:
    """Return why it cannot be built here; empty when it can."""
    if shutil.which("g++") is None:
        return "no C++ compiler: g++"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.exists() else f"no headers of Python: {header}"


def install(environment: Environment, folder: Path) -> None:
    """Compile it in ``folder``, and install it into an environment, where torch loads it by itself."""
    package = environment.site_packages / "twocards"
    shutil.copytree(SOURCES, package, ignore=shutil.ignore_patterns("__pycache__"))
    target = package / f"_device{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    libraries = [word for path in library_paths() for word in (f"-L{path}", f"-Wl,-rpath,{path}")]
    words = ["-shared", "-fPIC", "-O0", "-std=c++20", "-w", "-DTORCH_EXTENSION_NAME=_device"]
    abi = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command = ["g++", *words, *abi, *includes, str(SOURCES / "device.cpp"), "-o", str(target), *libraries]
    done = subprocess.run(
        [*command, "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    metadata = environment.site_packages / "twocards-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: twocards\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text("[torch.backends]\ntwocards = twocards:known\n", encoding="utf-8")
