"""``kvdock replay TRACE``: how much of a trace's prompts a prefix cache finds, by the size of the pool, and how quickly."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvdock.cli.output import SCHEMA, JsonFlag, errors_shown, show_json, show_lines, show_table
from kvdock.cli.sizes import show_size, sizes
from kvdock.errors import ArgumentValueError
from kvdock.replay import Rates, ReplaySettings, Trace, plot_runs, read_trace, replay
from kvdock.replay.bounds import block_lru, ceiling
from kvdock.replay.memory import PEAK_METHOD
from kvdock.replay.plot import check_can_plot
from kvdock.replay.run import checked_pool

__all__ = ["command", "replay_file"]

_REFRESH_S = 0.2  # by hand: a thread that draws in between would take time from the operations that are measured


def replay_file(path: Path, pools: Sequence[int], settings: ReplaySettings, limit: int | None = None) -> dict[str, Any]:
    """Replay a trace with each size of pool, showing progress on stderr, and return what was found as what JSON can hold.

    Args:
        path: the trace file.
        pools: sizes of pools, in tokens.
        settings: how to replay.
        limit: how many requests to replay; None for all.

    Raises:
        ArgumentValueError: the trace cannot be read, a request is larger than a pool, a setting that does not exist.
    """
    for pool in pools:
        settings.make_pool(pool)  # a wrong setting shows before the trace is read
    trace = read_trace(path, limit=limit)
    for pool in pools:
        checked_pool(trace, pool, settings)  # ... and a pool that is too small before the first is replayed
    with _progress(len(trace.requests), pools) as steps:
        runs = [
            {**replay(trace, pool, settings, step).as_dict(), "block_lru": _lru(trace, pool)}
            for pool, step in zip(pools, steps, strict=True)
        ]
    return {
        "trace": {
            "path": str(path),
            "format": trace.format,
            "requests": len(trace.requests),
            "input_tokens": trace.input_tokens,
            "output_tokens": trace.output_tokens,
        },
        "settings": attrs.asdict(settings),
        "ceiling": attrs.asdict(ceiling(trace)),
        "peak_memory_method": PEAK_METHOD,
        "runs": runs,
    }


def _lru(trace: Trace, pool: int) -> dict[str, float]:
    found: dict[str, float] = attrs.asdict(block_lru(trace, pool))
    return found


@contextmanager
def _progress(requests: int, pools: Sequence[int]) -> Iterator[list[Callable[[], None]]]:
    """Show a bar for each pool on stderr, and yield for each the function that moves it on by a request."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal) as bars:
        yield [_step(bars, bars.add_task(f"pool {show_size(pool)}", total=requests)) for pool in pools]


def _step(bars: Progress, task: Any) -> Callable[[], None]:
    drawn = time.monotonic()

    def step() -> None:
        nonlocal drawn
        bars.advance(task)
        if time.monotonic() - drawn > _REFRESH_S:
            bars.refresh()
            drawn = time.monotonic()

    return step


def command(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace file: Mooncake's JSON lines or Azure's CSV.")],
    pool: Annotated[list[str], typer.Option(help="Tokens in the pool, such as 3M or 10e6, or several: 1M,3M.")] = ["3M"],  # noqa: B006 - typer reads it, nobody changes it
    block_size: Annotated[int, typer.Option(min=1, max=512, help="Tokens per block of the pool.")] = 16,
    policy: Annotated[str | None, typer.Option(help="What is evicted first: lru, lfu, fifo or priority.")] = None,
    prefix: Annotated[str, typer.Option(help="Name of the prefix cache: radix, naive, or a plugin's.")] = "radix",
    limit: Annotated[int | None, typer.Option(min=1, help="Replay only this many requests, the first ones.")] = None,
    host_tokens: Annotated[str, typer.Option(help="Tokens in a tier behind the pool, such as 30M, which is only counted.")] = "0",
    timed: Annotated[bool, typer.Option("--timed", help="Replay at the trace's times. Running requests hold their blocks.")] = False,
    prefill_rate: Annotated[float, typer.Option(help="With --timed: uncached input tokens per second, for each request.")] = 10_000.0,
    decode_rate: Annotated[float, typer.Option(help="With --timed: output tokens per second, for each request.")] = 30.0,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON object to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw hit rate against pool size into this .png or .svg.")] = None,
    json_output: JsonFlag = False,
) -> None:
    """Replay TRACE on a prefix cache, and report its hit rate, its speed, and the highest possible hit rate."""
    with errors_shown("replay", json_output):
        _check_writable(out, plot)
        rates = Rates(prefill_rate, decode_rate) if timed else None
        settings = ReplaySettings(block_size, prefix, policy, rates, _host_tokens(host_tokens))
        found = replay_file(trace, sizes("--pool", pool), settings, limit)
        if out is not None:
            _write(out, found)
        if plot is not None:
            plot_runs(found["runs"], found["ceiling"]["tokens"], f"{trace.name}: {found['trace']['requests']:,} requests", plot)
    if json_output:
        show_json("replay", found)
    else:
        _show(found)


def _host_tokens(text: str) -> int:
    """Return the size of a tier, which may be 0: then there is none."""
    if text == "0":
        return 0
    found = sizes("--host-tokens", [text])
    if len(found) > 1:
        raise ArgumentValueError("--host-tokens", expected="one size", got=repr(text), fix="name one, and several with --pool")
    return found[0]


def _write(path: Path, found: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps({"schema": SCHEMA, "command": "replay", **found}, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ArgumentValueError("--out", expected="a file that can be written", got=f"{str(path)!r} ({error.strerror})") from error


def _check_writable(out: Path | None, plot: Path | None) -> None:
    """Refuse files that cannot be written, before the work."""
    if plot is not None:
        check_can_plot(plot)
    for option, path in (("--out", out), ("--plot", plot)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ArgumentValueError(option, expected="a file in a folder that exists", got=repr(str(path)), fix=f"mkdir -p {path.parent}")
        if path is not None:
            _try_to_write(option, path)


def _try_to_write(option: str, path: Path) -> None:
    """Open a file as it will be opened after the work, and leave things as they were."""
    new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise ArgumentValueError(option, expected="a file that can be written", got=f"{str(path)!r} ({error.strerror})") from error
    if new:
        path.unlink()


def _show(found: dict[str, Any]) -> None:
    trace, settings, top = found["trace"], found["settings"], found["ceiling"]
    policy = f", {settings['policy']}" if settings["policy"] else ""
    tier = f"; behind the pool a tier of {show_size(settings['host_tokens'])} tokens" if settings["host_tokens"] else ""
    show_lines(
        f"{trace['path']}: {trace['format']}, {trace['requests']:,} requests, {trace['input_tokens']:,} input tokens",
        f"prefix cache: {settings['prefix']}{policy}, blocks of {settings['block_size']}; {_order(settings['rates'])}{tier}",
        f"ceiling (a cache that never evicts): {top['tokens']:.4f} of the tokens, {top['blocks']:.4f} of the trace's blocks",
    )
    more = (*(("waited", "longest wait", "most running") if settings["rates"] else ()), *(("from the tier",) if tier else ()))
    rows_of = [(*_row(run), *((f"{run['loaded_tokens']:,}",) if tier else ())) for run in found["runs"]]
    show_table(("pool", "hit rate", "LRU of 512-token blocks", "Mtokens/s", "evicted", "peak memory", *more), rows_of)
    rows = [row for run in found["runs"] for row in _operations(run)]
    show_lines(*_columns(("pool", "operation", "calls", "total s", "p50 us", "p99 us"), rows))


def _order(rates: dict[str, float] | None) -> str:
    if rates is None:
        return "one request after the other"
    return f"at the trace's times, prefill {rates['prefill']:g} and decode {rates['decode']:g} tokens/s for each request"


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    waits = run["waits"]
    waiting = () if waits is None else (f"{waits['waited']:,}", f"{waits['longest_s']:.1f} s", f"{waits['most_running']:,}")
    return (
        show_size(run["pool_tokens"]),
        f"{run['hit_rate']:.4f}",
        f"{run['block_lru']['tokens']:.4f}",
        f"{run['tokens_per_s'] / 1e6:.1f}",
        f"{run['evicted_tokens']:,}",
        f"{run['peak_memory_bytes'] / 2**20:.0f} MiB",
        *waiting,
    )


def _operations(run: dict[str, Any]) -> list[tuple[str, ...]]:
    pool = show_size(run["pool_tokens"])
    return [
        (pool, name, f"{one['calls']:,}", f"{one['total_s']:.3f}", f"{one['p50_s'] * 1e6:.1f}", f"{one['p99_s'] * 1e6:.1f}")
        for name, one in run["operations"].items()
    ]


def _columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines in columns: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place > 1 else cell.ljust(width) for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in (names, *rows)
    ]
