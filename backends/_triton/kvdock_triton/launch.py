"""Compiling a kernel for one device, and launching what was compiled.

`triton.compile` takes the signature, constants and alignments as they are given, so that what is compiled follows from a
descriptor's key and never from the values of a call. A compiled kernel is launched by its public ``kernel[grid](...)``,
which costs about 11 us of host time, or as `kvdock_triton.direct` does, which costs half of that. `describe_launch` says in
``kvdock doctor`` which it is. Under ``TRITON_INTERPRET=1`` kernels are interpreted on host memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs
import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvdock_triton import direct
from kvdock_triton.tensor_maps import MapMaker, interpreted_map, is_map, spelled
from kvdock_triton.written import Launch

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
    raise ImportError(f"Triton {triton.__version__} is too old. Fix: pip install 'kvdock[triton]', which asks for 3.6 or newer")

__all__ = [
    "COMPILED",
    "Guard",
    "KernelSpec",
    "compile_for",
    "describe_launch",
    "has_maps",
    "is_interpreting",
    "launcher_for",
    "without_driver",
]

Guard = Callable[[torch.device], AbstractContextManager[Any]]
"""Makes a device current: `Backend.device_guard`."""


def _plain(spec: KernelSpec, run: Callable[..., None], maps: Mapping[str, MapMaker] | None = None) -> Launch:
    """Return a launch by a function of the grid and all run-time arguments."""
    return Launch([name for name, _ in spelled(spec.types)], ["run({grid}, {arguments})"], {"run": run}, maps)


@attrs.frozen
class KernelSpec:
    """Everything that decides what is compiled. Equal ones share one compiled kernel on a device.

    Args:
        kernel: the ``@triton.jit`` function.
        types: Triton type of each run-time parameter by name, in the kernel's order: ``"*i32"``, ``"i64"``.
        constants: value of each other parameter by name.
        aligned: names of pointers that are multiples of 16 bytes.
        num_warps: warps of a program.
        num_stages: steps of a loop over tiles whose loads are on their way at once; None for the compiler's default.
        early: whether it may be launched before what it follows has ended: it waits for that itself.
        resident: programs that may run on a processor at once, if the launch can see to that; None for as many as there is room for.
    """

    kernel: Any = attrs.field(eq=id)
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    num_warps: int
    num_stages: int | None = None
    early: bool = False
    resident: int | None = None

    @classmethod
    def build(
        cls,
        kernel: Any,
        types: Mapping[str, str],
        constants: Mapping[str, Any],
        aligned: tuple[str, ...],
        num_warps: int,
        num_stages: int | None = None,
        early: bool = False,
        resident: int | None = None,
    ) -> KernelSpec:
        """Put a spec together, checking that every parameter has a type or a value."""
        missing = [name for name in kernel.arg_names if name not in types and name not in constants]
        unknown = [name for name in (*types, *constants) if name not in kernel.arg_names]
        if missing or unknown:
            raise TypeError(f"{kernel.__name__}: parameters without type or value: {missing}; unknown: {unknown}")
        ordered = tuple((name, types[name]) for name in kernel.arg_names if name in types)
        return cls(kernel, ordered, tuple(sorted(constants.items())), aligned, num_warps, num_stages, early, resident)

    def constant(self, name: str) -> Any:
        """Return the value of a constant."""
        return dict(self.constants)[name]

    def source(self) -> ASTSource:
        """Return what `triton.compile` takes."""
        names, types = list(self.kernel.arg_names), dict(self.types)
        return (direct.gluon_source() if self.kernel.is_gluon() else ASTSource)(
            fn=self.kernel,
            signature={name: types.get(name, "constexpr") for name in names},
            constexprs={(names.index(name),): value for name, value in self.constants},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in self.aligned},
        )


def compile_for(spec: KernelSpec, target: GPUTarget) -> Any:
    """Compile for a target, on any machine. No float is contracted: results may not depend on what a release does by default."""
    options = {"num_warps": spec.num_warps, "launch_pdl": spec.early, "enable_fp_fusion": False}  # a compiler takes what it knows
    options |= {} if spec.num_stages is None else {"num_stages": spec.num_stages}
    return triton.compile(spec.source(), target=target, options=options)


_lock = threading.RLock()  # a signal, or a finalizer, may call in the middle of a call


def _renew_lock() -> None:
    """Make a lock that nobody holds: the thread that was compiling is not in a forked child."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)

_INTERPRETING = bool(triton.knobs.runtime.interpret)

COMPILED: dict[tuple[KernelSpec, torch.device], tuple[Any, Launch | None]] = {}
"""Compiled kernels by spec and device, each with its direct launch if it has one, for the life of the process: a captured graph or
a descriptor of any thread may hold their functions, and each `CudaLauncher` would load Triton's C launcher as a module again."""


def is_interpreting() -> bool:
    """Whether kernels are interpreted: ``TRITON_INTERPRET=1`` when this was imported, which is when Triton reads it."""
    return _INTERPRETING


def without_driver() -> str:
    """Return why Triton can launch nothing here; empty if it can, or if kernels are interpreted."""
    if is_interpreting():
        return ""
    try:
        triton.runtime.driver.active  # noqa: B018 - looking it up makes it, or raises
    except Exception as error:  # noqa: BLE001 - whatever a driver's own start raises is the reason
        return f"Triton {triton.__version__} has no driver for these devices ({type(error).__name__}: {error})"
    return ""


def launcher_for(spec: KernelSpec, device: torch.device, guard: Guard) -> Launch:
    """Return the quickest launch of a kernel on a device, which is current; ``guard`` makes it so for a launch.

    Raises:
        ValueError: kernels are interpreted, and the device's memory is not the host's.
    """
    if is_interpreting():
        return _interpreted(spec, device)
    with _lock:
        made = COMPILED.get((spec, device))
        if made is None:
            made = COMPILED[spec, device] = _compiled(spec, device)
    kernel, launch = made
    return launch or _public(kernel, spec, device, guard)


def _compiled(spec: KernelSpec, device: torch.device) -> tuple[Any, Launch | None]:
    """Compile for a device, which is current."""
    driver = triton.runtime.driver.active
    kernel = compile_for(spec, driver.get_current_target())
    is_direct = not direct.why_not() and direct.fits(kernel, driver)
    return kernel, direct.build(kernel, spec.kernel, spec.types, device.index, spec.resident) if is_direct else None


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

    return _plain(spec, launch)


def _make_bounds_work() -> None:
    """Let a loop run to a value that the kernel computed: numpy 2.4 makes no number of the array of one that Triton 3.6 has for it."""
    from triton.runtime import interpreter

    real = interpreter._patch_lang_tensor
    if real.__module__ == __name__:
        return

    def patch(tensor: Any, scope: Any) -> None:
        real(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _interpreted(spec: KernelSpec, device: torch.device) -> Launch:
    """Interpret the kernel on host memory. Its pointers are made by hand, from addresses."""
    if device.type != "cpu":  # a device's addresses would crash the process
        raise ValueError(f"TRITON_INTERPRET=1 interprets kernels on host memory, and this is {device}: unset it and start again")
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    _make_bounds_work()
    types, constants = dict(spec.types), dict(spec.constants)

    def argument(type_name: str, value: int) -> Any:
        ty = tl.str_to_ty(type_name, None)
        if not type_name.startswith("*"):
            return tl.tensor(TensorHandle(np.array([value], dtype=type_name.replace("i", "int")), ty), ty)
        return tl.tensor(TensorHandle(np.array([value], dtype=np.uint64), ty), ty)

    def launch(grid_x: int, grid_y: int, *args: Any) -> None:
        values, named = iter(args), {}
        with _lock:  # while it interprets, Triton replaces the functions of its language for the whole process
            for name, type_name in types.items():
                mine = [next(values) for _ in spelled([(name, type_name)])]
                named[name] = interpreted_map(type_name, argument, mine) if is_map(type_name) else argument(type_name, *mine)
            place = dict(interpreter_builder.__dict__)  # of the program in whose middle this call may be
            spec.kernel[(grid_x, grid_y, 1)](**named, **constants)
            interpreter_builder.__dict__.update(place)

    def as_they_are(address: int, sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
        return (address, *sizes, *strides)

    return _plain(spec, launch, {name: as_they_are for name, type_name in spec.types if is_map(type_name)})


def has_maps() -> bool:
    """Whether kernels may have maps for parameters, and be launched early: where Triton's launcher is called directly, or not at all."""
    return is_interpreting() or not direct.why_not()


def describe_launch() -> str:
    """Say how kernels are launched here, for people."""
    if is_interpreting():
        return f"Triton {triton.__version__}: interpreted (TRITON_INTERPRET=1)"
    reason = direct.why_not()
    if not reason:
        return f"Triton {triton.__version__}: direct launches on NVIDIA GPUs"
    return f"Triton {triton.__version__}: public launches; {reason}"
