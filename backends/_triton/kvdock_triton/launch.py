"""Compiling a kernel for one device, and launching what was compiled.

`triton.compile` takes the signature, constants and alignments as they are given, so that what is compiled follows from a
descriptor's key and never from the values of a call. A compiled kernel is launched by its public ``kernel[grid](...)``,
which costs about 11 us of host time, or by its C launcher, which costs half of that. How to call that one is private to
Triton and differs between its releases: this module alone knows it, and uses it only on releases on which it was run on a
GPU (`DIRECT_LAUNCH`). `describe_launch` says in ``kvdock doctor`` which it is. Under ``TRITON_INTERPRET=1`` kernels are
interpreted on host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = [
    "COMPILED",
    "DIRECT_LAUNCH",
    "Guard",
    "KernelSpec",
    "Launch",
    "compile_for",
    "describe_launch",
    "is_interpreting",
    "launcher_for",
]

Guard = Callable[[torch.device], AbstractContextManager[Any]]
"""Makes a device current: `kvdock.Backend.device_guard`."""

DIRECT_LAUNCH = ("3.6",)
"""Releases of Triton whose C launcher is called directly."""


@attrs.frozen
class Launch:
    """A compiled kernel, ready to be launched on the current stream of its device.

    Args:
        run: ``run(grid_x, grid_y, *run-time arguments)``, pointers as addresses.
        fix: ``fix(grid_x, grid_y, pointers, tail)`` returns a function of the first ``pointers`` arguments alone, which
            launches with this grid and these remaining arguments: what can be settled beforehand is.
    """

    run: Callable[..., None]
    fix: Callable[[int, int, int, tuple[int, ...]], Callable[..., None]]


def _plain(run: Callable[..., None]) -> Launch:
    """Return a launch whose fixed form does nothing beforehand."""

    def fix(grid_x: int, grid_y: int, pointers: int, tail: tuple[int, ...]) -> Callable[..., None]:
        return lambda *addresses: run(grid_x, grid_y, *addresses, *tail)

    return Launch(run, fix)


@attrs.frozen
class KernelSpec:
    """Everything that decides what is compiled. Equal ones share one compiled kernel on a device.

    Args:
        kernel: the ``@triton.jit`` function.
        types: Triton type of each run-time parameter by name, in the kernel's order: ``"*i32"``, ``"i64"``.
        constants: value of each other parameter by name.
        aligned: names of pointers that are multiples of 16 bytes.
        num_warps: warps of a program.
    """

    kernel: Any = attrs.field(eq=id)
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    num_warps: int

    @classmethod
    def build(
        cls, kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], aligned: tuple[str, ...], num_warps: int
    ) -> KernelSpec:
        """Put a spec together, checking that every parameter has a type or a value."""
        missing = [name for name in kernel.arg_names if name not in types and name not in constants]
        unknown = [name for name in (*types, *constants) if name not in kernel.arg_names]
        if missing or unknown:
            raise TypeError(f"{kernel.__name__}: parameters without type or value: {missing}; unknown: {unknown}")
        ordered = tuple((name, types[name]) for name in kernel.arg_names if name in types)
        return cls(kernel, ordered, tuple(sorted(constants.items())), aligned, num_warps)

    def constant(self, name: str) -> Any:
        """Return the value of a constant."""
        return dict(self.constants)[name]

    def source(self) -> ASTSource:
        """Return what `triton.compile` takes."""
        names, types = list(self.kernel.arg_names), dict(self.types)
        return ASTSource(
            fn=self.kernel,
            signature={name: types.get(name, "constexpr") for name in names},
            constexprs={(names.index(name),): value for name, value in self.constants},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in self.aligned},
        )


def compile_for(spec: KernelSpec, target: GPUTarget) -> Any:
    """Compile for a target, on any machine."""
    return triton.compile(spec.source(), target=target, options={"num_warps": spec.num_warps})


_lock = threading.Lock()

COMPILED: dict[tuple[KernelSpec, int], Any] = {}
"""Compiled kernels by spec and device index, for the life of the process: a captured graph or a descriptor of any thread
may hold their functions."""


def is_interpreting() -> bool:
    """Whether kernels are interpreted (``TRITON_INTERPRET=1``)."""
    return bool(triton.knobs.runtime.interpret)


def launcher_for(spec: KernelSpec, device: torch.device, guard: Guard) -> Launch:
    """Return the quickest launch of a kernel on a device, which is current; ``guard`` makes it so for a launch."""
    if is_interpreting():
        return _interpreted(spec)
    driver = triton.runtime.driver.active
    with _lock:
        kernel = COMPILED.get((spec, device.index))
        if kernel is None:
            kernel = COMPILED[spec, device.index] = compile_for(spec, driver.get_current_target())
    if _is_direct(driver):
        return _direct(kernel, spec, device.index)
    return _public(kernel, spec, device, guard)


def _release() -> str:
    """Return Triton's major and minor version."""
    return ".".join(triton.__version__.split(".")[:2])


def _is_direct(driver: Any) -> bool:
    """Whether the C launcher is called directly here."""
    return _release() in DIRECT_LAUNCH and type(driver).__name__ == "CudaDriver"


def _public(kernel: Any, spec: KernelSpec, device: torch.device, guard: Guard) -> Launch:
    """Launch through ``kernel[grid]``, which takes every parameter."""
    values = dict(spec.constants)
    names = [name for name, _ in spec.types]
    order = [(names.index(name), None) if name in names else (-1, values[name]) for name in spec.kernel.arg_names]
    driver, index = triton.runtime.driver.active, device.index

    def launch(grid_x: int, grid_y: int, *args: Any) -> None:
        with guard(device):
            stream = driver.get_current_stream(index)
            kernel[(grid_x, grid_y, 1)](*(args[place] if place >= 0 else value for place, value in order), stream=stream)

    return _plain(launch)


def _direct(kernel: Any, spec: KernelSpec, index: int) -> Launch:
    """Launch through the C launcher of Triton 3.6, built for the run-time parameters alone.

    Its arguments: grid, stream, function, cooperative, programmatic, global scratch, profile scratch, packed metadata,
    launch metadata, enter hook, exit hook, then the parameters. None of these kernels needs scratch.
    """
    from triton.backends.nvidia.driver import CudaLauncher

    kernel._init_handles()
    source = SimpleNamespace(constants={}, signature=dict(enumerate(ty for _, ty in spec.types)), fn=spec.kernel)
    scope = {
        "run": CudaLauncher(source, kernel.metadata).launch,
        "function": kernel.function,
        "packed": kernel.packed_metadata,
        "index": index,
        "stream_of": torch._C._cuda_getCurrentRawStream,
        "current_device": torch._C._cuda_getDevice,
        "guard": torch.cuda.device,
    }
    names = [name for name, _ in spec.types]

    def fix(grid_x: int, grid_y: int, pointers: int, tail: tuple[int, ...]) -> Callable[..., None]:
        fixed = dict(zip(names[pointers:], tail, strict=True))
        return _function(names[:pointers], names, {**scope, "grid_x": grid_x, "grid_y": grid_y, **fixed})

    return Launch(_function(["grid_x", "grid_y", *names], names, scope), fix)


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


def _interpreted(spec: KernelSpec) -> Launch:
    """Interpret the kernel on host memory. Its pointers are made by hand, from addresses."""
    from triton.runtime.interpreter import TensorHandle

    types, constants = dict(spec.types), dict(spec.constants)

    def argument(name: str, value: int) -> Any:
        ty = tl.str_to_ty(types[name], None)
        if not types[name].startswith("*"):
            return tl.tensor(TensorHandle(np.array([value], dtype=np.int64), ty), ty)
        return tl.tensor(TensorHandle(np.array([value], dtype=np.uint64), ty), ty)

    def launch(grid_x: int, grid_y: int, *args: Any) -> None:
        named = {name: argument(name, value) for name, value in zip(types, args, strict=True)}
        spec.kernel[(grid_x, grid_y, 1)](**named, **constants)

    return _plain(launch)


def describe_launch() -> str:
    """Say how kernels are launched here, for people."""
    if is_interpreting():
        return f"Triton {triton.__version__}: interpreted (TRITON_INTERPRET=1)"
    if _release() in DIRECT_LAUNCH:
        return f"Triton {triton.__version__}: direct launches on NVIDIA GPUs"
    return f"Triton {triton.__version__}: public launches; direct ones were run on {', '.join(DIRECT_LAUNCH)} only"
