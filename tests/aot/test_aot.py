"""Every kernel, compiled for every architecture without a GPU: widths of accesses, spills, and how the figures are read.

The chosen subset (one aligned variant of each kernel, on one architecture) is in the default set; the rest is slow. The compiler runs in
a process of its own: another test may have imported Triton for its interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support_slow import first_of

pytest.importorskip("triton", reason="compiling for GPUs needs Triton: pip install 'kvdock[triton]'")

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
MOVING = {"paged_caching_", "static_update_", "gather_paged", "copy_blocks_", "swap_blocks_"}
KERNELS = {*MOVING, "paged_attention"}
WIDE_LANES = {"gfx90a", "gfx942", "gfx950"}


def plain_environment() -> dict[str, str]:
    """Return the environment without Triton's interpreter."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def run(*arguments: str, timeout: float = 1800) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    command = [sys.executable, "-m", "kvdock_triton.aot", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout, env=plain_environment())


def compiled(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Compile, and return the figures."""
    done = run("--json", str(folder / "aot.json"), "--out", str(folder / "aot.md"), *arguments)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert (folder / "aot.md").read_text(encoding="utf-8") == done.stdout
    content = json.loads((folder / "aot.json").read_text(encoding="utf-8"))
    assert set(content["versions"]) == {"Triton", "torch", "Python"}
    return list(content["results"])


def assert_wide(results: Sequence[dict[str, Any]]) -> None:
    """Check that every data access of the aligned class has 16 bytes, and that there is such a kernel of every op.

    Of kernels that compute, the compiler lays out the loads: those of latents have 8 bytes on one architecture.
    """
    aligned = [result for result in results if result["alignment"] == 16]
    assert {result["kernel"] for result in aligned} == KERNELS
    for result in aligned:
        assert result["load"] >= (8 if "576/512" in result["variant"] and result["computes"] else 16), result
        if result["computes"]:  # what it stores is its own
            continue
        assert result["narrowest_store"] >= 16, result
        assert result["store"] >= 16, result


def assert_no_spills(results: Sequence[dict[str, Any]]) -> None:
    """Check that no kernel spills, and that figures were read at all."""
    for result in results:
        assert result["spills"] == 0 or result["computes"], result
        assert 1 <= result["registers"] <= (512 if result["computes"] else 255), result


@pytest.mark.parametrize("target", first_of(["sm_90", "gfx942"]))
def test_a_chosen_subset_has_wide_accesses_and_no_spills(tmp_path: Path, target: str) -> None:
    results = compiled(tmp_path, "--quick", "--target", target)
    assert {result["target"] for result in results} == {target}
    assert len(results) == 9
    assert_wide(results)
    assert_no_spills(results)


PTX = """
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    @%p2 ld.global.b64 { %rd3 }, [ %rd2 + 0 ];
    @%p1 st.global.cs.v2.b32 [ %rd4 + 0 ], { %r1, %r2 };
    st.global.L1::no_allocate.v4.b32 [ %rd4 + 0 ], { %r1, %r2, %r3, %r4 };
    atom.global.gpu.relaxed.add.u64 %rd9, [ %rd5 + 0 ], %rd6;
    ld.param.b64 %rd1, [kernel_param_0];
    st.shared.v4.b32 [ %r4 + 0 ], { %r1, %r2, %r3, %r4 };
"""

AMD = """
    global_load_dwordx4 v[4:7], v[0:1], off
    buffer_load_ushort v3, v1, s[8:11], 0 offen
    global_load_b128 v[4:7], v[0:1], off
    global_load_d16_b16 v3, v[0:1], off
    global_store_short_d16_hi v[4:5], v3, off
    global_store_dwordx2 v[4:5], v[6:7], off
    buffer_store_b8 v3, v1, s[8:11], 0 offen
    global_atomic_add_x2 v[2:3], v[4:5], off
    s_load_dwordx4 s[4:7], s[0:1], 0x0
"""


FACTS = """
import json, sys
from kvdock_triton import aot, aot_cases
texts = json.loads(sys.argv[1])
print(json.dumps({
    "widths": [aot.ptx_widths(texts[0]), aot.amd_widths(texts[1])],
    "cases": [[case.kernel, case.variant, case.alignment] for case in aot_cases.all_cases()],
    "quick": [[case.kernel, case.variant, case.alignment] for case in aot_cases.all_cases(quick=True)],
    "lanes": {name: target.warp_size for name, target in aot.TARGETS.items()},
}))
"""


@pytest.fixture(scope="module")
def facts() -> Any:
    """Ask `kvdock_triton.aot` everything in one process: Triton takes seconds to import."""
    command = [sys.executable, "-c", FACTS, json.dumps([PTX, AMD])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=plain_environment())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_widths_are_read_from_assembly_as_it_is_written(facts: Any) -> None:
    ptx, amd = facts["widths"]
    assert ptx == {"load": [16, 8], "store": [8, 16]}
    assert amd == {"load": [16, 2, 16, 2], "store": [2, 8, 1]}


def test_the_cases_are_all_variants(facts: Any) -> None:
    cases = facts["cases"]
    assert len({(kernel, variant) for kernel, variant, _ in cases}) == len(cases) > 100
    text = {kernel: "\n".join(variant for name, variant, _ in cases if name == kernel) for kernel in KERNELS}
    for kernel in MOVING:
        variants = text[kernel]
        for word in ("8x128", "3x64", "1x64", "64x128", "4x192/128", "8x46", "align 16", "align 8", "align 4", "align 2"):
            assert word in variants, f"{kernel}: {word}"
    for word in ("fused", "separate", "NHD", "HND", "1-D", "2-D", "int32", "int64"):
        assert word in text["paged_caching_"], word
    for word in ("decode", "prefill", "join", "every option", "float32", "4x192/128", "4x256", "8x46 bfloat16 align 4"):
        assert word in text["paged_attention"], word
    for word in ("lengths host", "lengths int64"):
        assert word in text["static_update_"], word


def test_the_chosen_subset_is_aligned_and_part_of_the_whole(facts: Any) -> None:
    assert all(case in facts["cases"] for case in facts["quick"])
    assert all(alignment == 16 for _, _, alignment in facts["quick"])
    assert {kernel for kernel, _, _ in facts["quick"]} == KERNELS


def test_the_targets_are_the_documented_ones(facts: Any) -> None:
    assert tuple(facts["lanes"]) == ARCHITECTURES
    assert {name for name, lanes in facts["lanes"].items() if lanes == 64} == WIDE_LANES


def test_what_is_compiled_ahead_has_the_tiles_that_the_backends_take() -> None:
    from kvdock_cuda.tuning import TABLE as CUDA
    from kvdock_rocm.tuning import TABLE as ROCM
    from kvdock_triton.tuning import HOPPER, tuning_for

    assert set(ROCM) == {name for name in ARCHITECTURES if name.startswith("gfx")}
    for name, tuning in ROCM.items():
        assert tuning == tuning_for(64 if name in WIDE_LANES else 32), name
    assert CUDA == {9: HOPPER}, "give `kvdock_triton.aot.TUNED` a new table too"


@pytest.mark.slow
def test_an_unknown_architecture_is_refused() -> None:
    done = run("--target", "sm_1", timeout=300)
    assert done.returncode == 2
    assert "sm_120" in done.stderr


@pytest.mark.slow
def test_every_variant_on_every_architecture(tmp_path: Path) -> None:
    results = compiled(tmp_path)
    assert {result["target"] for result in results} == set(ARCHITECTURES)
    for name in ARCHITECTURES:
        assert_wide([result for result in results if result["target"] == name])
    assert_no_spills(results)
    for result in results:
        for alignment in (8, 4, 2):
            if result["variant"].endswith(f"align {alignment}") and not result["computes"]:
                # No access of data may be wider than what the class promises; index loads have 8 bytes, and AMD's compiler loads both
                # ids of a pair at once.
                index = 16 if result["kernel"] == "swap_blocks_" and result["target"].startswith("gfx") else 8
                assert result["store"] <= alignment, result
                assert result["load"] <= max(alignment, index), result
