"""The page of architectures is what the cache says now."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from integration.architectures import GROUPS
from integration.served import NOT_TRIED, PAGE, REFUSED, SERVED, Row, page, rows
from support_slow import QUICK

WRITTEN = (Path(__file__).parents[2] / "docs" / PAGE).read_text(encoding="utf-8")
SAMPLE = """bart bloom cpmant deepseek_v32 falcon_h1 gemma2 gpt2 jamba kimi_linear llama llama4_text mamba qwen3_next"""


@pytest.mark.skipif(f"Transformers {transformers.__version__}:" not in WRITTEN, reason="the page is of another version of Transformers")
@pytest.mark.filterwarnings("ignore")
def test_the_page_says_what_the_cache_says() -> None:
    """Write it anew with `make architectures`."""
    lines = WRITTEN.splitlines()
    named = sorted(line.split(" | ")[0][2:] for line in lines if line.startswith("| ") and not line.startswith("| architecture"))
    assert named == sorted(GROUPS["causal"])
    for row in rows(SAMPLE.split()[:: 3 if QUICK else 1]):
        assert row.line() in lines


def test_a_row_has_what_is_known() -> None:
    served = Row("a", SERVED, "pages", "2 states", "yes", 1200, 1100)
    text = page([served, Row("b", REFUSED, "no layers"), Row("c", NOT_TRIED, "no model"), Row("d", SERVED, "gathered: x", "", "", 1, 1)])
    assert "2 served, 1 of them on pages; 1 refused;\n1 not tried." in text
    assert "| a | 2 states | pages | yes | 1,200 | 1,100 |" in text
    assert text.endswith("| architecture | why |\n|---|---|\n| c | no model |\n")
    assert "| b | no layers |" in text.split("## Refused")[1].split("## Not tried")[0]
