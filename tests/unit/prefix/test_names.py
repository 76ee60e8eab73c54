"""Names of blocks: what they are, what they tell apart, and that they are the same everywhere."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvdock
from kvdock.prefix import block_names, root_name

PARTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=4) | st.binary(max_size=4),
    lambda parts: st.lists(parts, max_size=3).map(tuple),
    max_leaves=5,
)
NAMESPACES = st.lists(PARTS, max_size=3).map(tuple)


def by_hand(tokens: list[int], block_size: int, namespace: str) -> list[bytes]:
    """The scheme as its docstrings say it, one token at a time."""
    name = hashlib.sha256(b"kvdock root 1\0" + str(block_size).encode() + b"\0" + namespace.encode()).digest()
    names = []
    for begin in range(0, len(tokens) - block_size + 1, block_size):
        packed = b"".join(struct.pack("<q", token) for token in tokens[begin : begin + block_size])
        name = hashlib.sha256(b"kvdock block 1\0" + name + packed).digest()
        names.append(name)
    return names


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), st.integers(1, 9))
def test_the_scheme(tokens: list[int], block_size: int) -> None:
    assert block_names(tokens, block_size, ("tenant", 7)) == by_hand(tokens, block_size, "('tenant', 7)")


def test_names_never_change() -> None:
    """Written by the first version; files and other processes have names: another scheme needs another tag."""
    assert root_name(16, ("a",)).hex() == "03fadcaebfbdaec3dea3cbfc09b2d33115d6bee74a11bc6aceff3760bde0c484"
    assert block_names(range(32), 16)[1].hex() == "0a531b3e9cbab0f8ab173bc1c0e3152909abc693d45330189a6c8be6aece5fc9"


@given(NAMESPACES, NAMESPACES)
def test_namespaces_share_no_name(one: tuple[object, ...], other: tuple[object, ...]) -> None:
    same = repr(one) == repr(other)
    assert (root_name(4, one) == root_name(4, other)) is same
    assert (set(block_names(range(8), 4, one)).isdisjoint(block_names(range(8), 4, other))) is not same


@pytest.mark.parametrize(
    "pair",
    [(("1",), (1,)), ((1,), (True,)), ((0,), (False,)), (("a",), (b"a",)), (("a",), (("a",),)), ((), (None,)), (("a", "b"), ("ab",))],
)
def test_values_that_look_alike(pair: tuple[tuple[object, ...], tuple[object, ...]]) -> None:
    assert root_name(4, pair[0]) != root_name(4, pair[1])


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(0, 7))
def test_a_chain_can_go_on(tokens: list[int], blocks: int) -> None:
    names = block_names(tokens, 4)
    cut = min(blocks, len(names))
    parent = names[cut - 1] if cut else None
    assert names[:cut] + block_names(tokens[cut * 4 :], 4, parent=parent) == names


def test_equal_tokens_behind_unlike_ones_differ() -> None:
    assert block_names([1, 2, 9, 9], 2)[1] != block_names([1, 3, 9, 9], 2)[1]
    assert block_names([5, 5, 5, 5], 2)[0] != block_names([5, 5, 5, 5], 2)[1]


def test_block_sizes_share_no_name() -> None:
    assert set(block_names([0] * 12, 2)).isdisjoint(block_names([0] * 12, 3))


def test_kinds_of_integers() -> None:
    expected = block_names([1, 2, 3, 4], 2)
    strided = np.arange(1, 9, dtype=np.int16)[:4]
    for tokens in (np.array([1, 2, 3, 4], np.int32), torch.tensor([1, 2, 3, 4]), strided, np.arange(1, 9)[::1][:4], (1, 2, 3, 4)):
        assert block_names(tokens, 2) == expected
    assert block_names(np.array([1, 0, 2, 0, 3, 0, 4])[::2], 2) == expected
    assert block_names([], 2) == block_names([1], 2) == []


def test_other_processes_agree() -> None:
    """Python salts the hashes of str in each process."""
    code = "from kvdock.prefix import block_names; print(hash('tenant'), block_names(range(8), 4, ('tenant', b'x', None))[1].hex())"
    env = {"PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60)
    salted, name = done.stdout.split()
    assert int(salted) != hash("tenant")
    assert name == block_names(range(8), 4, ("tenant", b"x", None))[1].hex()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: block_names([0.5, 1.5], 2), kvdock.ArgumentTypeError, "integers"),
        (lambda: block_names([1, 2], 0), kvdock.ArgumentValueError, "block_size"),
        (lambda: block_names([1, 2], 2, ("a", 1.5)), kvdock.ArgumentTypeError, "1.5"),
        (lambda: block_names([1, 2], 2, "tenant"), kvdock.ArgumentTypeError, "tuple"),
        (lambda: block_names([1, 2], 2, parent="name"), kvdock.ArgumentTypeError, "bytes"),
        (lambda: block_names([1, 2], 2, parent=b"name"), kvdock.ArgumentValueError, "4 bytes"),
        (lambda: root_name(2, (10**5000,)), kvdock.ArgumentValueError, "digits"),
    ],
)
def test_errors(call, error, text) -> None:
    with pytest.raises(error, match=text):
        call()
