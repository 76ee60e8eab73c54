"""Layouts as bytes: what comes back is what was written, and nothing from outside is believed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

import kvdock
from kvdock.errors import TransferError
from kvdock.layers import Buffer, StateLayerSpec
from kvdock.transfer import PoolLayout, check_compatible
from kvdock.transfer.compatibility import differences
from kvdock.transfer.wire import MOST_BYTES, VERSION, read, written
from support_transfer import OPS, Side, sealed

SPEC = kvdock.KVSpec((kvdock.LayerSpec(4, 2, 3, 5), kvdock.MLALayerSpec(5, 2)), 4096, torch.bfloat16)
STATES = kvdock.KVSpec((StateLayerSpec([Buffer("conv", (3, 5), torch.bfloat16)]),), 64, torch.bfloat16)


def layout_of(spec: kvdock.KVSpec = SPEC, ranks: int = 2, rank: int = 1, model: str = "m", **config: Any) -> PoolLayout:
    """Return the layout of one rank's cache."""
    place = kvdock.RankInfo("cpu", ranks, rank)
    return PoolLayout.of(kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(num_blocks=5, **config), place, ops=OPS), place, model)


@pytest.mark.parametrize("spec", [SPEC, STATES], ids=["heads and latents", "states"])
def test_what_is_read_is_what_was_written(spec: kvdock.KVSpec) -> None:
    layout = layout_of(spec)
    message = layout.to_bytes()
    assert message.startswith(b"kvdock-transfer/%d layout " % VERSION)
    assert PoolLayout.from_bytes("p", message) == layout


def test_a_layout_says_which_heads_of_the_model_a_rank_has() -> None:
    places = {(place.layer, place.name): place for place in layout_of(ranks=4, rank=3).places}
    assert attrs.astuple(places[0, "k"])[-5:] == ("bfloat16", 0, 3, 4, 1)
    assert attrs.astuple(places[0, "v"])[-5:] == ("bfloat16", 0, 1, 2, 1), "two ranks hold the same value head"
    assert (places[0, "k"].copies(4), places[0, "v"].copies(4), places[1, "kv"].copies(4)) == (1, 2, 4)
    assert (places[0, "v"].whole, places[1, "kv"].whole, places[1, "kv"].split) == ((2, 5), (7,), -1)


MESSAGES: dict[str, tuple[object, str]] = {
    "another version": (
        b"kvdock-transfer/1 layout\n{}",
        r"message of peer 'p0': expected version 2 of kvdock's transfers, got version 1\. Fix: run",
    ),
    "not even a number": (b"kvdock-transfer/\xff\xff layout\n{}", "got version \ufffd\ufffd"),
    "pickle": (b"\x80\x04\x95\x10\x00", r"message of peer 'p0': expected one of kvdock's transfers, got b'"),
    "empty": (b"", "expected one of kvdock's transfers, got b''"),
    "no line": (b"kvdock-transfer/2 " + b"x" * 100, "expected one of kvdock's transfers"),
    "another kind": (b"kvdock-transfer/2 ask\n{}", "expected a layout, got 'ask'"),
    "no JSON": (b"kvdock-transfer/2 layout\n{", "expected JSON behind its first line, got Expecting"),
    "no text": (b"kvdock-transfer/2 layout\n\xff\xfe{}", "expected JSON behind its first line"),
    "very deep": (b"kvdock-transfer/2 layout\n" + b"[" * 200_000, "expected JSON behind its first line, got maximum recursion"),
    "digits": (b"kvdock-transfer/2 layout\n" + b"9" * 5000, "expected JSON behind its first line, got Exceeds the limit"),
    "no object": (b"kvdock-transfer/2 layout\n[1]", "layout of peer 'p0': expected an object, got list"),
    "nothing in it": (b"kvdock-transfer/2 layout\n{}", r"layout of peer 'p0': tp_size: expected an integer from 1 to 65536, got None"),
    "too long": (bytes(MOST_BYTES + 1), f"expected at most {MOST_BYTES} bytes, got {MOST_BYTES + 1} bytes"),
    "no bytes": ("kvdock-transfer/2 layout\n{}", "expected bytes, got str"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_is_no_layout_is_refused_by_the_peers_name(name: str) -> None:
    message, text = MESSAGES[name]
    if isinstance(message, bytes) and message.startswith(b"kvdock-transfer/2 ") and b"\n" in message:
        message = sealed(message)
    with pytest.raises(TransferError, match=text) as caught:
        PoolLayout.from_bytes("p0", message)  # type: ignore[arg-type]  # some are no bytes
    assert "'p0'" in str(caught.value)


def test_the_version_is_compared_before_anything_is_decoded() -> None:
    with pytest.raises(TransferError, match="got version 7"):
        read("p", b"kvdock-transfer/7 \xff\n" + b"[" * 200_000)


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return the message of a layout with something else in it."""
    body = json.loads(layout_of().to_bytes().split(b"\n", 1)[1])
    change(body)
    return written("layout", body)


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "rank": (lambda body: body.update(tp_rank=2), "tp_rank: expected an integer from 0 to 1, got 2"),
    "a flag for a number": (lambda body: body.update(num_blocks=True), "num_blocks: expected an integer from 1 to .*, got True"),
    "a float": (lambda body: body.update(num_blocks=5.0), "num_blocks: expected an integer .*, got 5.0"),
    "regions": (lambda body: body.update(regions=7), "regions: expected a list of at most 65536, got 7"),
    "too many": (lambda body: body.update(regions=[0] * 70_000), "regions: expected a list of at most 65536, got '70000 of them'"),
    "model": (lambda body: body.update(model="m" * 300), "model: expected a text of at most 256 characters"),
    "state": (lambda body: body["groups"][0].update(is_state=1), r"groups\[0\]: is_state: expected true or false, got 1"),
    "group": (lambda body: body["places"][0].update(group=1), r"places\[0\]: group: expected an integer from 0 to 0, got 1"),
    "dtype": (lambda body: body["places"][0].update(dtype="object"), "dtype: expected one of float16, .*, got 'object'"),
    "name": (lambda body: body["places"][0].update(name=None), r"places\[0\]: name: expected a text"),
    "no place": (lambda body: body["places"].append(3), r"places\[3\]: expected an object, got int"),
    "fewer strides": (lambda body: body["places"][0]["strides"].pop(), "strides: expected 3, got 2"),
    "elements apart": (
        lambda body: [body.update(regions=[10**7] * len(body["regions"])), body["places"][0]["strides"].__setitem__(-1, 4)],
        "strides: expected elements side by side, 2 bytes each, got 4 bytes",
    ),
    "behind the end": (
        lambda body: body["places"][0].update(offset=10**6),
        "offset and strides: expected bytes of a region of .*, got bytes up to",
    ),
    "wide strides": (lambda body: body["places"][0].update(block_stride=10**6), "offset and strides: expected bytes of a region"),
    "more blocks": (lambda body: body.update(num_blocks=6), "offset and strides: expected bytes of a region"),
    "large shape": (lambda body: body["places"][0].update(shape=[2, 10**6]), "offset and strides: expected bytes of a region"),
    "no dimension": (lambda body: body["places"][0].update(split=2), "split: expected an integer from -1 to 1, got 2"),
    "other heads": (
        lambda body: body["places"][0].update(start=0),
        "start, total and head: expected elements 2 to 4 of 4, .* on rank 1 of 2, got 0 to 2",
    ),
    "no head": (lambda body: body["places"][0].update(head=0), "start, total and head"),
    "odd heads": (lambda body: body["places"][0].update(total=3), "total: expected heads that its ranks share evenly, got"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_numbers_that_no_pool_has(name: str) -> None:
    change, text = BROKEN[name]
    with pytest.raises(TransferError, match=text) as caught:
        PoolLayout.from_bytes("p0", changed(change))
    assert "'p0'" in str(caught.value)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_changed_is_refused_or_a_layout(seed: int) -> None:
    """No other error comes out, and what is taken stays within its regions."""
    chance = random.Random(seed)  # noqa: S311 - what is drawn is a test case
    original = layout_of().to_bytes()
    for _ in range(150):
        message = bytearray(original)
        for _ in range(chance.randint(1, 4)):
            message[chance.randrange(len(message))] = chance.choice(b'0123456789-[]{}",:tn.eE\xff\x00')
        try:
            layout = PoolLayout.from_bytes("p", bytes(message))
        except TransferError:
            continue
        assert all(0 <= place.offset < layout.regions[place.region] for place in layout.places)


def test_what_may_differ() -> None:
    mine = layout_of()
    for other in (layout_of(ranks=1, rank=0), layout_of(ranks=8, rank=5), layout_of(block_size=8), layout_of(alignment=256)):
        check_compatible("p", mine, other)
        check_compatible("p", other, mine)


WINDOW = kvdock.KVSpec((kvdock.LayerSpec(4, 2, 3, 5, window=9), kvdock.MLALayerSpec(5, 2)), 4096, torch.bfloat16)
NARROW = kvdock.KVSpec((kvdock.LayerSpec(4, 2, 3, 5, window=5), kvdock.MLALayerSpec(5, 2)), 4096, torch.bfloat16)
MORE = kvdock.KVSpec((kvdock.LayerSpec(8, 2, 3, 5), SPEC.layers[1]), 64, SPEC.dtype)
OTHERS: dict[str, tuple[PoolLayout, PoolLayout, str]] = {
    "weights": (layout_of(), layout_of(model="other"), "model 'other' where this is 'm'"),
    "dtype": (
        layout_of(),
        layout_of(attrs.evolve(SPEC, dtype=torch.float16)),
        "layer 0, 'k': dtype float16 where this is bfloat16; layer 0, 'v': dtype .*; layer 1, 'kv': dtype",
    ),
    "heads": (layout_of(), layout_of(MORE), r"layer 0, 'k': \[8, 3\] in the whole model where this is \[4, 3\]"),
    "layers": (layout_of(), layout_of(kvdock.KVSpec(SPEC.layers[:1], 64, SPEC.dtype)), "layer 1 keeps 'kv' only on this side"),
    "more layers": (layout_of(kvdock.KVSpec(SPEC.layers[:1], 64, SPEC.dtype)), layout_of(), "layer 1 keeps 'kv' only on its side"),
    "windows": (layout_of(WINDOW), layout_of(NARROW), r"layer 0, 'k': KeepWindow\(window=5, sinks=0\) where this is KeepWindow\(window=9"),
    "shares of states": (
        layout_of(STATES),
        layout_of(STATES, 1, 0),
        "layer 0, 'conv': a state of 1 ranks where this is of 2: how ranks share it is not known",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_must_not_differ(name: str) -> None:
    mine, theirs, text = OTHERS[name]
    with pytest.raises(TransferError, match=rf"^layout of peer 'p0': expected keys and values of the same model, got {text}"):
        check_compatible("p0", mine, theirs)


def test_windows_of_one_side_may_be_kept_whole_on_the_other() -> None:
    check_compatible("p", layout_of(WINDOW), layout_of(WINDOW, keep_all=True))


def test_what_differs_is_told_in_three_and_the_rest_counted() -> None:
    mine = Side.make(kvdock.KVSpec((kvdock.LayerSpec(2, 2, 2, 2),) * 4, 64, torch.float16), 1, 4).layouts[0]
    other = Side.make(kvdock.KVSpec((kvdock.LayerSpec(2, 2, 2, 2),) * 4, 64, torch.bfloat16), 1, 4).layouts[0]
    assert len(list(differences(mine, other))) == 8
    with pytest.raises(TransferError, match=", and 5 more"):
        check_compatible("p", mine, other)
