"""What an op refuses, and how it says so.

This is the slow and complete reading of a schema. It runs once per static signature, and whenever the quick checks in
`signature` fail, to say why. It writes nothing and never looks at the values in a tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError, KVDockError, UnsupportedError
from kvdock.interface import HOST, HOST_INT, Request, TensorMeta
from kvdock.ops.geometry import alignment_of, extent, has_internal_overlap, normalised, ranges_overlap, share_memory
from kvdock.ops.plain import unlike_memory
from kvdock.ops.schema import Arg, Dim, OpSchema, Role
from kvdock.spec import QUANTISED_DTYPES

__all__ = ["describe", "validate"]


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
    is_made = all(args[arg.name] is None for arg in schema.args if arg.returned)  # outputs that could not be: something else is wrong
    for arg in schema.args:
        if not (arg.returned and is_made):
            _check_kind(schema, arg, args[arg.name])
    tensors = {arg.name: args[arg.name] for arg in schema.args if isinstance(args[arg.name], torch.Tensor)}
    first = next(name for name in tensors if not schema.arg(name).host)
    device = tensors[first].device
    _check_quantised(schema, args)
    for name, tensor in tensors.items():
        _check_device(schema, schema.arg(name), tensor, device, first)
        _check_dtype(schema, schema.arg(name), args)
    _check_scales(schema, args)
    _check_sizes(schema, tensors)
    filled = {name: tensor for name, tensor in tensors.items() if tensor.numel()}  # where nothing lies, nothing can lie wrongly
    for name, tensor in filled.items():
        _check_memory(schema, schema.arg(name), tensor)
    _check_overlap(schema, filled)
    return Request(schema.name, device, {arg.name: _meta(arg, args[arg.name]) for arg in schema.args})


def _subject(schema: OpSchema, name: str) -> str:
    return f"{schema.name}: {name}"


def _check_kind(schema: OpSchema, arg: Arg, value: Any) -> None:
    """Refuse what is no tensor (or no int), and tensors that are more than plain memory."""
    if value is None and arg.optional:
        return
    if arg.role is Role.RUNTIME_INT and isinstance(value, int) and not isinstance(value, bool):
        return
    subject = _subject(schema, arg.name)
    if not arg.is_tensor:
        _check_plain(subject, arg, value)
        return
    if not isinstance(value, torch.Tensor):
        kind, got = "an int or a " if arg.role is Role.RUNTIME_INT else "a ", f"{type(value).__name__} {value!r}"[:120]
        raise ArgumentTypeError(subject, expected=f"{kind}torch.Tensor", got=got, fix="convert it with torch.as_tensor")
    if value.layout != torch.strided:
        raise ArgumentTypeError(subject, expected="a dense tensor with strides", got=value.layout, fix=f"{arg.name}.to_dense()")
    found = unlike_memory(arg.name, value)
    if found is not None:
        raise ArgumentTypeError(subject, expected="a plain torch.Tensor: its bytes are moved as they lie", got=found[0], fix=found[1])


def _check_plain(subject: str, arg: Arg, value: Any) -> None:
    """Refuse what is no int where it must be one, and a static value that no key can have."""
    got = f"{type(value).__name__} {value!r}"[:120]
    if arg.role is Role.RUNTIME_INT:
        raise ArgumentTypeError(subject, expected="an int", got=got, fix=f"pass int({arg.name})")
    try:
        hash(value)
    except TypeError:
        raise ArgumentTypeError(subject, expected="a hashable value", got=got, fix="pass a tuple in place of a list") from None


def _check_device(schema: OpSchema, arg: Arg, tensor: torch.Tensor, device: torch.device, first: str) -> None:
    if tensor.device == device or (arg.host and tensor.device == HOST):
        return
    raise ArgumentValueError(
        _subject(schema, arg.name),
        expected=f"a tensor on {device}, where {first} is",
        got=f"a tensor on {tensor.device}",
        fix=f'{arg.name}.to("{device}")',
    )


def _check_dtype(schema: OpSchema, arg: Arg, args: dict[str, Any]) -> None:
    dtype, subject = args[arg.name].dtype, _subject(schema, arg.name)
    if dtype not in arg.dtypes:
        raise ArgumentTypeError(
            subject,
            expected="one of " + ", ".join(map(str, arg.dtypes)),
            got=dtype,
            fix=f"{arg.name}.to({_dtype_to_take(arg, args)}), if that keeps its meaning",
        )
    if arg.same_dtype is None or dtype == args[arg.same_dtype].dtype or _is_scaled(schema, arg.same_dtype, args):
        return
    expected = args[arg.same_dtype].dtype
    raise ArgumentTypeError(
        subject,
        expected=f"{expected}, the dtype of {arg.same_dtype}",
        got=f"{dtype}; bits are never reinterpreted",
        fix=f"{arg.name}.to({expected}), or create the cache in {dtype}",
    )


def _dtype_to_take(arg: Arg, args: dict[str, Any]) -> torch.dtype:
    """Return a dtype to advise: that of the cache where it must be the same, else the widest of indices, or the first."""
    like = args[arg.same_dtype].dtype if arg.same_dtype else torch.int64
    return like if like in arg.dtypes else arg.dtypes[0]


def _is_scaled(schema: OpSchema, cache: str, args: dict[str, Any]) -> bool:
    return args[cache].dtype in QUANTISED_DTYPES and any(arg.scale_of == cache and args[arg.name] is not None for arg in schema.args)


def _check_quantised(schema: OpSchema, args: dict[str, Any]) -> None:
    """Refuse rows of quantised caches that have no scale, or are quantised themselves: before dtypes, where no advice would help."""
    for arg in schema.args:
        cache = arg.same_dtype
        if cache is None or args[cache].dtype not in QUANTISED_DTYPES or args[cache].dtype in arg.dtypes:
            continue
        if args[arg.name].dtype in QUANTISED_DTYPES or not _is_scaled(schema, cache, args):
            raise UnsupportedError(
                _subject(schema, cache),
                expected="one of " + ", ".join(map(str, arg.dtypes)),
                got=f"{args[cache].dtype}: quantised caches are not there yet",
                fix="store the model's own dtype; to move what is quantised already, pass all of it as bytes, by .view(torch.uint8)",
            )


def _check_scales(schema: OpSchema, args: dict[str, Any]) -> None:
    """Refuse a scale for a cache that stores bits as they come: ignoring it would be silently wrong."""
    for arg in schema.args:
        if arg.scale_of is None or args[arg.name] is None:
            continue
        dtype = args[arg.scale_of].dtype
        if dtype not in QUANTISED_DTYPES:
            raise ArgumentValueError(
                _subject(schema, arg.name),
                expected=f"None, since {arg.scale_of} is {dtype} and not quantised",
                got=describe(args[arg.name]),
                fix=f"drop {arg.name}, or divide by it yourself before the call",
            )


def _check_sizes(schema: OpSchema, tensors: dict[str, torch.Tensor]) -> None:
    sizes: dict[str, tuple[int, str]] = {}
    for name, tensor in tensors.items():
        dims = schema.arg(name).dims_of_rank(tensor.dim())
        if (
            dims is None
            or not _bind_lead(dims, name, sizes)
            or not all(_bind(dim, size, name, sizes) for dim, size in zip(dims, tensor.shape, strict=True))
        ):
            raise _size_error(schema, name, tensor, sizes)
    known = {word: size for word, (size, _) in sizes.items()}
    for relation in schema.relations:
        _check_relation(schema, relation, tensors, known)


def _bind(dim: Dim, size: int, name: str, sizes: dict[str, tuple[int, str]]) -> bool:
    """Note a size under its word, and say whether it agrees with what is known of that word."""
    if dim.literal is not None:
        return size == dim.literal
    if not dim.runtime and size == 0 and dim.name != "NB":
        return False
    return sizes.setdefault(dim.name, (size, name))[0] == size


def _lead(dims: tuple[Dim, ...]) -> int:
    return sum(dim.name.startswith("lead") for dim in dims)


def _bind_lead(dims: tuple[Dim, ...], name: str, sizes: dict[str, tuple[int, str]]) -> bool:
    """Note how many leading dimensions there are, and say whether all arguments that have them agree on it."""
    lead = _lead(dims)
    return lead == 0 or sizes.setdefault("...", (lead, name))[0] == lead


def _size_error(schema: OpSchema, name: str, tensor: torch.Tensor, sizes: dict[str, tuple[int, str]]) -> KVDockError:
    """Say which shapes an argument may have, with the sizes that other arguments settled."""
    arg = schema.arg(name)
    leads = [dims for dims in arg.shapes() if _lead(dims) in (0, sizes.get("...", (_lead(dims), ""))[0])]
    shapes = [dims for dims in leads if len(dims) == tensor.dim()] or leads
    settled = {word: where for word, (_, where) in sizes.items() if where != name}
    sources = sorted({settled[d.name] for dims in shapes for d in dims if d.name in settled})
    expected = " or ".join("[" + ", ".join(_size_texts(dims, sizes, name)) + "]" for dims in shapes)
    return ArgumentValueError(
        _subject(schema, name),
        expected=f"shape {expected}" + (f" to agree with {', '.join(sources)}" if sources else " with no size 0" * (0 in tensor.shape)),
        got=f"shape {list(tensor.shape)}",
        fix="check the order of dimensions and of arguments",
    )


def _size_texts(dims: tuple[Dim, ...], sizes: dict[str, tuple[int, str]], name: str) -> Iterator[str]:
    """Write sizes: their words, with the number where another argument settled it."""
    lead = {1: ("T",), 2: ("B", "S")}.get(_lead(dims), ())
    for word, dim in itertools.zip_longest(lead, dims):
        size, where = sizes.get(dim.name, (0, name))
        yield word or dim.name if where == name else f"{word or dim.name}={size}"


def _check_relation(schema: OpSchema, relation: Any, tensors: dict[str, torch.Tensor], sizes: dict[str, int]) -> None:
    """Refuse sizes that a relation of the schema forbids. A relation about sizes that are absent holds."""
    try:
        holds = eval(relation.expression, {"__builtins__": {}}, sizes)  # noqa: S307 - from the schema, never from a user
    except NameError:
        return
    if not holds:
        words = set(compile(relation.expression, "<relation>", "eval").co_names)
        sized = (name for name in tensors if any(dim.name in words for dim in schema.arg(name).dims_of_rank(tensors[name].dim()) or ()))
        name = relation.arg if relation.arg in tensors else [*sized][-1]
        raise ArgumentValueError(
            _subject(schema, name),
            expected=relation.expected.format(**sizes),
            got=f"shape {list(tensors[name].shape)}",
            fix=relation.fix.format(**sizes),
        )


def _check_memory(schema: OpSchema, arg: Arg, tensor: torch.Tensor) -> None:
    """Refuse elements without memory, rows that are not dense, and destinations that overlap themselves."""
    dims = arg.dims_of_rank(tensor.dim()) or ()
    subject, strides = _subject(schema, arg.name), list(tensor.stride())
    needed, there = tensor.storage_offset() * tensor.element_size() + extent(tensor), tensor.untyped_storage().nbytes()
    if needed > there:
        fix = "call it before the storage is given back, as by resize_(0)"
        raise ArgumentValueError(subject, expected=f"a storage of at least {needed} bytes", got=f"one of {there}", fix=fix)
    if dims and not dims[-1].runtime and tensor.shape[-1] != 1 and strides[-1] != 1:
        raise ArgumentValueError(
            subject,
            expected="an innermost stride of 1",
            got=f"strides {strides} for shape {list(tensor.shape)}",
            fix=f"{arg.name}.contiguous()",
        )
    if arg.role is Role.MUTATED and has_internal_overlap(tensor):
        raise ArgumentValueError(
            subject,
            expected="a destination in which every place has memory of its own",
            got=f"strides {strides} for shape {list(tensor.shape)}",
            fix="pass a real tensor rather than one made by expand or as_strided",
        )


def _check_overlap(schema: OpSchema, tensors: dict[str, torch.Tensor]) -> None:
    """Refuse a source in the address range of a destination, and two destinations that share a byte."""
    mutated = {arg.name: tensors[arg.name] for arg in schema.mutated if arg.name in tensors}
    for target_name, target in mutated.items():
        for name, tensor in tensors.items():
            if name == target_name or tensor.device != target.device:
                continue
            if share_memory(target, tensor) if name in mutated else ranges_overlap(target, tensor):
                raise ArgumentValueError(
                    _subject(schema, name),
                    expected=f"memory outside {target_name}, which is written",
                    got=f"address {tensor.data_ptr():#x} within {target_name} from {target.data_ptr():#x}",
                    fix=f"{name}.clone()" if name not in mutated else f"pass two tensors for {target_name} and {name}",
                )


def _meta(arg: Arg, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return HOST_INT if arg.role is Role.RUNTIME_INT and value is not None else value
    dims = arg.dims_of_rank(value.dim()) or ()
    if dims and not any(dim.runtime for dim in dims):
        return TensorMeta(value.dtype, tuple(value.shape), normalised(value.shape, value.stride()), alignment_of([value.data_ptr()]))
    shape = tuple(None if dim.runtime else size for dim, size in zip(dims, value.shape, strict=True))
    return TensorMeta(value.dtype, shape, None, _runtime_alignment(dims, value))


def _runtime_alignment(dims: tuple[Dim, ...], tensor: torch.Tensor) -> int:
    """Return the alignment class of a tensor with run-time strides: its pointer, its rows' length, and every step.

    A tensor that is read element by element (an index tensor) has the alignment of its elements. The length of a row
    counts, so that one token and many have one class; strides of size-1 dims say nothing and do not.
    """
    size = tensor.element_size()
    if not dims or dims[-1].runtime:
        return alignment_of([tensor.data_ptr(), size])
    steps = [stride * size for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if length > 1]
    return alignment_of([tensor.data_ptr(), tensor.shape[-1] * size, *steps])


def describe(value: Any) -> str:
    """Describe an argument for an error: ``"float32 [8, 128] on cpu"``."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    return repr(value)
