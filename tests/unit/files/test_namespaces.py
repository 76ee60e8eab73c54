"""Namespaces in JSON: what comes out is what went in, with its types, and nothing else is taken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock.errors import FileContentError
from kvdock.files.namespaces import from_json, to_json
from kvdock.prefix.inputs import namespace_key

PARTS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary())
NAMESPACES = st.recursive(st.lists(PARTS).map(tuple), lambda inner: st.lists(PARTS | inner).map(tuple), max_leaves=8)


@given(NAMESPACES)
def test_any_namespace_comes_back(namespace: Any) -> None:
    back = from_json("f", json.loads(json.dumps(to_json(namespace))))
    assert namespace_key("", back) == namespace_key("", namespace)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1,), (True,)),
        ((1,), ("1",)),
        ((b"a",), ("a",)),
        (("a",), (("a",),)),
        ((b"a",), (("bytes", "61"),)),
        ((None,), ()),
        ((0,), (False,)),
    ],
)
def test_what_differs_stays_different(one: Any, other: Any) -> None:
    assert json.dumps(to_json(one)) != json.dumps(to_json(other))


def test_surrogates_and_long_numbers() -> None:
    for part in ("\ud800", 10**4000, -(10**4000), "\0", b"\xff" * 100):
        assert from_json("f", json.loads(json.dumps(to_json((part,))))) == (part,)


DEEP: Any = []
for _ in range(31):
    DEEP = [DEEP]


def test_depth_has_a_limit() -> None:
    from_json("f", DEEP)
    with pytest.raises(FileContentError, match=r"f: namespaces: expected lists of at most 32 levels.*Fix: save it anew"):
        from_json("f", [[DEEP]])


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        "a",
        {},
        [1.5],
        [{}],
        [{"bytes": 1}],
        [{"bytes": "6"}],
        [{"bytes": "zz"}],
        [{"hex": "61"}],
        [{"bytes": "61", "more": 1}],
        [[2.0]],
    ],
)
def test_what_is_no_namespace(value: Any) -> None:
    with pytest.raises(FileContentError, match=r"^f: namespaces: "):
        from_json("f", value)
