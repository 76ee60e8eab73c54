"""Whether a tensor is nothing but memory, so that moving the bytes at its address moves its elements."""

from __future__ import annotations

import contextlib
import functools
import re

import torch

__all__ = ["unlike_memory"]

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


def unlike_memory(name: str, tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return what a strided tensor is beside plain memory, and what to do about it, given its name; None if it is nothing else.

    What is harmless is listed, rather than what is not: torch gets new kinds of tensors.
    """
    keys, plain = torch._C._dispatch_keys(tensor), _plain_keys(tensor.device.type)
    if (keys | plain).raw_repr() != plain.raw_repr():
        names = [key for key in re.findall(r"\w+", str(keys)) if key not in str(plain)]
        fixes = (fix for start, fix in _FIXES.items() if any(key.startswith(start) for key in names))
        fix = "{0}.to_local()" if hasattr(tensor, "to_local") else next(fixes, "pass a plain tensor with the same elements")
    elif type(tensor) not in _PLAIN_TYPES:
        names, fix = [], "{0}.as_subclass(torch.Tensor), if its elements mean what those of a torch.Tensor do"
    else:
        return None
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    return f"{kind} with {', '.join(names)}" if names else kind, fix.format(name)


@functools.cache
def _plain_keys(device_type: str) -> torch._C.DispatchKeySet:
    """Return the dispatch keys of memory: those that compute on the device, record gradients, and choose a dtype."""
    backend = torch._C._dispatch_key_for_device(device_type)
    keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(backend))
    for key in ("ADInplaceOrView", "AutogradOther", f"Autograd{backend}", f"Autocast{backend}"):
        with contextlib.suppress(RuntimeError):  # there are devices that some are missing for
            keys |= torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))
    return keys
