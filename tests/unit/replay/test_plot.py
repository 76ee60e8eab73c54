from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from kvdock.errors import ArgumentValueError, UnsupportedError
from kvdock.replay import plot_runs
from kvdock.replay.plot import check_can_plot

RUNS: list[dict[str, Any]] = [
    {"pool_tokens": size, "hit_rate": rate, "block_lru": {"tokens": rate - 0.01}}
    for size, rate in ((10**7, 0.29), (999, 0.01), (3 * 10**6, 0.14))
]


@pytest.fixture(autouse=True)
def _matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")


def test_png(tmp_path: Path) -> None:
    path = tmp_path / "rates.png"
    plot_runs(RUNS, 0.37, "a trace", path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_svg_says_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text as text, to be read here
    path = tmp_path / "rates.SVG"
    plot_runs(RUNS, 0.37, "a trace", path)
    words = " ".join(text.strip() for text in ElementTree.parse(path).getroot().itertext())  # noqa: S314 - it was written two lines above
    for word in ("a trace", "10M", "3M", "999", "cache that never evicts", "LRU of 512-token blocks", "replayed", "hit rate (tokens)"):
        assert word in words


def test_one_run_is_enough(tmp_path: Path) -> None:
    plot_runs(RUNS[:1], 0.0, "a trace", tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1000


def test_other_kinds_of_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentValueError, match=r"--plot: expected a file that ends in \.png or \.svg, got '.*rates\.pdf'"):
        plot_runs(RUNS, 0.37, "a trace", tmp_path / "rates.pdf")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArgumentValueError, match=r"--plot: expected a file that can be written, got .*No such file"):
        plot_runs(RUNS, 0.37, "a trace", tmp_path / "no" / "rates.png")


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r'^--plot needs matplotlib.*Fix: pip install "kvdock\[plot\]"$'):
        check_can_plot(Path("rates.png"))
