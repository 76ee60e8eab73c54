"""What `kvdock_triton.aot` found, as the page docs/benchmarks/aot.md: a row for each op and architecture, and what differs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

__all__ = ["Result", "page"]


@attrs.frozen
class Result:
    """What became of one kernel on one architecture.

    Args:
        kernel: name of the op.
        variant: which of its variants.
        target: name of the architecture.
        alignment: alignment class in bytes. Every access to data should be that wide.
        registers: of a thread (NVIDIA), vector registers of a lane (AMD).
        spills: bytes that a thread spills to memory (NVIDIA), registers that are spilled (AMD).
        shared: bytes of shared memory of a program.
        load: bytes of the widest load from global memory.
        store: bytes of the widest store.
        narrowest_store: bytes of the narrowest; only data is stored, and counters are added to.
        computes: whether it computes, instead of moving bits: then it may spill, and stores sums of its own.
    """

    kernel: str
    variant: str
    target: str
    alignment: int
    registers: int
    spills: int
    shared: int
    load: int
    store: int
    narrowest_store: int
    computes: bool = False

    @property
    def faults(self) -> list[str]:
        """What must not be of a kernel that moves bits: spills, and accesses narrower than the alignment class allows."""
        return [] if self.computes else self._spilling + self._narrow

    @property
    def differences(self) -> list[str]:
        """What is not as in other kernels, whether it is a fault or not: of those that compute, the compiler lays out the loads."""
        if self.computes:
            return self._narrow
        shared = [f"{self.shared} bytes of shared memory"] if self.shared else []
        return self.faults + shared + ([f"stores of {self.store} bytes"] if self.store > self.alignment else [])

    @property
    def _spilling(self) -> list[str]:
        return [f"spills {self.spills}"] if self.spills else []

    @property
    def _narrow(self) -> list[str]:
        narrow = self.load if self.computes else min(self.load, self.narrowest_store)
        return [f"accesses of {narrow} bytes"] if narrow < self.alignment else []


_HEAD = """\
# What the compilers make of the kernels

Made by `make aot` (`python -m kvdock_triton.aot --out FILE`; `--json FILE` has a row for each kernel). No GPU was used: the page
says what code was compiled, not how fast it is. No kernel has run on an AMD GPU yet.

* {versions}, with the `ptxas` of Triton's wheel.
* Cases: bfloat16, blocks of 16 slots. A variant is a geometry (heads x dim), a memory order of blocks (NHD, HND), the rank of the
  slot mapping, the dtype of its indices, and an alignment class in bytes. `paged_caching_` has two kernels, fused and separate.
* Tiles are those of `kvdock_triton.tuning`: `HOPPER` for sm_90, which was measured; elsewhere `DEFAULT` for warps of 32 lanes, and
  `WIDE` for 64 lanes, where the default tiles gave 8-byte accesses.
* Registers are those of a thread (NVIDIA), or vector registers of a lane (AMD). Spills are bytes (NVIDIA) or registers (AMD).
* An access is the narrowest to data in global memory. Index loads of 8 bytes come on top.

**{count:,} kernels that move bits: {spilling} spill registers, {narrow} have accesses narrower than their alignment class.**
"""
_COMPUTING = """
{count:,} kernels of attention, which compute: {spilling} spill registers, on {where}.
{narrow} of them have accesses narrower than their alignment class.
Of theirs, an access is one that loads keys and values; a variant is what the kernel is for, a geometry, a dtype, and every option of
the op where it says so.
"""
_COLUMNS = ("op", "target", "kernels", "registers: median", "most", "in variant", "spills", "access in class 16")
_SHOWN = 10


def page(results: Sequence[Result], versions: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        results: what was compiled.
        versions: versions by name.
    """
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    computing, moving = ([result for result in results if result.computes is kind] for kind in (True, False))
    lines = [_HEAD.format(versions=told, count=len(moving), spilling=_count(moving, "spills"), narrow=_count(moving, "accesses"))]
    lines += [_attention(computing)] if computing else []
    lines += [*_table(results), "", "## What differs from the other kernels", "", *_different(results)]
    return "\n".join(lines) + "\n"


def _count(results: Sequence[Result], what: str) -> int:
    """Count what must not be, by how it begins."""
    return sum(fault.startswith(what) for result in results for fault in result.differences)


def _attention(results: Sequence[Result]) -> str:
    """Return what is said of kernels that compute."""
    spilling = [result for result in results if result.spills]
    where = ", ".join(dict.fromkeys(result.target for result in spilling)) or "none"
    narrow = _count(results, "accesses")
    return _COMPUTING.format(count=len(results), spilling=len(spilling), where=where, narrow=narrow).lstrip("\n")


def _table(results: Iterable[Result]) -> Iterator[str]:
    yield f"| {' | '.join(_COLUMNS)} |"
    yield "|---|---|--:|--:|--:|---|--:|--:|"
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.kernel, result.target), []).append(result)
    for group in groups:
        yield f"| {' | '.join(map(str, (*group, *_row(groups[group]))))} |"


def _row(group: Sequence[Result]) -> tuple[object, ...]:
    most = max(group, key=lambda result: result.registers)
    aligned = [result.load if result.computes else min(result.load, result.narrowest_store) for result in group if result.alignment == 16]
    median = statistics.median_low(result.registers for result in group)
    return len(group), median, most.registers, most.variant, max(result.spills for result in group), min(aligned, default="-")


def _different(results: Iterable[Result]) -> list[str]:
    """Return a line for each kernel that differs; of many, the first."""
    lines = [
        f"* {result.kernel} {result.variant}, {result.target}: {', '.join(what)}" for result in results if (what := result.differences)
    ]
    more = [f"* and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [*lines[:_SHOWN], *more] or ["None: no spills, no shared memory, and every access as wide as the alignment class."]
