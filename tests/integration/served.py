"""What `PagedCacheForTransformers` says to every causal architecture of the installed Transformers, as a page.

    PYTHONPATH=tests python -m integration.served --out docs     # writes transformers-architectures.md

Each is made small, with random weights, and asked. What is served generates, and its tokens are compared with those of Transformers' own
cache: the page is not written where they differ.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from integration import zoo
from integration.architectures import GROUPS, configure
from integration.prefixes import reusing
from kvdock import KVDockError
from kvdock.integrations.transformers.states import held

PAGE = "transformers-architectures.md"
MOST_WEIGHTS = 100_000_000
ALL = 4
"""Layers of a decoder, see `SIZES`; here an encoder beside it, of whose layers Transformers' cache has as many, has no more."""

TRIED = ("as it comes", "dims that fit", "other dims")
"""Variants of small configurations, of which the first that runs is taken."""

_CONVOLUTIONS: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 2}
_LINEAR: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"] * 2}
SMALL_STATES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _LINEAR,
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8},
    "zamba": {  # it ties the weights of two such layers
        "num_hidden_layers": 6,
        "layer_types": ["linear_attention", "linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "zamba2": {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2},
}
"""What makes layers with states of single families, and makes them small."""

SERVED, REFUSED, NOT_TRIED = "served", "refused", "not tried"


@attrs.frozen
class Row:
    """What came of an architecture.

    Args:
        model_type: its configurations' type.
        verdict: `SERVED`, `REFUSED` or `NOT_TRIED`.
        reason: why it is not served; of one that is how attention gets keys and values.
        layers: what its layers keep.
        prefixes: "yes", or why prefixes are not reused.
        paged: bytes of a batch in the pool, and states beside it.
        dynamic: bytes in Transformers' own cache.
    """

    model_type: str
    verdict: str
    reason: str
    layers: str = ""
    prefixes: str = ""
    paged: int = 0
    dynamic: int = 0

    def line(self) -> str:
        """Return the row of the page."""
        sizes = f"{self.paged:,} | {self.dynamic:,}" if self.dynamic else "- | -"
        cells = (self.layers, self.reason, self.prefixes, sizes) if self.verdict == SERVED else (self.reason,)
        return f"| {' | '.join([self.model_type, *cells])} |"


def configured(model_type: str, variant: str = TRIED[0]) -> tuple[Any, Any]:
    """Return the class of a family's models, and a small configuration."""
    name = GROUPS["causal"][model_type]
    of = getattr(transformers, name if isinstance(name, str) else name[0])
    kind = CONFIG_MAPPING[model_type]
    kind = of.config_class if of.config_class in kind.sub_configs.values() else kind
    given = {"is_encoder_decoder": False, "encoder_layers": ALL} if kind().is_encoder_decoder else {}
    return of, configure(kind, variant, **given, **SMALL_STATES.get(model_type, {}))


def build(model_type: str, variant: str = TRIED[0]) -> Any:
    """Make a small model with random weights.

    Raises:
        MemoryError: it does not get small.
    """
    of, config = configured(model_type, variant)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        size = sum(weight.numel() for weight in of(config).parameters())
    if size > MOST_WEIGHTS:
        raise MemoryError(f"it does not get small: {size:,} weights")
    torch.manual_seed(1)
    made = zoo.randomise(of(config).eval())
    made.generation_config.eos_token_id = zoo.VOCAB - 1  # as the rest of the tests have it
    return made


def told(error: Exception) -> str:
    """Return an error in a cell of a table: what it says, without what to do."""
    if isinstance(error, KVDockError):
        return _cell(f"{error.expected}, got {error.got}")
    return _cell(f"{type(error).__name__}: {error}")


def _cell(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return line if len(line) <= 160 else f"{line[:160].rsplit(' ', 1)[0]} ..."


def row(model_type: str) -> Row:
    """Ask for one architecture."""
    found = [Row(model_type, NOT_TRIED, "")]
    while found[-1].verdict == NOT_TRIED and len(found) <= len(TRIED):
        found.append(_row(model_type, TRIED[len(found) - 1]))
    return found[1] if found[-1].verdict == NOT_TRIED else found[-1]


def _row(model_type: str, variant: str) -> Row:
    try:
        made = build(model_type, variant)
        cache, dynamic = zoo.paged(made, num_blocks=256), zoo.dynamic(made)
        expected = zoo.generate(made, dynamic, "left-padded")
    except KVDockError as error:
        return Row(model_type, REFUSED, told(error))
    except Exception as error:  # noqa: BLE001 - no small model runs, or it takes something else than token ids
        return Row(model_type, NOT_TRIED, told(error))
    got = zoo.generate(made, cache, "left-padded")
    if not torch.equal(expected.sequences, got.sequences):
        raise AssertionError(f"{model_type}: other tokens than with DynamicCache")
    found, usage = cache.explain(), cache.usage
    how = f"gathered: {found.reason}" if found.attention == "gather" else _pages(found.layers)
    sizes = usage.bytes + usage.state_bytes, bytes_of(dynamic)
    return Row(model_type, SERVED, _cell(how), kinds(cache), prefixes(made), *sizes)


def _pages(layers: Iterable[str]) -> str:
    gathering = Counter(filter(None, layers))
    return "; ".join(["pages", *(f"{count} gathered: {reason}" for reason, count in gathering.items())])


def prefixes(made: Any) -> str:
    """Return whether prefixes are reused."""
    try:
        reusing(made)
    except KVDockError as error:
        return _cell(f"no: {error.expected.split(',')[0]}, got {error.got}")
    return "yes"


def kinds(cache: Any) -> str:
    """Return what the layers of a cache keep."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(map(_kind, cache.layers)).items())


def _kind(layer: Any) -> str:
    if not hasattr(layer, "index"):
        return "states" if hasattr(layer, "conv_states") else "of another's, or nothing"
    kind = "latents" if layer.rope else "keys and values"
    return kind + (" in a window" if layer.window else "") + (" and states" if hasattr(layer, "conv_states") else "")


def bytes_of(cache: Any) -> int:
    """Return the bytes that Transformers' own cache holds."""
    kept = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    states = [of[key] for layer in cache.layers for of, key in held(layer)]
    return sum(tensor.nbytes for tensor in (*kept, *states) if tensor is not None)


def rows(names: Iterable[str]) -> Iterator[Row]:
    """Ask for architectures, one after another."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        yield from map(row, names)


def page(found: list[Row]) -> str:
    """Return the page of all architectures."""
    counts = Counter(each.verdict for each in found)
    pages = sum(each.verdict == SERVED and not each.reason.startswith("gathered") for each in found)
    parts = [
        f"""# Architectures of Transformers

Written by `make architectures`, which tries every causal architecture of the installed Transformers, made small and with random
weights. What is said of an architecture is what [the cache](transformers.md) said of that model.

Transformers {transformers.__version__}: {counts[SERVED]} served, {pages} of them on pages; {counts[REFUSED]} refused;
{counts[NOT_TRIED]} not tried.

## Served

The tokens of a batch with padding are those of `DynamicCache`. *Prefixes*: whether they are reused. *Bytes* are those of three rows of
24 tokens, padding included: blocks of 4 tokens, and states, beside what `DynamicCache` has. No window is shorter than these rows.

| architecture | layers keep | attention | prefixes | bytes | of `DynamicCache` |
|---|---|---|---|---|---|""",
        *(each.line() for each in found if each.verdict == SERVED),
    ]
    titles = {REFUSED: "The error's own words.", NOT_TRIED: "There is no small model that generates from token ids."}
    for verdict, text in titles.items():
        parts += [f"\n## {verdict.capitalize()}\n\n{text}\n\n| architecture | why |\n|---|---|"]
        parts += [each.line() for each in found if each.verdict == verdict]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="folder of the page; without, it is printed")
    out = parser.parse_args().out
    text = page(list(rows(sorted(GROUPS["causal"]))))
    if out is None:
        sys.stdout.write(text)
    else:
        (out / PAGE).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
