"""Launching a compiled kernel through Triton's own C launcher, in half the host time of ``kernel[grid](...)``.

How to call it is private to Triton and differs between its releases, and so is torch's quick way to the current stream. All
of that knowledge is here. `why_not` says why it is not used where it is not; then launches are public ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel

__all__ = ["DIRECT_LAUNCH", "build", "fits", "why_not"]

DIRECT_LAUNCH = ("3.6",)
"""Releases of Triton whose C launcher was called directly on a GPU, and no others are."""

_PRIVATE = ((CompiledKernel, "_init_handles"), (torch._C, "_cuda_getCurrentRawStream"), (torch._C, "_cuda_getDevice"))


def why_not() -> str:
    """Return why no kernel is launched directly in this process; empty if they are. Opens no context on any device."""
    if ".".join(triton.__version__.split(".")[:2]) not in DIRECT_LAUNCH:
        return f"direct ones were run on {', '.join(DIRECT_LAUNCH)} only"
    if torch.version.cuda is None:
        return "direct ones are for NVIDIA GPUs"
    missing = [name for owner, name in _PRIVATE if not hasattr(owner, name)]
    return f"direct ones need {missing[0]}, which is gone" if missing else ""


def fits(kernel: Any, driver: Any) -> bool:
    """Whether a kernel can be launched directly: for an NVIDIA GPU, and without what only the public launch provides."""
    metadata = kernel.metadata
    extras = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    return type(driver).__name__ == "CudaDriver" and not any(getattr(metadata, name, 0) for name in extras)


def build(kernel: Any, types: Sequence[tuple[str, str]], fn: Any, index: int) -> tuple[Callable[..., None], Callable[..., Any]]:
    """Return `Launch.run` and `Launch.fix` for a kernel: the C launcher of Triton 3.6, built for run-time parameters alone.

    Its arguments: grid, stream, function, cooperative, programmatic, global scratch, profile scratch, packed metadata,
    launch metadata, enter hook, exit hook, then the parameters.

    Args:
        kernel: what `triton.compile` returned. The device is current.
        types: name and Triton type of each run-time parameter, in the kernel's order.
        fn: the ``@triton.jit`` function.
        index: index of the device.
    """
    from triton.backends.nvidia.driver import CudaLauncher

    kernel._init_handles()
    source = SimpleNamespace(constants={}, signature=dict(enumerate(ty for _, ty in types)), fn=fn)
    scope = {
        "run": CudaLauncher(source, kernel.metadata).launch,
        "function": kernel.function,
        "packed": kernel.packed_metadata,
        "index": index,
        "stream_of": torch._C._cuda_getCurrentRawStream,
        "current_device": torch._C._cuda_getDevice,
        "guard": torch.cuda.device,
    }
    names = [name for name, _ in types]

    def fix(grid_x: int, grid_y: int, pointers: int, tail: tuple[int, ...]) -> Callable[..., None]:
        fixed = dict(zip(names[pointers:], tail, strict=True))
        return _function(names[:pointers], names, {**scope, "grid_x": grid_x, "grid_y": grid_y, **fixed})

    return _function(["grid_x", "grid_y", *names], names, scope), fix


def _function(parameters: list[str], arguments: list[str], scope: dict[str, Any]) -> Callable[..., None]:
    """Write out a launch: the arguments that are no parameters come from ``scope``.

    Written out, since collecting arguments in tuples costs as much as half of what is left to save. The legacy default
    stream, 0, is that of the current device: with several devices, the kernel's must be current.
    """
    call = f"run(grid_x, grid_y, 1, stream_of(index), function, False, False, None, None, packed, None, None, None, {', '.join(arguments)})"
    lines = [call] if torch.cuda.device_count() == 1 else [f"if current_device() == index: return {call}", f"with guard(index): {call}"]
    source = "\n".join([f"def launch({', '.join(parameters)}):", *(f"    {line}" for line in lines)])
    namespace = dict(scope)
    exec(compile(source, "<kvdock_triton launch>", "exec"), namespace)  # noqa: S102 - made from parameter names alone
    launch: Callable[..., None] = namespace["launch"]
    return launch
