"""Compile every kernel for every architecture, on a machine without any GPU: ``python -m kvdock_triton.aot``.

Triton's wheel brings the assemblers for NVIDIA and the code generator for AMD. What is printed was read from their output:
registers and spills from ``ptxas -v`` or the AMD metadata, and the widths of memory instructions from the assembly.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import attrs
import torch
import triton
from triton.backends.compiler import GPUTarget

from kvdock_triton.aot_cases import all_cases
from kvdock_triton.aot_page import Result, page
from kvdock_triton.launch import compile_for
from kvdock_triton.tuning import HOPPER, Tuning, tuning_for

__all__ = ["TARGETS", "TUNED", "amd_widths", "compile_all", "main", "ptx_widths"]

TARGETS: dict[str, GPUTarget] = {
    **{f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 90, 100, 120)},
    **{arch: GPUTarget("hip", arch, 64) for arch in ("gfx90a", "gfx942", "gfx950")},
    **{arch: GPUTarget("hip", arch, 32) for arch in ("gfx1100", "gfx1201")},
}
"""Architectures by name."""

TUNED: dict[str, Tuning] = {"sm_90": HOPPER}
"""Tiles of those that have been measured; the others take those for the lanes of their warps."""

PROCESSES = 2


_PTX_ACCESS = re.compile(r"\b(ld|st)\.global((?:\.[\w:]+)*?)(?:\.v(\d))?\.[busf](\d+)\b")
_AMD_ACCESS = re.compile(r"\b(?:global|buffer|flat)_(load|store)_(\w+)")
_AMD_BYTES = {"byte": 1, "short": 2, "dword": 4, "8": 1, "16": 2, "32": 4, "64": 8, "96": 12, "128": 16}


def ptx_widths(text: str) -> dict[str, list[int]]:
    """Return the bytes of each global load and store in PTX."""
    widths: dict[str, list[int]] = {"load": [], "store": []}
    for way, _, count, bits in _PTX_ACCESS.findall(text):
        widths["load" if way == "ld" else "store"].append(int(count or 1) * int(bits) // 8)
    return widths


def _ptx_load(text: str) -> int:
    """Return the bytes of the widest load in PTX, or of the narrowest that goes to shared memory at once: those are keys and values."""
    at_once = [int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?, 0x([0-9a-f]+)", text)]
    return min([max(ptx_widths(text)["load"]), *at_once])


def _amd_bytes(suffix: str) -> int:
    """Return the bytes of an AMD access by what follows ``load_``: ``dwordx4``, ``b128``, ``ushort``, ``short_d16_hi``."""
    found = re.search(r"(dword|short|byte)(?:x(\d))?|[bui](\d+)", suffix)
    if found is None:
        raise ValueError(f"an access of unknown width: {suffix}")
    word, count, bits = found.groups()
    return _AMD_BYTES[str(word or bits)] * int(count or 1)


def amd_widths(text: str) -> dict[str, list[int]]:
    """Return the bytes of each global load and store in AMD assembly."""
    widths: dict[str, list[int]] = {"load": [], "store": []}
    for way, suffix in _AMD_ACCESS.findall(text):
        widths[way].append(_amd_bytes(suffix))
    return widths


def _ptxas_figures(ptx: str, arch: int) -> tuple[int, int]:
    """Return registers and spilled bytes, as ``ptxas -v`` has them."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)[0]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        command = [get_ptxas(arch).path, "-v", "-lineinfo", f"--gpu-name={target}", str(source), "-o", str(source.with_suffix(".o"))]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr  # noqa: S603 - Triton's own assembler
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    if not registers or not spills:
        raise RuntimeError(f"ptxas said neither registers nor spills: {log}")
    return int(registers[0]), sum(map(int, spills))


def _amd_figures(text: str) -> tuple[int, int]:
    """Return registers and spilled registers, from the metadata of AMD assembly."""
    registers, vector, scalar = (
        int(re.findall(rf"\.{name}:\s+(\d+)", text)[0]) for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
    )
    return registers, vector + scalar


def _compile(job: tuple[bool, int, str]) -> Result:
    """Compile one case for one architecture. In a process of its own: cases are made anew there."""
    quick, number, name = job
    case, target = all_cases(quick)[number], TARGETS[name]
    compiled = compile_for(case.spec(TUNED.get(name, tuning_for(target.warp_size))), target)
    if target.backend == "cuda":
        ptx = compiled.asm["ptx"]
        (registers, spills), widths = _ptxas_figures(ptx, target.arch), ptx_widths(ptx)
    else:
        (registers, spills), widths = _amd_figures(compiled.asm["amdgcn"]), amd_widths(compiled.asm["amdgcn"])
    return Result(
        kernel=case.kernel,
        variant=case.variant,
        target=name,
        alignment=case.alignment,
        registers=registers,
        spills=spills,
        shared=int(compiled.metadata.shared),
        load=_ptx_load(compiled.asm["ptx"]) if target.backend == "cuda" else max(widths["load"]),
        store=max(widths["store"]),
        narrowest_store=min(widths["store"]),
        computes=case.computes,
    )


def compile_all(quick: bool = False, targets: Iterable[str] = tuple(TARGETS)) -> list[Result]:
    """Compile all cases for all targets, in two processes.

    Args:
        quick: one aligned variant of each kernel only.
        targets: names of architectures.
    """
    jobs = [(quick, number, name) for number in range(len(all_cases(quick))) for name in targets]
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_compile, jobs, chunksize=4))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print the page, and return 1 if a kernel spills or has accesses narrower than its alignment class."""
    parser = argparse.ArgumentParser(prog="python -m kvdock_triton.aot", description="Compile every kernel for every architecture.")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page there too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of each kernel there")
    parser.add_argument("--quick", action="store_true", help="one aligned variant of each kernel only")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="an architecture, instead of all; may be repeated")
    options = parser.parse_args(arguments)
    results = compile_all(options.quick, options.target or TARGETS)
    versions = {"Triton": triton.__version__, "torch": torch.__version__, "Python": sys.version.split()[0]}
    said = page(results, versions)
    sys.stdout.write(said)
    if options.out:
        options.out.write_text(said, encoding="utf-8")
    if options.json:
        content = {"versions": versions, "results": [attrs.asdict(result) for result in results]}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(any(result.faults for result in results))


if __name__ == "__main__":
    sys.exit(main())
