"""Launching a compiled kernel through Triton's own C launcher, in half the host time of ``kernel[grid](...)``.

How to call it is private to Triton and differs between its releases, and so is torch's quick way to the current stream. All
of that knowledge is here, and how Gluon is compiled, which is an experiment of Triton's. `why_not` says why it is not used where it
is not; then launches are public ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.compiler.compiler import max_shared_mem

from kvdock_triton.tensor_maps import driver_maps, spelled
from kvdock_triton.written import Launch

__all__ = ["DIRECT_LAUNCH", "build", "fits", "gluon_source", "is_known_release", "why_not"]

DIRECT_LAUNCH = ("3.6",)
"""Releases of Triton whose C launcher was called directly on a GPU, and no others are."""

_PRIVATE = ((CompiledKernel, "_init_handles"), (torch._C, "_cuda_getCurrentRawStream"), (torch._C, "_cuda_getDevice"))


def is_known_release() -> bool:
    """Whether what is private or experimental in this release of Triton is known."""
    return ".".join(triton.__version__.split(".")[:2]) in DIRECT_LAUNCH


def gluon_source() -> Any:
    """Return what `triton.compile` takes of a kernel in Gluon, in a known release."""
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def why_not() -> str:
    """Return why no kernel is launched directly in this process; empty if they are. Opens no context on any device."""
    if not is_known_release():
        return f"direct ones were run on {', '.join(DIRECT_LAUNCH)} only"
    if torch.version.cuda is None:
        return "direct ones are for NVIDIA GPUs"
    missing = [name for owner, name in _PRIVATE if not hasattr(owner, name)]
    return f"direct ones need {missing[0]}, which is gone" if missing else ""


def fits(kernel: Any, driver: Any) -> bool:
    """Whether a kernel can be launched directly: for an NVIDIA GPU, and without what only the public launch provides."""
    metadata = kernel.metadata
    extras = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid")
    return type(driver).__name__ == "CudaDriver" and not any(getattr(metadata, name, 0) for name in extras)


def build(kernel: Any, fn: Any, types: Sequence[tuple[str, str]], index: int, resident: int | None = None) -> Launch:
    """Return the launch of a kernel by the C launcher of Triton 3.6, built for run-time parameters alone.

    Its arguments: grid, stream, function, cooperative, programmatic, global scratch, profile scratch, packed metadata,
    launch metadata, enter hook, exit hook, then the parameters. The legacy default stream, 0, is that of the current device: with
    several devices, the kernel's must be current.

    Args:
        kernel: what `triton.compile` returned. The device is current.
        fn: the ``@triton.jit`` function.
        types: its run-time parameters, in order, and the Triton type of each.
        index: index of the device.
        resident: programs that may run on a processor at once: each is given so much shared memory that there is no room for more.
    """
    from triton.backends.nvidia.driver import CudaLauncher

    packed = kernel.packed_metadata
    if resident is not None:
        meta = kernel.metadata
        kernel.metadata = meta._replace(shared=max(meta.shared, max_shared_mem(index) // (resident + 1) + 1))
        packed = (meta.num_warps, meta.num_ctas, kernel.metadata.shared)
    kernel._init_handles()
    names, taken = zip(*spelled(types), strict=True)
    source = SimpleNamespace(constants={}, signature=dict(enumerate(taken)), fn=fn)
    scope = {
        "run": CudaLauncher(source, kernel.metadata._replace(tensordesc_meta=[])).launch,  # `driver_maps` has made them already
        "function": kernel.function,
        "packed": packed,
        "early": bool(kernel.metadata.launch_pdl),
        "index": index,
        "stream_of": torch._C._cuda_getCurrentRawStream,
        "current_device": torch._C._cuda_getDevice,
        "guard": torch.cuda.device,
    }
    maps = driver_maps(kernel, types)
    call = "run({grid}, 1, stream_of(index), function, False, early, None, None, packed, None, None, None, {arguments})"
    if torch.cuda.device_count() == 1:
        return Launch(names, [call], scope, maps)
    return Launch(names, [f"if current_device() == index: return {call}", f"with guard(index): {call}"], scope, maps)
