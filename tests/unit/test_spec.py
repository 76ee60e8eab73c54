"""What the layers of a model need, as values."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

import kvdock
from kvdock.spec import check_cache_dtype, check_int

LAYER = kvdock.LayerSpec(4, 2, 64, 32)


def test_uniform_describes_equal_layers() -> None:
    spec = kvdock.KVSpec.uniform(num_layers=3, num_kv_heads=2, head_dim=8, max_positions=100, dtype=torch.bfloat16)
    assert spec.layers == (kvdock.LayerSpec(2, 2, 8, 8),) * 3
    assert (spec.max_positions, spec.dtype) == (100, torch.bfloat16)
    assert spec == kvdock.KVSpec([kvdock.LayerSpec(2, 2, 8, 8)] * 3, 100, torch.bfloat16)
    assert hash(spec) == hash(kvdock.KVSpec([kvdock.LayerSpec(2, 2, 8, 8)] * 3, 100, torch.bfloat16))


def test_layers_may_come_as_any_sequence_and_are_frozen() -> None:
    given: list[Any] = [LAYER, kvdock.MLALayerSpec(512, 64)]
    spec = kvdock.KVSpec(given, 10, torch.float16)
    given.clear()
    assert spec.layers == (LAYER, kvdock.MLALayerSpec(512, 64))
    assert kvdock.KVSpec(iter(spec.layers), 10, torch.float16) == spec  # type: ignore[arg-type]
    for value, field in ((spec, "layers"), (LAYER, "window"), (spec.layers[1], "rope_dim")):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(value, field, None)


def test_a_window_is_part_of_a_layer() -> None:
    assert kvdock.LayerSpec(1, 1, 8, 8, window=4) != kvdock.LayerSpec(1, 1, 8, 8)
    assert LAYER.window is None


@pytest.mark.parametrize("field", ["num_k_heads", "num_v_heads", "k_dim", "v_dim", "window"])
@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0, kvdock.ArgumentValueError, "expected at least 1, got 0"),
        (-1, kvdock.ArgumentValueError, "expected at least 1, got -1"),
        (2.0, kvdock.ArgumentTypeError, "expected an int of at least 1, got 2.0"),
        (True, kvdock.ArgumentTypeError, "expected an int of at least 1, got True"),
        ("2", kvdock.ArgumentTypeError, "expected an int of at least 1, got '2'"),
    ],
)
def test_a_layer_names_a_wrong_number(field: str, value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"LayerSpec: {field}: {text}"):
        attrs.evolve(LAYER, **{field: value})


@pytest.mark.parametrize("field", ["kv_lora_rank", "rope_dim"])
def test_a_latent_layer_names_a_wrong_number(field: str) -> None:
    with pytest.raises(kvdock.ArgumentValueError, match=f"MLALayerSpec: {field}: expected at least 1, got 0"):
        attrs.evolve(kvdock.MLALayerSpec(512, 64), **{field: 0})


@pytest.mark.parametrize(
    ("layers", "positions", "dtype", "error", "text"),
    [
        ((), 1, torch.float16, kvdock.ArgumentValueError, "layers: expected at least one layer, got none"),
        ((LAYER, 3), 1, torch.float16, kvdock.ArgumentTypeError, r"layers\[1\]: expected a kind of layer, such as a LayerSpec, got 3"),
        (LAYER, 1, torch.float16, kvdock.ArgumentTypeError, "layers: expected a sequence of layers, got LayerSpec.*Fix: "),
        (4, 1, torch.float16, kvdock.ArgumentTypeError, "layers: expected a sequence of layers, got 4"),
        (None, 1, torch.float16, kvdock.ArgumentTypeError, "layers: expected a sequence of layers, got None"),
        ([LAYER], 0, torch.float16, kvdock.ArgumentValueError, "max_positions: expected at least 1, got 0"),
        ([LAYER], 1.5, torch.float16, kvdock.ArgumentTypeError, "max_positions: expected an int"),
        ([LAYER], None, torch.float16, kvdock.ArgumentTypeError, "max_positions: expected an int"),
        ([LAYER], 1, "float16", kvdock.ArgumentTypeError, "dtype: expected one of torch.float16.*got 'float16'"),
        ([LAYER], 1, torch.int32, kvdock.ArgumentTypeError, "dtype: expected one of.*got torch.int32"),
        ([LAYER], 1, torch.int8, kvdock.UnsupportedError, "dtype: .*quantised caches are not there yet"),
        ([LAYER], 1, None, kvdock.ArgumentTypeError, "dtype: .*got None"),
    ],
)
def test_a_spec_names_what_is_wrong(layers: Any, positions: Any, dtype: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"KVSpec: {text}"):
        kvdock.KVSpec(layers, positions, dtype)


@pytest.mark.parametrize("num_layers", [0, -1, 1.0, True])
def test_uniform_names_a_wrong_number_of_layers(num_layers: Any) -> None:
    with pytest.raises(kvdock.KVDockError, match=r"KVSpec\.uniform: num_layers: expected"):
        kvdock.KVSpec.uniform(num_layers=num_layers, num_kv_heads=1, head_dim=8, max_positions=8, dtype=torch.float16)


def test_the_dtypes_are_those_that_are_stored() -> None:
    assert set(kvdock.plugin.COPY_DTYPES) == {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8}
    assert not set(kvdock.plugin.COPY_DTYPES) & set(kvdock.plugin.QUANTISED_DTYPES)
    for dtype in kvdock.plugin.COPY_DTYPES:
        assert check_cache_dtype("x", dtype) is dtype
    for dtype in kvdock.plugin.QUANTISED_DTYPES:
        with pytest.raises(kvdock.UnsupportedError, match=f"^x: .*{dtype}"):
            check_cache_dtype("x", dtype)


def test_an_int_is_returned_as_it_is() -> None:
    assert check_int("x", 3, 3) == 3
    with pytest.raises(kvdock.ArgumentValueError, match=r"^x: expected at least 4, got 3$"):
        check_int("x", 3, 4)
