"""``kvdock explain OP``: which kernel would run, and why each other would not; with ``--run``, what it costs to prepare it.

``kvdock explain transformers MODEL``: how the attention of a model's cache gets keys and values, see `kvdock.cli.explain_model`.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Collection, Mapping
from typing import Annotated, Any

import attrs
import torch
import typer

from kvdock import runtime
from kvdock.cli.counters import counters, show_counters
from kvdock.cli.explain_model import calls_of, explain_model, lines_of
from kvdock.cli.output import JsonFlag, errors_shown, show_json, show_lines
from kvdock.errors import ArgumentValueError, KVDockWarning
from kvdock.ops.catalog import CATALOG
from kvdock.ops.dispatcher import OpDispatcher
from kvdock.ops.modes import use_backend
from kvdock.ops.schema import Arg, OpSchema, Role
from kvdock.spec import QUANTISED_DTYPES

__all__ = ["command", "example", "explain"]

_TRANSFORMERS = "transformers"
"""What stands in place of an op, for the cache of a model of Transformers."""


def explain(op: str, *, device: str, dtype: str | None, backend: str | None, sizes: dict[str, int], calls: int = 0) -> dict[str, Any]:
    """Return which kernel of the process's runtime would serve an example call, as what JSON can hold.

    Args:
        op: name of the op.
        device: torch's name of the device.
        dtype: torch's name of the cache dtype; None for bfloat16, or where the op does not take that, one that it takes.
        backend: backend to ask for by name, or None.
        sizes: heads, head_dim and block_size of the example; of latents also rope_dim.
        calls: how often to call the op with the example, really, in this process and thread. 0 prepares and runs nothing.

    Returns:
        The explanation; under ``descriptors`` what this process's caches have counted for the op; after calls, under
        ``run``, what these took.

    Raises:
        ArgumentValueError: no such op, dtype or device.
        BackendError: no backend can be chosen.
    """
    current = runtime.default()
    schemas = {**CATALOG, **{name: brought.schema for name, brought in current.registry.brought_ops().items()}}
    args = _example(op, device, _dtype(dtype or "bfloat16"), sizes, schemas)
    if dtype is not None:
        _check_taken(schemas[op], _dtype(dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KVDockWarning)  # broken plugins are listed below
        explanation = current.dispatcher.explain(op, args, backend)
        others = current.registry.candidates(torch.device(explanation.device))
        ran = {"run": _run(current.dispatcher, op, args, backend, calls)} if calls else {}
    candidates = [attrs.asdict(item) | {"state": item.state.value} for item in others]
    return {**attrs.asdict(explanation), "candidates": candidates, **ran, "descriptors": counters(current, op)}


def _run(dispatcher: OpDispatcher, op: str, args: tuple[Any, ...], backend: str | None, calls: int) -> dict[str, Any]:
    """Call an op a number of times, and return how long the first call and those after it took on the host."""
    values = [_filled(arg, value) for arg, value in zip(dispatcher.op(op).schema.args, args, strict=True)]
    taken = []
    with contextlib.nullcontext() if backend is None else use_backend(backend):
        for _ in range(calls):
            start = time.perf_counter()
            dispatcher.op(op).call(*values)
            taken.append(time.perf_counter() - start)
    return {"calls": calls, "first_call_s": taken[0], "later_call_s": statistics.median(taken[1:]) if calls > 1 else None}


def _filled(arg: Arg, value: Any) -> Any:
    """Return an argument of the example with indices that differ: pairs of zeros would copy a block onto itself."""
    if arg.role is not Role.TENSOR or not isinstance(value, torch.Tensor) or value.is_floating_point() or value.numel() < 2:
        return value
    return torch.arange(value.numel(), dtype=value.dtype, device=value.device).reshape(value.shape)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ArgumentValueError("--dtype", expected="torch's name of a dtype, such as bfloat16", got=repr(name))
    return dtype


def _check_taken(schema: OpSchema, dtype: torch.dtype) -> None:
    """Refuse a dtype that no tensor of numbers of an op may have: the example would have another, and the answer be about that."""
    numbers = [arg for arg in schema.args if any(taken.is_floating_point for taken in arg.dtypes)]
    if numbers and not any(dtype in arg.dtypes for arg in numbers):
        expected = f"a dtype that {schema.name} takes: {', '.join(map(str, numbers[0].dtypes))}"
        raise ArgumentValueError("--dtype", expected=expected, got=dtype)


def _example(op: str, device: str, dtype: torch.dtype, sizes: dict[str, Any], schemas: Mapping[str, OpSchema]) -> tuple[Any, ...]:
    try:
        return example(op, device=torch.device(device), dtype=dtype, schemas=schemas, **sizes)
    except (RuntimeError, AssertionError) as error:  # what torch raises for a device that it does not know or cannot reach
        lines = str(error).splitlines() or [type(error).__name__]
        got = f"{device!r} and {dtype} ({lines[0]})"
        raise ArgumentValueError("--device and --dtype", expected="a device on which torch can allocate that dtype", got=got) from error


def example(
    op: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    head_dim: int,
    block_size: int,
    rope_dim: int = 0,
    schemas: Mapping[str, OpSchema] = CATALOG,
    present: Collection[str] = (),
) -> tuple[Any, ...]:
    """Return small arguments for an op, in its schema's order: what is asked about. All zeros.

    Arguments that may not have ``dtype``, such as indices, get the last of theirs; sizes of other names are 1. The ops are those of
    ``schemas``; optional arguments are there where ``present`` names them, and scales of quantised caches. With ``rope_dim`` caches
    hold latents, of ``head_dim`` elements with those of the rotary part, and values are a view of the keys.

    Raises:
        ArgumentValueError: there is no such op; lists those there are.
    """
    if op not in schemas:
        raise ArgumentValueError("op", expected=f"one of {', '.join(sorted(schemas))}", got=repr(op))
    sizes = {"NB": 2, "NBs": 2, "NBd": 2, "C": 2, **dict.fromkeys(("block", "vblock", "S"), block_size)}
    sizes |= dict.fromkeys(("Hq", "Hk", "Hv"), heads) | dict.fromkeys(("Dk", "Dv", "Dc", "Dp"), head_dim) | {"Dw": 2 * head_dim}
    if rope_dim:
        sizes |= dict.fromkeys(("Dv", "Dc"), head_dim - rope_dim) | {"Dp": rope_dim, "Dw": head_dim}

    def build(arg: Arg) -> Any:
        if not arg.is_tensor:
            return arg.default
        if arg.optional and arg.name not in present and not (arg.scale_of and dtype in QUANTISED_DTYPES):
            return None
        shape = [sizes.get(dim.name, dim.literal or 1) for dim in arg.shapes()[0]]
        return torch.zeros(shape, dtype=dtype if dtype in arg.dtypes else arg.dtypes[-1], device=device)

    made = {arg.name: build(arg) for arg in schemas[op].args}
    if rope_dim and {"k_cache", "v_cache"} <= made.keys():
        made["v_cache"] = made["k_cache"][..., : head_dim - rope_dim]
    return tuple(made.values())


def command(
    op: Annotated[str, typer.Argument(metavar="OP", help="Name of the op, such as paged_caching_; or transformers, for a model's cache.")],
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="With transformers: a folder with a config.json, such a file, or a name on the hub."),
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the tensors, as torch names it.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the cache, as torch names it. Default: bfloat16, or the model's.", show_default=False)
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="KV heads of an op. Default: 8.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Elements per head of an op. Default: 128.")] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 16,
    backend: Annotated[str | None, typer.Option(help="Use this backend, whatever else would be chosen.")] = None,
    run: Annotated[int, typer.Option(min=0, help="Call the op this many times with small tensors, and show times and counters.")] = 0,
    json_output: JsonFlag = False,
) -> None:
    """Show which kernel would serve OP, and why the other candidates would not; or why the cache of MODEL reads pages, or gathers."""
    with errors_shown("explain", json_output):
        _check_arguments(op, model, {"--heads": heads, "--head-dim": head_dim})
        if model is None:
            sizes = {"heads": heads or 8, "head_dim": head_dim or 128, "block_size": block_size}
            found = explain(op, device=device, dtype=dtype, backend=backend, sizes=sizes, calls=run)
        else:
            found = explain_model(model, device=device, dtype=None if dtype is None else _dtype(dtype), block_size=block_size)
            ops, of_cache = calls_of(found)
            found["ops"] = [explain(name, device=device, **of_cache, backend=backend, calls=run) for name in ops]
    if json_output:
        show_json("explain", found)
        return
    if model is not None:
        show_lines(*lines_of(found))
    for shown in found.get("ops", [found]):
        _show(shown)


def _check_arguments(op: str, model: str | None, sizes: dict[str, int | None]) -> None:
    if (op == _TRANSFORMERS) != (model is not None):
        expected = "a model behind 'transformers', and nothing behind an op"
        raise ArgumentValueError("MODEL", expected=expected, got="nothing" if model is None else f"{model!r} behind {op!r}")
    for option, size in sizes.items():
        if model is not None and size is not None:
            raise ArgumentValueError(option, expected="no such option with a model, which has sizes of its own", got=size)


def _show(found: dict[str, Any]) -> None:
    told = [found["backend"], *(name for name, _ in found["rejected"])]
    show_lines(
        f"{found['op']} on {found['device']} is served by {found['served_by']}: {found['kernel']}",
        f"backend: {found['backend']} ({found['backend_reason']})",
        *(f"not {name}: {', '.join(reasons)}" for name, reasons in found["rejected"]),
        *(f"other backend {item['name']}: {item['reason']}" for item in found["candidates"] if item["name"] not in told),
        *([_run_text(found["run"])] if "run" in found else []),
    )
    if found["descriptors"]:
        show_counters(found["descriptors"])
    else:
        show_lines("descriptors: none yet; --run 3 calls the op three times and shows the counters")


def _run_text(run: dict[str, Any]) -> str:
    later = "" if run["later_call_s"] is None else f", each later one {run['later_call_s'] * 1e6:.1f} us"
    return f"called {run['calls']} times: the first took {run['first_call_s'] * 1e3:.3f} ms of host time{later}"
