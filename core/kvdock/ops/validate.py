"""What an op refuses, and how it says so.

This is the slow and complete reading of a schema. It runs once per static signature, and whenever the quick checks in
`signature` fail, to say why. It writes nothing and never looks at the values in a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, TypeAlias

import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from kvdock.interface import HOST, Request
from kvdock.ops.memory import check_overlap, check_storage, check_strides, meta_of, refuse, unlike_memory
from kvdock.ops.schema import Arg, Dim, OpSchema, Relation, Role
from kvdock.spec import QUANTISED_DTYPES

__all__ = ["check_traced", "validate"]


def validate(schema: OpSchema, values: tuple[Any, ...]) -> Request:
    """Check a call against its schema and return its static signature.

    Args:
        schema: the op.
        values: the arguments in the schema's order, None where absent.

    Raises:
        ArgumentTypeError: an argument of the wrong type or dtype, or a tensor that is more than plain memory.
        ArgumentValueError: a wrong device, rank, shape or stride, or memory that overlaps, or was given back.
        UnsupportedError: a quantised cache without its scale, or rows that are quantised already.
    """
    args = schema.bind(values)
    tensors, device = _check_traits(schema, args, is_memory=True)
    filled = {name: tensor for name, tensor in tensors.items() if tensor.numel()}  # where nothing lies, nothing can lie wrongly
    for name, tensor in filled.items():
        check_storage(schema, name, tensor)
        check_strides(schema, schema.arg(name), tensor)
    check_overlap(schema, filled)
    return Request(schema.name, device, {arg.name: meta_of(arg, args[arg.name], device) for arg in schema.args})


def check_traced(schema: OpSchema, values: tuple[Any, ...]) -> None:
    """Check what can be known of a call on tensors without memory of their own. Sizes may be symbols.

    Raises:
        KVDockError: as `validate`, which checks the rest when the call comes to memory.
    """
    tensors, _ = _check_traits(schema, schema.bind(values), is_memory=False)
    for name, tensor in tensors.items():
        check_strides(schema, schema.arg(name), tensor)


def _check_traits(schema: OpSchema, args: dict[str, Any], *, is_memory: bool) -> tuple[dict[str, torch.Tensor], torch.device]:
    """Check all that does not depend on where tensors lie. Return the tensors by name, and the device.

    Tensors that are more than plain memory are refused where that is what they are to be.
    """
    is_made = all(args[arg.name] is None for arg in schema.args if arg.returned)  # outputs that could not be: something else is wrong
    for arg in schema.args:
        if not (arg.returned and is_made):
            _check_kind(schema, arg, args[arg.name])
        found = unlike_memory(arg.name, args[arg.name]) if is_memory and isinstance(args[arg.name], torch.Tensor) else None
        if found is not None:
            refuse(ArgumentTypeError, schema, arg.name, "a plain torch.Tensor: its bytes are moved as they lie", *found)
    tensors = {arg.name: args[arg.name] for arg in schema.args if isinstance(args[arg.name], torch.Tensor)}
    placing = [name for name in schema.placing if name in tensors]
    first = next((name for name in placing if tensors[name].device != HOST), placing[0]) if schema.arg(placing[0]).host else placing[0]
    device = tensors[first].device
    _check_quantised(schema, args)
    present = [arg for arg in schema.args if arg.name in tensors]
    for arg in present:
        _check_device_and_dtype(schema, arg, args, device, first)
    for arg in present:  # when each has a dtype that it may have: else what follows a wrong one would be blamed
        _check_same_dtype(schema, arg, args)
    _check_scales(schema, args)
    _check_sizes(schema, tensors)
    return tensors, device


def _check_kind(schema: OpSchema, arg: Arg, value: Any) -> None:
    """Refuse what is no tensor (or no int)."""
    if value is None and arg.optional:
        return
    may_be_int = arg.role is Role.RUNTIME_INT
    if may_be_int and isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return
    if not arg.is_tensor:
        _check_plain(schema, arg, value)
        return
    if not isinstance(value, torch.Tensor):
        expected, got = "an int or a torch.Tensor" if may_be_int else "a torch.Tensor", f"{type(value).__name__} {value!r}"[:120]
        refuse(ArgumentTypeError, schema, arg.name, expected, got, "convert it with torch.as_tensor")
    if value.layout != torch.strided:
        refuse(ArgumentTypeError, schema, arg.name, "a dense tensor with strides", value.layout, f"{arg.name}.to_dense()")


def _check_plain(schema: OpSchema, arg: Arg, value: Any) -> None:
    got = f"{type(value).__name__} {value!r}"[:120]
    if arg.role is Role.RUNTIME_INT:
        refuse(ArgumentTypeError, schema, arg.name, "an int", got, f"pass int({arg.name})")
    try:
        hash(value)
    except TypeError:
        refuse(ArgumentTypeError, schema, arg.name, "a hashable value", got, "pass a tuple in place of a list")
    expected = arg.expects(value) if arg.expects is not None else ""
    if expected:
        fix = f"{arg.name}.item()" if hasattr(value, "item") else f"pass such a value, or leave {arg.name} out"
        refuse(ArgumentValueError, schema, arg.name, expected, got, fix)


def _check_device_and_dtype(schema: OpSchema, arg: Arg, args: dict[str, Any], device: torch.device, first: str) -> None:
    tensor, like = args[arg.name], args[arg.same_dtype].dtype if arg.same_dtype else torch.int64
    if tensor.device != device and not (arg.host and tensor.device == HOST):
        or_host = ", or in host memory" if arg.host and device != HOST else ""
        expected, got = f"a tensor on {device}, where {first} is{or_host}", f"a tensor on {tensor.device}"
        refuse(ArgumentValueError, schema, arg.name, expected, got, f'{arg.name}.to("{device}")')
    if tensor.dtype not in arg.dtypes:
        fix = f"{arg.name}.to({like if like in arg.dtypes else arg.dtypes[0]}), if that keeps its meaning"
        refuse(ArgumentTypeError, schema, arg.name, _one_of(arg), tensor.dtype, fix)


def _check_same_dtype(schema: OpSchema, arg: Arg, args: dict[str, Any]) -> None:
    dtype, like = args[arg.name].dtype, args[arg.same_dtype or arg.name].dtype
    if arg.same_dtype and dtype != like and not _is_scaled(schema, arg.same_dtype, args):
        expected, got = f"{like}, the dtype of {arg.same_dtype}", f"{dtype}; bits are never reinterpreted"
        refuse(ArgumentTypeError, schema, arg.name, expected, got, f"{arg.name}.to({like}), or create the cache in {dtype}")


def _one_of(arg: Arg) -> str:
    return "one of " + ", ".join(str(dtype) for dtype in arg.dtypes if dtype not in QUANTISED_DTYPES)


def _is_scaled(schema: OpSchema, cache: str, args: dict[str, Any]) -> bool:
    return args[cache].dtype in QUANTISED_DTYPES and any(arg.scale_of == cache and args[arg.name] is not None for arg in schema.args)


def _check_quantised(schema: OpSchema, args: dict[str, Any]) -> None:
    """Refuse rows of quantised caches that have no scale, or are quantised themselves: before dtypes, where no advice would help."""
    for arg in schema.args:
        cache = arg.same_dtype
        if cache is None or args[cache].dtype not in QUANTISED_DTYPES or args[cache].dtype in arg.dtypes:
            continue
        if args[arg.name].dtype in QUANTISED_DTYPES or not _is_scaled(schema, cache, args):
            got = f"{args[cache].dtype}: quantised caches are not there yet"
            fix = "store the model's own dtype; to move what is quantised already, pass all of it as bytes, by .view(torch.uint8)"
            refuse(UnsupportedError, schema, cache, _one_of(arg), got, fix)


def _check_scales(schema: OpSchema, args: dict[str, Any]) -> None:
    """Refuse a scale for a cache that stores bits as they come: ignoring it would be silently wrong."""
    for arg in schema.args:
        if arg.scale_of is None or args[arg.name] is None or args[arg.scale_of].dtype in QUANTISED_DTYPES:
            continue
        scale, expected = args[arg.name], f"None, since {arg.scale_of} is {args[arg.scale_of].dtype} and not quantised"
        got = f"{str(scale.dtype).removeprefix('torch.')} {list(scale.shape)} on {scale.device}"
        refuse(ArgumentValueError, schema, arg.name, expected, got, f"drop {arg.name}, or divide by it yourself before the call")


_Sizes: TypeAlias = dict[str, tuple[int, str]]
"""Sizes by word, each with the argument that settled it; ``...`` is how many leading dimensions there are."""


def _check_sizes(schema: OpSchema, tensors: dict[str, torch.Tensor]) -> None:
    sizes: _Sizes = {}
    for name, tensor in tensors.items():
        dims = schema.arg(name).dims_of_rank(tensor.dim())
        if dims is None or not _agrees(dims, tensor, name, sizes):
            _refuse_sizes(schema, name, tensor, sizes)
    known = {word: size for word, (size, _) in sizes.items()}
    for relation in schema.relations:
        if relation.without not in tensors:
            _check_relation(schema, relation, tensors, known)


def _lead(dims: tuple[Dim, ...]) -> int:
    return sum(dim.name.startswith("lead") for dim in dims)


def _agrees(dims: tuple[Dim, ...], tensor: torch.Tensor, name: str, sizes: _Sizes) -> bool:
    """Note sizes under their words, and say whether they agree with what is known of these."""
    lead = _lead(dims)
    if lead and sizes.setdefault("...", (lead, name))[0] != lead:
        return False
    for dim, size in zip(dims, tensor.shape, strict=True):
        known = sizes.setdefault(dim.name, (size, name))[0] if dim.literal is None else dim.literal
        if size != known or (not dim.runtime and size == 0 and not dim.name.startswith("NB")):
            return False
    return True


def _refuse_sizes(schema: OpSchema, name: str, tensor: torch.Tensor, sizes: _Sizes) -> NoReturn:
    leads = [dims for dims in schema.arg(name).shapes() if _lead(dims) in (0, sizes.get("...", (_lead(dims), ""))[0])]
    shapes = [dims for dims in leads if len(dims) == tensor.dim()] or leads
    settled = {word: size for word, (size, where) in sizes.items() if where != name}
    sources = sorted({sizes[dim.name][1] for dims in shapes for dim in dims if dim.name in settled})
    expected = " or ".join("[" + ", ".join(_size_texts(dims, settled)) + "]" for dims in shapes)
    agree = f" to agree with {', '.join(sources)}" if sources else " with no size 0" * (0 in tensor.shape)
    fix = "check the order of dimensions and of arguments"
    refuse(ArgumentValueError, schema, name, f"shape {expected}{agree}", f"shape {list(tensor.shape)}", fix)


def _size_texts(dims: tuple[Dim, ...], settled: dict[str, int]) -> Iterator[str]:
    words = {"lead0": "T"} if _lead(dims) == 1 else {"lead0": "B", "lead1": "S"}
    for dim in dims:
        word = words.get(dim.name, dim.name)
        yield f"{word}={settled[dim.name]}" if dim.name in settled else word


def _check_relation(schema: OpSchema, relation: Relation, tensors: dict[str, torch.Tensor], sizes: dict[str, int]) -> None:
    if not relation.holds(sizes):
        dims = {name: schema.arg(name).dims_of_rank(tensor.dim()) or () for name, tensor in tensors.items()}
        sized = (name for name in tensors if any(dim.name in relation.code.co_names for dim in dims[name]))
        name = relation.arg if relation.arg in tensors else [*sized][-1]
        expected, got = relation.expected.format(**sizes), f"shape {list(tensors[name].shape)}"
        refuse(ArgumentValueError, schema, name, expected, got, relation.fix.format(**sizes))
