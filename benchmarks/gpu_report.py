"""Turning the figures of `gpu_ops` into a page."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton

import kvdock

__all__ = ["card_name", "machine", "markdown"]


def card_name() -> str:
    """Return the card's short name: ``h100``."""
    words = torch.cuda.get_device_name(0).lower().replace("-", " ").split()
    return next((word for word in words if any(c.isdigit() for c in word)), words[0])


def machine() -> dict[str, str]:
    """Describe what the figures were taken on."""
    return {
        "card": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "triton": triton.__version__,
        "python": platform.python_version(),
        "kvdock": kvdock.__version__,
    }


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Write a table; floats with two or three digits."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    """Write one value."""
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) and value < 2 else f"{value:.1f}" if isinstance(value, float) else str(value)


def _quartiles(times: Sequence[float] | None) -> str:
    """Write the median and the quartiles."""
    return "-" if times is None else f"{times[1]:.2f} ({times[0]:.2f} .. {times[2]:.2f})"


def _ratios(ratios: dict[str, Sequence[float]]) -> str:
    """Write what each costs of the first: the median of rounds, in each of which all of them ran."""
    return " / ".join(f"{quartiles[1]:.2f}" for quartiles in ratios.values()) or "-"


def markdown(report: dict[str, Any]) -> str:
    """Return the page."""
    parts = [
        f"# {report['machine']['card']}\n",
        ", ".join(f"{k} {v}" for k, v in report["machine"].items()) + ". Made by `make gpu-bench`.\n",
    ]
    for op, rows in report.get("host", {}).items():
        names = list(dict.fromkeys(name for r in rows for name in r["us"]))
        lines = [[r["pattern"], *(_quartiles(r["us"].get(name)) for name in names), _ratios(r["ratios"])] for r in rows]
        head = ["pattern", *(f"{name}, us" for name in names), "ratios to the first"]
        parts += [
            f"## Host time of a call of `{op}`, bf16, 8 x 128: median (quartiles)\n",
            table(head, lines),
        ]
    if "first" in report:
        steps = ", ".join(f"{us:.1f}" for us in report["first"])
        parts.append(f"A thread's first ten steps of 32 layers through `PagedKVCache.update`, us a call: {steps}.\n")
    if "write" in report:
        names = ["kvdock", "C++, one block per token", "2 index_copy_", "2 strided copy_"]
        rows = [[r["geometry"], r["tokens"], r["case"], *(r.get(n) for n in names), r["copy_us"]] for r in report["write"]]
        parts += [
            "## `paged_caching_`: speed relative to `copy_` of the same bytes\n",
            table(["geometry", "tokens", "case", *names, "copy_, us"], rows),
        ]
    if "sizes" in report:
        rows = [[r["tokens"], r["kvdock_us"], r["cpp_us"], r["ratio"]] for r in report["sizes"]]
        parts += [
            "## Every size: sliced, random slots, device time in a graph\n",
            table(["tokens", "kvdock, us", "C++, us", "speed to C++"], rows),
        ]
    if "other" in report:
        rows = [[r["case"], r["tokens"], r["ratio"], r["copy_us"]] for r in report["other"]]
        parts += ["## The other ops: speed relative to `copy_` of the same bytes\n", table(["case", "tokens", "ratio", "copy_, us"], rows)]
    return "\n".join(parts)
