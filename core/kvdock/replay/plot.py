"""Hit rate against the size of the pool, as a picture. Needs the extra ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdock.errors import ArgumentValueError, UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_can_plot", "plot_runs"]

_SUFFIXES = (".png", ".svg")


def check_can_plot(path: Path) -> None:
    """Raise unless `plot_runs` can write to ``path``, so that this shows before the work and not after.

    Raises:
        ArgumentValueError: neither a .png nor an .svg.
        UnsupportedError: matplotlib is not installed.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ArgumentValueError("--plot", expected=f"a file that ends in {' or '.join(_SUFFIXES)}", got=repr(str(path)))
    try:
        import matplotlib as matplotlib
    except ModuleNotFoundError as error:
        raise UnsupportedError("--plot needs matplotlib", got=str(error), fix='pip install "kvdock[plot]"') from error


def plot_runs(runs: Sequence[dict[str, Any]], ceiling: float, title: str, path: Path) -> None:
    """Draw the hit rates of runs of one trace.

    Args:
        runs: for each its ``pool_tokens``, its ``hit_rate`` and its ``block_lru``; at least one.
        ceiling: the hit rate of a cache that never evicts.
        title: what stands above.
        path: where to write; .png or .svg.

    Raises:
        ArgumentValueError: the file cannot be written, or see `check_can_plot`.
        UnsupportedError: see `check_can_plot`.
    """
    check_can_plot(path)
    from matplotlib.figure import Figure  # without pyplot, which would keep state and look for a screen

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    _draw(figure.subplots(), sorted(runs, key=lambda run: run["pool_tokens"]), ceiling, title)
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise ArgumentValueError("--plot", expected="a file that can be written", got=f"{str(path)!r} ({error.strerror})") from error


def _draw(axes: Axes, runs: Sequence[dict[str, Any]], ceiling: float, title: str) -> None:
    sizes = [run["pool_tokens"] for run in runs]
    axes.axhline(ceiling, color="0.5", linestyle=":", label="cache that never evicts")
    axes.plot(sizes, [run["block_lru"]["tokens"] for run in runs], "s--", color="tab:orange", label="LRU of 512-token blocks")
    axes.plot(sizes, [run["hit_rate"] for run in runs], "o-", color="tab:blue", label="replayed")
    axes.set_xscale("log")
    axes.set_xticks(sizes, [_short(size) for size in sizes])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="pool size (tokens)", ylabel="hit rate (tokens)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()


def _short(tokens: int) -> str:
    """Return a size for an axis: three digits and a letter."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= factor:
            return f"{tokens / factor:.3g}{letter}"
    return str(tokens)
