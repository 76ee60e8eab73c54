"""``kvdock explain OP``: which kernel would run, and why each other would not."""

from __future__ import annotations

import warnings
from typing import Annotated, Any

import attrs
import torch
import typer

from kvdock import runtime
from kvdock.cli.output import JsonFlag, errors_shown, show_json, show_lines
from kvdock.errors import ArgumentValueError, KVDockWarning
from kvdock.ops.catalog import example

__all__ = ["command", "explain"]


def explain(op: str, *, device: str, dtype: str, backend: str | None, sizes: dict[str, int]) -> dict[str, Any]:
    """Return which kernel of the process's runtime would serve an example call, as what JSON can hold.

    Args:
        op: name of the op.
        device: torch's name of the device.
        dtype: torch's name of the cache dtype.
        backend: backend to ask for by name, or None.
        sizes: heads, head_dim and block_size of the example.

    Raises:
        ArgumentValueError: no such op, dtype or device.
        BackendError: no backend can be chosen.
    """
    args = _example(op, device, _dtype(dtype), sizes)
    current = runtime.default()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KVDockWarning)  # broken plugins are listed below
        explanation = current.dispatcher.explain(op, args, backend)
        others = current.registry.candidates(args[0].device)
    candidates = [attrs.asdict(item) | {"state": item.state.value} for item in others]
    return {**attrs.asdict(explanation), "candidates": candidates}


def _dtype(name: str) -> torch.dtype:
    """Look a dtype up by torch's name for it."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ArgumentValueError("--dtype", expected="torch's name of a dtype, such as bfloat16", got=repr(name))
    return dtype


def _example(op: str, device: str, dtype: torch.dtype, sizes: dict[str, int]) -> tuple[Any, ...]:
    """Build the arguments of an example call on a device."""
    try:
        return example(op, device=torch.device(device), dtype=dtype, **sizes)
    except (RuntimeError, AssertionError) as error:  # what torch raises for a device that it does not know or cannot reach
        lines = str(error).splitlines() or [type(error).__name__]
        got = f"{device!r} and {dtype} ({lines[0]})"
        raise ArgumentValueError("--device and --dtype", expected="a device on which torch can allocate that dtype", got=got) from error


def command(
    op: Annotated[str, typer.Argument(metavar="OP", help="Name of the op, such as paged_caching_.")],
    device: Annotated[str, typer.Option(help="Device of the tensors, as torch names it.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Dtype of the cache, as torch names it.")] = "bfloat16",
    heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Elements per head.")] = 128,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 16,
    backend: Annotated[str | None, typer.Option(help="Backend to ask for by name.")] = None,
    json_output: JsonFlag = False,
) -> None:
    """Say which kernel would serve OP, and why each other candidate would not."""
    sizes = {"heads": heads, "head_dim": head_dim, "block_size": block_size}
    with errors_shown("explain", json_output):
        found = explain(op, device=device, dtype=dtype, backend=backend, sizes=sizes)
    if json_output:
        show_json("explain", found)
    else:
        _show(found)


def _show(found: dict[str, Any]) -> None:
    """Print an explanation for people."""
    show_lines(
        f"{found['op']} on {found['device']} is served by {found['served_by']}: {found['kernel']}",
        f"backend: {found['backend']} ({found['backend_reason']})",
        *(f"not {name}: {', '.join(reasons)}" for name, reasons in found["rejected"]),
        *(f"other backend {item['name']}: {item['reason']}" for item in found["candidates"] if item["name"] != found["backend"]),
    )
