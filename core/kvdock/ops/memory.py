"""Where and how tensors lie: what an op refuses about it, and what of it is in a key. Nothing here reads what is in a tensor."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from typing import Any, NoReturn

import torch

from kvdock.errors import ArgumentValueError, KVDockError
from kvdock.interface import HOST_INT, TensorMeta
from kvdock.ops.geometry import alignment_of, extent, has_internal_overlap, normalised, ranges_overlap, share_memory
from kvdock.ops.schema import Arg, Dim, OpSchema, Role

__all__ = ["alignment_class", "check_overlap", "check_storage", "check_strides", "full_alignment", "meta_of", "refuse", "unlike_memory"]

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
"""Of another type the elements may lie elsewhere, or mean something else. A `torch.nn.Buffer` is a `torch.Tensor`."""

_FIXES = {
    "Conjugate": "{0}.resolve_conj()",
    "Negative": "{0}.resolve_neg()",
    "ZeroTensor": "{0}.clone()",
    "FuncTorch": "call it outside of torch.vmap, torch.func.grad and the like",
    "Functionalize": "call it outside of torch.func.functionalize and the like",
    "Python": "pass the tensor that it stands for, and call outside of the mode that made it, such as FakeTensorMode",
}
"""What to do about a dispatch key, by how its name begins."""

_NOWHERE = torch.device("meta")
"""Where there is no memory to share: an address is but an offset in a storage of its own."""


def unlike_memory(name: str, tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return what a strided tensor is beside plain memory, and what to do about it, given its name; None if it is nothing else.

    What is harmless is listed, rather than what is not: torch gets new kinds of tensors.
    """
    keys, plain = torch._C._dispatch_keys(tensor), _plain_keys(tensor.device.type)
    if keys.raw_repr() & ~plain:
        names = [key for key in re.findall(r"\w+", str(keys)) if key not in str(torch._C.DispatchKeySet.from_raw_repr(plain))]
        fixes = (fix for start, fix in _FIXES.items() if any(key.startswith(start) for key in names))
        fix = "{0}.to_local()" if hasattr(tensor, "to_local") else next(fixes, "pass a plain tensor with the same elements")
    elif type(tensor) not in _PLAIN_TYPES:
        names, fix = [], "{0}.as_subclass(torch.Tensor), if its elements mean what those of a torch.Tensor do"
    else:
        return None
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    return f"{kind} with {', '.join(names)}" if names else kind, fix.format(name)


@functools.cache
def _plain_keys(device_type: str) -> int:
    """Return the dispatch keys of memory, as bits: those that compute on the device, record gradients, and choose a dtype."""
    backend = torch._C._dispatch_key_for_device(device_type)
    keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(backend))
    for key in ("ADInplaceOrView", "AutogradOther", f"Autograd{backend}", f"Autocast{backend}"):
        with contextlib.suppress(RuntimeError):  # there are devices that some are missing for
            keys |= torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))
    return keys.raw_repr()


def refuse(error: type[KVDockError], schema: OpSchema, name: str, expected: str, got: object, fix: str) -> NoReturn:
    """Raise an error about an argument."""
    raise error(f"{schema.name}: {name}", expected=expected, got=got, fix=fix)


def check_storage(schema: OpSchema, name: str, tensor: torch.Tensor) -> None:
    """Refuse elements without memory."""
    needed, there = tensor.storage_offset() * tensor.element_size() + extent(tensor), tensor.untyped_storage().nbytes()
    if needed > there:
        fix = "call it before the storage is given back, as by resize_(0)"
        refuse(ArgumentValueError, schema, name, f"a storage of at least {needed} bytes", f"one of {there}", fix)


def check_strides(schema: OpSchema, arg: Arg, tensor: torch.Tensor) -> None:
    """Refuse rows that are not dense, and destinations that overlap themselves."""
    dims = arg.dims_of_rank(tensor.dim()) or ()
    expected = fix = ""
    if dims and not dims[-1].runtime and tensor.shape[-1] != 1 and tensor.stride(-1) != 1:
        expected, fix = "an innermost stride of 1", f"{arg.name}.contiguous()"
    elif arg.role is Role.MUTATED and has_internal_overlap(tensor):
        expected = "a destination in which every place has memory of its own"
        fix = "pass a real tensor rather than one made by expand or as_strided"
    if expected:
        got = f"strides {list(tensor.stride())} for shape {list(tensor.shape)}"
        refuse(ArgumentValueError, schema, arg.name, expected, got, fix)


def check_overlap(schema: OpSchema, tensors: dict[str, torch.Tensor]) -> None:
    """Refuse a source in the address range of a destination, and two destinations that share a byte."""
    mutated = [arg.name for arg in schema.mutated if arg.name in tensors]
    spans = {name: (tensor.device, tensor.data_ptr(), tensor.data_ptr() + extent(tensor)) for name, tensor in tensors.items()}
    for written, (name, tensor) in itertools.product(mutated, tensors.items()):
        (device, start, end), (other, first, last) = spans[written], spans[name]
        if start >= last or first >= end or name == written or other != device or device == _NOWHERE:
            continue
        target = tensors[written]
        if share_memory(target, tensor) if name in mutated else ranges_overlap(target, tensor):
            got = f"address {tensor.data_ptr():#x} within {written} from {target.data_ptr():#x}"
            is_own = name in mutated or schema.arg(written).returned  # to clone a pool would be dear, where another output does
            fix = f"pass two tensors for {written} and {name}" if is_own else schema.instead or f"{name}.clone()"
            refuse(ArgumentValueError, schema, name, f"memory outside {written}, which is written", got, fix)


def meta_of(arg: Arg, value: Any, device: torch.device) -> Any:
    """Return what is static about an argument of a call on a device."""
    if not isinstance(value, torch.Tensor):
        return HOST_INT if arg.role is Role.RUNTIME_INT and value is not None else value
    dims = arg.dims_of_rank(value.dim()) or ()
    is_static = bool(dims) and not any(dim.runtime for dim in dims)
    alignment = alignment_class(dims, value, is_static)
    if is_static:
        strides, is_on_host = normalised(value.shape, value.stride()), value.device != device
        return TensorMeta(value.dtype, tuple(value.shape), strides, alignment, is_on_host)
    shape = tuple(None if dim.runtime else size for dim, size in zip(dims, value.shape, strict=True))
    return TensorMeta(value.dtype, shape, None, alignment)


def alignment_class(dims: tuple[Dim, ...], tensor: torch.Tensor, is_static: bool) -> int:
    """Return the alignment class of a tensor: of its pointer, and of rows with run-time strides also of their length and every step.

    The length of a row counts, so that one token and many have one class; strides of size-1 dims say nothing and do not.
    """
    if is_static:
        return alignment_of([tensor.data_ptr()])
    item = tensor.element_size()
    steps = [stride * item for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if length > 1]
    return alignment_of([tensor.data_ptr(), full_alignment(dims, tensor), *steps])


def full_alignment(dims: tuple[Dim, ...], tensor: torch.Tensor) -> int:
    """Return the best alignment class that a tensor with run-time sizes can have: that of its rows, or of the elements of an index."""
    size = tensor.element_size()
    return alignment_of([size if not dims or dims[-1].runtime else int(tensor.shape[-1]) * size])
