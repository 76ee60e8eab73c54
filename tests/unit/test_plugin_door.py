"""`kvdock.plugin`: what plugins import, what it helps them with, and that old places still lead there."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

import kvdock
from kvdock import plugin
from kvdock.ops import hostcheck, index_values
from support_isolated import answer

OLD_NAMES = sorted(kvdock._MOVED)
META = torch.device("meta")


def test_what_is_listed_is_what_there_is() -> None:
    assert len(plugin.__all__) == len(set(plugin.__all__))
    assert {name for name in vars(plugin) if not name.startswith("_")} == set(plugin.__all__)


def test_all_errors_but_those_of_choosing_are_there() -> None:
    """A plugin raises what is wrong with a call or with itself; who is chosen is core's affair, and caches are the engine's."""
    others = {"AmbiguousBackendError", "BackendUnavailableError", "NoBackendError", "DiscoveryReentryError"}
    others |= {"DroppedCacheError", "FileAccessError", "FileContentError", "OutOfBlocksError"} - set(plugin.__all__)
    assert set(kvdock.errors.__all__) - set(plugin.__all__) == others


@pytest.mark.parametrize("name", OLD_NAMES)
def test_an_old_name_at_the_top_leads_to_the_door_and_says_so(name: str) -> None:
    with pytest.warns(
        DeprecationWarning, match=f"^kvdock.{name} has moved to kvdock.plugin.{name}, and leaves .* with kvdock 0.2$"
    ) as caught:
        assert getattr(kvdock, name) is getattr(plugin, name)
    assert {warning.filename for warning in caught} == {__file__}, "it names the line that is to change"
    assert name not in kvdock.__all__
    assert name in plugin.__all__


def test_old_names_can_be_imported() -> None:
    scope: dict[str, object] = {}
    with pytest.warns(DeprecationWarning, match="kvdock.plugin.Backend"):
        exec("from kvdock import Backend", scope)  # noqa: S102 - so that mypy and ruff need not know the old name
    assert scope["Backend"] is plugin.Backend


@pytest.mark.parametrize("name", index_values.__all__)
def test_the_old_place_of_host_checks_leads_to_the_door_and_says_so(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"^kvdock.ops.hostcheck.{name} has moved to kvdock.plugin.{name}") as caught:
        assert getattr(hostcheck, name) is getattr(plugin, name)
    assert caught[0].filename == __file__


def test_what_never_was_there_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match=r"module 'kvdock\.ops\.hostcheck' has no attribute 'torch'"):
        hostcheck.torch  # noqa: B018 - the look-up is what is tested


def test_the_door_opens_on_no_plugin_and_no_compiler() -> None:
    code = "import json, sys; import kvdock.plugin; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    found = set(answer(code))
    assert "kvdock" in found
    assert not found & {"triton", "kvdock_triton", "kvdock_cpu", "kvdock_conformance", "transformers", "typer"}
    assert "kvdock.plugin" in sys.modules


@pytest.mark.parametrize("dtype", [*plugin.COPY_DTYPES, torch.float8_e4m3fn, torch.float64, torch.complex128])
def test_bits_are_those_of_the_elements(dtype: torch.dtype) -> None:
    tensor = torch.arange(32, dtype=torch.uint8).view(dtype) if dtype is not torch.bool else torch.tensor([True, False])
    seen = plugin.as_bits(tensor)
    assert seen.data_ptr() == tensor.data_ptr()
    assert seen.dtype == plugin.bits_dtype(tensor.element_size())
    assert torch.equal(seen.view(torch.uint8), tensor.view(torch.uint8))


def test_copying_bits_keeps_signalling_nans_and_the_sign_of_zero() -> None:
    odd = torch.tensor([0x7F800001, -0x80000000, 0x7FC00123], dtype=torch.int32).view(torch.float32)
    there = torch.empty_like(odd)
    plugin.as_bits(there).copy_(plugin.as_bits(odd))
    assert torch.equal(there.view(torch.int32), odd.view(torch.int32))


def meta(alignment: int, strides: tuple[int, ...] | None, dim: int = 8) -> plugin.TensorMeta:
    return plugin.TensorMeta(torch.float16, (2, 4, 1, dim), strides, alignment)


@pytest.mark.parametrize(
    ("pool", "others", "size"),
    [
        (meta(16, (32, 8, 0, 1)), [], 16),
        (meta(8, (32, 8, 0, 1)), [], 8),
        (meta(16, (36, 9, 0, 1)), [], 2),
        (meta(16, (32, 8, 0, 1)), [meta(4, None)], 4),
        (meta(16, (28, 7, 0, 1), dim=7), [], 2),
        (meta(16, (24, 6, 0, 1), dim=6), [meta(16, None)], 4),
    ],
)
def test_the_widest_access_divides_everything(pool: plugin.TensorMeta, others: list[plugin.TensorMeta], size: int) -> None:
    assert plugin.common_alignment(pool, *others) == size


def test_quantised_tensors_are_a_reason_whatever_their_name() -> None:
    latents = plugin.TensorMeta(torch.float8_e4m3fn, (2, 4, 8), (32, 8, 1), 16)
    rows = plugin.TensorMeta(torch.bfloat16, (None, 8), None, 16)
    request = plugin.Request("mine_", META, {"latents": latents, "rows": rows, "scale": None, "mode": "x"})
    assert plugin.quantised_reasons(request) == ["quantised caches (torch.float8_e4m3fn) are not there yet"]
    assert plugin.quantised_reasons(plugin.Request("mine_", META, {"rows": rows})) == []


def test_a_counter_keeps_one_count_per_device_and_outlives_inference_mode() -> None:
    counter = plugin.SkipCounter()
    host = torch.device("cpu")
    assert counter.read(host) == 0
    with torch.inference_mode():
        count = counter.prepare(host)
    count.add_(3)
    assert counter.prepare(host) is count
    assert counter.read(host) == 3
    assert counter.read(META) == 0


def test_a_counter_waits_for_all_streams_before_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch, "meta", SimpleNamespace(synchronize=waited.append), raising=False)
    counter = plugin.SkipCounter()
    counter.prepare(META)
    assert waited == [META], "zeros are there before a kernel on another stream adds to them"
    with pytest.raises(RuntimeError, match="meta"):
        counter.read(META)
    assert waited == [META, META]


def test_new_names_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in plugin.__all__:
            getattr(plugin, name)
        for name in kvdock.__all__:
            getattr(kvdock, name)
